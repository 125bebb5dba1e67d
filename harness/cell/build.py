"""Case -> Pair: the reference with random weights, the candidate made from it by the swap, and each side's masks."""

import copy
import dataclasses
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.case import Case
from harness.cell.draws import Jitter
from harness.kernels.call import AttentionCall, Kernel
from harness.references import Reference
from harness.swaps import VARIANT, SwapReport, swap
from harness.variants import masks
from harness.variants.specs import VARIANTS

DECODE_STEPS = 4  # one-token steps at the end of the sequence; the rest is prefilled

Forward = Callable[[nn.Module, Tensor, Mapping[str, Any], Any, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a module, how to call it, and its form of the mask for each step."""

    module: nn.Module
    forward: Forward
    views: tuple[Mapping[str, Any], ...]
    new_cache: Callable[[int], Any] | None
    gives_weights: bool

    def in_float64(self) -> "Side":
        """The golden: a copy in double precision of what is already rounded."""
        return self._in(torch.float64, {})

    def in_float32(self, watch: "WatchedKernel") -> "Side":
        """A copy in single precision of what is already rounded, around the same kernel."""
        # Copied, a bound method brings its object along: without the memo the user's kernel would be copied too.
        return self._in(torch.float32, {id(watch): watch})

    def _in(self, dtype: torch.dtype, memo: dict[int, Any]) -> "Side":
        views = tuple({key: _cast(value, dtype) for key, value in view.items()} for view in self.views)
        return dataclasses.replace(self, module=copy.deepcopy(self.module, memo).to(dtype), views=views)

    def jittered(self, jitter: Jitter) -> "Side":
        """A copy whose weights and float masks moved."""
        module = jitter.module(self.module)
        views = tuple({key: jitter.value(value) for key, value in view.items()} for view in self.views)
        return dataclasses.replace(self, module=module, views=views)


@dataclass(frozen=True)
class Pair:
    case: Case
    reference_name: str
    reference: Side
    candidate: Side
    watch: "WatchedKernel"
    swap_report: SwapReport
    steps: tuple[tuple[range, range], ...]  # positions of the queries and of the keys of each step

    @property
    def calls(self) -> int:
        """How often the candidate's kernel ran since the swap; a float32 copy's calls are not among them."""
        return sum(module.calls for module in self.swap_report.swapped)

    @property
    def poison(self) -> float | None:
        """Of hidden tokens in the poison regime: NaN for kernels that promise not to leak; None: finite garbage."""
        return float("nan") if self.watch.kernel.shielded else None

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


class ContractBroken(Exception):
    """The kernel returned the wrong thing, or wrote into its inputs."""


class WrongDtype(ContractBroken):
    """The kernel answered in another dtype than it was asked in."""


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


def build_pair(case: Case, kernel: Kernel, seed: int) -> Pair:
    spec = VARIANTS[case.variant]
    name = spec.reference(case)
    reference: Reference = importlib.import_module(f"harness.references.{name}").REFERENCE
    dtype = getattr(torch, case.dtype)
    module = reference.build(case)
    randomise(module, torch.Generator().manual_seed(seed))
    module = module.to(dtype).eval()
    watch = WatchedKernel(kernel)
    candidate, report = swap(module, to=VARIANT, kernel=watch.as_kernel(), **spec.swap_options)
    steps = steps_of(case)
    has_cache = spec.kv_elements_per_token is not None
    return Pair(
        case=case,
        reference_name=reference.name,
        reference=Side(
            module=module,
            forward=reference.run,
            views=tuple(_reference_view(reference, case, *step, dtype) for step in steps),
            new_cache=reference.new_cache,
            gives_weights=reference.gives_weights,
        ),
        candidate=Side(
            module=candidate,
            forward=_run_variant,
            views=tuple(_variant_view(case, *step, dtype) for step in steps),
            new_cache=(lambda capacity: candidate.new_cache(capacity)) if has_cache else None,  # type: ignore[operator]
            gives_weights=kernel.gives_weights,
        ),
        watch=watch,
        swap_report=report,
        steps=steps,
    )


def steps_of(case: Case) -> tuple[tuple[range, range], ...]:
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


def _run_variant(
    module: nn.Module, x: Tensor, view: Mapping[str, Any], cache: Any, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    kwargs = dict(view)
    if cache is not None:
        kwargs["cache"] = cache
    if need_weights:
        result: tuple[Tensor, Tensor] = module(x, need_weights=True, **kwargs)
        return result
    return module(x, **kwargs), None


def _variant_view(case: Case, queries: range, keys: range, dtype: torch.dtype) -> Mapping[str, Any]:
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


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
