"""Case -> Pair: the reference with random weights, the candidate made from it by the swap, and each side's masks."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.case import Case
from harness.cell.sampling import is_large, places_of
from harness.cell.side import OwnCaches, Side, Steps, filled_variant, run_variant
from harness.kernels.call import AttentionCall, ContractBroken, Kernel, WrongDtype
from harness.kernels.prefill import PrefillByEager
from harness.references import Reference, RunRows, reference_of
from harness.swaps import VARIANT, SwapReport, swap
from harness.variants import masks
from harness.variants.specs import VARIANTS

DECODE_STEPS = 4  # one-token steps at the end of the sequence; the rest is prefilled


@dataclass(frozen=True)
class Pair:
    case: Case
    reference_name: str
    reference: Side
    candidate: Side
    watch: "WatchedKernel"
    swap_report: SwapReport
    steps: Steps
    prefill: PrefillByEager | None = None  # of a kernel for decode steps alone

    @property
    def calls(self) -> int:
        """How often the candidate's kernel ran since the swap; a float32 copy's calls are not among them."""
        of_modules = sum(module.calls for module in self.swap_report.swapped)
        return of_modules if self.prefill is None else of_modules - self.prefill.calls

    @property
    def trusted(self) -> Reference:
        return reference_of(self.case)

    def at_length(self, length: int) -> "Pair":
        """The same modules on shorter sequences, all of whose rows have a golden."""
        case = dataclasses.replace(self.case, seq_len=length)
        steps, dtype = _dense_steps(case), getattr(torch, case.dtype)
        return dataclasses.replace(
            self,
            case=case,
            reference=dataclasses.replace(self.reference, views=_reference_views(self.trusted, case, steps, dtype)),
            candidate=dataclasses.replace(self.candidate, views=_variant_views(case, steps, dtype)),
            steps=steps,
        )

    def last_step(self) -> "Pair":
        def last(side: Side) -> Side:
            return dataclasses.replace(side, views=side.views[-1:])

        return dataclasses.replace(
            self, reference=last(self.reference), candidate=last(self.candidate), steps=self.steps[-1:]
        )

    @property
    def poison(self) -> float | None:
        return poison_for(self.case, self.watch.kernel)

    @property
    def compares_weights(self) -> bool:
        # torch's MHA gives NaN weights for dead rows where our policy is 0: those cells compare outputs alone.
        both = self.reference.gives_weights and self.candidate.gives_weights
        return both and self.case.phase == "prefill" and not masks.MASKS[self.case.mask].has_dead_rows

    def in_float32(self) -> "Pair":
        """Both sides on float32 copies of the rounded weights and masks: there no rounding of q, k and v hides bugs."""
        return dataclasses.replace(
            self,
            case=dataclasses.replace(self.case, dtype="float32"),
            reference=self.reference.in_float32(self.watch),
            candidate=self.candidate.in_float32(self.watch),
        )


class WatchedKernel:
    """A kernel that is held to its contract while `checking`: always but when timing."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.checking = kernel, True

    def as_kernel(self) -> Kernel:
        return dataclasses.replace(self.kernel, run=self.run)

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if not self.checking:
            return self.kernel.run(q, k, v, call)
        inputs = {"q": q, "k": k, "v": v} | ({} if call.mask is None else {"mask": call.mask})
        before = {name: tensor.detach().clone() for name, tensor in inputs.items()}
        out, weights = self.kernel.run(q, k, v, call)
        if not isinstance(out, Tensor):
            raise ContractBroken(f"kernel returned {type(out).__name__} instead of a tensor")
        expected = (*q.shape[:3], v.shape[3])
        if out.shape != expected or out.dtype != q.dtype:
            kind = WrongDtype if out.shape == expected else ContractBroken
            raise kind(f"kernel returned {tuple(out.shape)} {out.dtype} instead of {expected} {q.dtype}")
        for name, tensor in inputs.items():
            old, new = before[name], tensor.detach()
            # NaN is not equal to itself, and poisoned inputs hold some; most do not, and one pass tells.
            if not torch.equal(new, old) and not bool(((new == old) | (new.isnan() & old.isnan())).all()):
                raise ContractBroken(f"kernel wrote into its input {name}")
        return out, weights


def poison_for(case: Case, kernel: Kernel) -> float | None:
    """Of hidden tokens in the poison regime: NaN for kernels that promise not to leak; None: finite garbage."""
    shields = kernel.shielded and VARIANTS[case.variant].core != "recurrence"
    return float("nan") if shields else None


def build_pair(case: Case, kernel: Kernel, seed: int) -> Pair:
    spec, dtype = VARIANTS[case.variant], getattr(torch, case.dtype)
    reference, module = build_reference(case, seed)
    watch = WatchedKernel(kernel)
    prefill = PrefillByEager(watch.as_kernel()) if case.phase == "decode" and kernel.domain.decode_only else None
    asked = watch.as_kernel() if prefill is None else prefill.as_kernel()
    candidate, report = swap(module, to=VARIANT, kernel=asked, **spec.swap_options)
    steps = steps_of(case)
    return Pair(
        case=case,
        reference_name=reference.name,
        reference=Side(
            module=module,
            forward=reference.run,
            views=_reference_views(reference, case, steps, dtype),
            new_cache=reference.new_cache,
            gives_weights=reference.gives_weights,
            filled=None if reference.streams is None else _Filled(reference),
            other_backend=reference.other_backend,
        ),
        candidate=Side(
            module=candidate,
            forward=run_variant,
            views=_variant_views(case, steps, dtype),
            new_cache=OwnCaches(candidate) if spec.keeps_cache else None,
            gives_weights=kernel.gives_weights,
            filled=filled_variant,
        ),
        watch=watch,
        swap_report=report,
        steps=steps,
        prefill=prefill,
    )


def build_reference(case: Case, seed: int) -> tuple[Reference, nn.Module]:
    """The case's reference, and a module of it with random weights."""
    reference = reference_of(case)
    module = reference.build(case)
    randomise(module, torch.Generator().manual_seed(seed))
    return reference, module.to(getattr(torch, case.dtype)).eval()


def steps_of(case: Case) -> Steps:
    """A prefill and a few tokens after it; of a large cell single tokens, each after a context that is given."""
    if case.phase == "decode" and is_large(case):
        return tuple((range(t, t + 1), range(t + 1)) for t in places_of(case.seq_len))
    return _dense_steps(case)


def _dense_steps(case: Case) -> Steps:
    S = case.seq_len
    if case.phase != "decode":
        return ((range(S), range(S)),)
    context = S - min(DECODE_STEPS, S - 1)
    return ((range(context), range(context)), *((range(t, t + 1), range(t + 1)) for t in range(context, S)))


def randomise(module: nn.Module, generator: torch.Generator) -> None:
    """Every parameter random, biases and norms too: zero biases and unit norms hide bugs."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.0 + 0.3 * noise)


def at_rows(pair: Pair, rows: Tensor) -> Side:
    """The reference, asked for some of a sequence's queries: (B, n, E) comes out, in the order of `rows`."""
    case, reference = pair.case, pair.trusted
    at = masks.positions(case.batch, case.heads, range(0), range(case.seq_len), case.seq_len)
    at = dataclasses.replace(at, i=rows.view(1, 1, -1, 1))
    mask = masks.dense(masks.MASKS[case.mask], at, getattr(torch, case.dtype))
    if mask is not None:
        mask = mask.expand(-1, -1, rows.numel(), -1)
    view = reference.view(case, mask, False)
    assert reference.run_rows is not None
    return dataclasses.replace(pair.reference, forward=_AtRows(reference.run_rows, rows), views=(view,))


@dataclass(frozen=True)
class _Filled:
    """A reference's cache that holds these tokens."""

    reference: Reference

    def __call__(self, module: nn.Module, x: Tensor) -> Any:
        assert self.reference.streams is not None and self.reference.cache_of is not None
        return self.reference.cache_of(module, self.reference.streams(module, x))


@dataclass(frozen=True)
class _AtRows:
    """A Side's `forward` that gives some of the queries."""

    run: RunRows
    rows: Tensor

    def __call__(
        self, module: nn.Module, x: Tensor, view: Mapping[str, Any], cache: Any, need_weights: bool
    ) -> tuple[Tensor, None]:
        return self.run(module, x, self.rows, view), None


def _variant_views(case: Case, steps: Steps, dtype: torch.dtype) -> tuple[Mapping[str, Any], ...]:
    return tuple(variant_view(case, *step, dtype) for step in steps)


def _reference_views(
    reference: Reference, case: Case, steps: Steps, dtype: torch.dtype
) -> tuple[Mapping[str, Any], ...]:
    return tuple(_reference_view(reference, case, *step, dtype) for step in steps)


def variant_view(case: Case, queries: range, keys: range, dtype: torch.dtype) -> Mapping[str, Any]:
    rule = masks.MASKS[case.mask]
    at = masks.positions(case.batch, case.heads, queries, keys, case.seq_len)
    window = None if rule.window is None else rule.window(case.seq_len)
    return {"mask": masks.remainder(rule, at, dtype), "causal": rule.causal, "window": window}


def _reference_view(
    reference: Reference, case: Case, queries: range, keys: range, dtype: torch.dtype
) -> Mapping[str, Any]:
    rule = masks.MASKS[case.mask]
    at = masks.positions(case.batch, case.heads, queries, keys, case.seq_len)
    plain_causal = rule.causal and rule.allowed is None and rule.bias is None and queries == keys
    return reference.view(case, masks.dense(rule, at, dtype), plain_causal)
