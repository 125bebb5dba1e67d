"""`harness.check`: the acceptance rule for any two callables, in a user's own tests."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from harness.cell.draws import Jitter, draw, fast_path_off, plain_and_jittered
from harness.cell.rule import JITTER_DRAWS, LARGE_DRAWS, LARGE_ELEMENTS, Equivalence, TensorVerdict, judge
from harness.cell.side import gradients_of
from harness.registry import nearest

Function = Callable[..., Any]
Subject = tuple[Function, dict[str, Any]]  # what is called, and its arguments by name
PARAMETER = "grad parameter "  # two modules may name and cut their parameters differently: only shared names compare


def check(
    candidate: Function,
    reference: Function,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    keywords: Mapping[str, Any] | None = None,
    gradients: bool | Sequence[str] = False,
    outputs: Sequence[str] | None = None,
    regimes: Sequence[str] = (),
    seed: int = 0,
) -> Equivalence:
    """Is `candidate` numerically the same function as `reference` on these inputs?

    Both are functions or modules called with `inputs`: one tensor, positional arguments, or keyword arguments; with
    `keywords` beside positional ones. The reference must work in float64, because its float64 run is the golden.
    Outputs are tensors, alone or nested in tuples, lists and mappings; those of whole numbers must be the same.
    `outputs` names the ones to compare. With `gradients` those of every floating input are compared too, and of every
    parameter that both modules have under the same name (or, of a list of names, of those alone); a function that
    closes over parameters leaves its gradients in them.

    `regimes` (of REGIMES, for calls of q, k, v) repeats it on other numbers of the same shapes, which show what plain
    ones hide. Half precision is then judged in float32 as well, and a result that a later call overwrites is told.
    """
    arguments = _named(inputs) | dict(keywords or {})
    # Of the numbers that are rounded: the inputs, or of a model that is given tokens alone, its weights.
    weights = reference.parameters() if isinstance(reference, nn.Module) else ()
    dtype = next((value.dtype for value in (*arguments.values(), *weights) if _is_real(value)), None)
    if dtype is None:
        raise ValueError("neither inputs nor reference hold a floating-point tensor: there is nothing to compare")
    generator = torch.Generator().manual_seed(seed)
    runner = _Runner(gradients, generator, outputs)
    first = _compare(candidate, reference, arguments, "given", dtype, runner)
    verdicts, kept = first.verdicts, {name: t.clone() for name, t in first.results.items() if isinstance(t, Tensor)}
    if not regimes:
        return Equivalence(tuple(verdicts))
    if (qkv := qkv_of(inputs)) is None:
        raise ValueError("regimes are for calls of q, k and v: 4-D floating tensors of one dtype, first of all inputs")
    for regime in regimes:
        drawn = {name: shaped(regime, arguments[name], generator) for name in qkv}
        more = _compare(candidate, reference, arguments | drawn, regime, dtype, runner)
        if more.is_usable:
            verdicts += more.verdicts
    if dtype in (torch.bfloat16, torch.float16):
        verdicts += _shadow(candidate, reference, arguments, runner)
    verdicts += [
        TensorVerdict(name, "given", "mismatch", "a later call overwrote it")
        for name, result in kept.items()
        if not torch.equal(result.nan_to_num(), first.results[name].nan_to_num())
    ]
    return Equivalence(tuple(verdicts))


class _Compared(NamedTuple):
    verdicts: list[TensorVerdict]
    results: dict[str, Any]  # the candidate's
    is_usable: bool  # the reference itself is finite


def _compare(
    candidate: Function,
    reference: Function,
    arguments: dict[str, Any],
    regime: str,
    dtype: torch.dtype,
    runner: "_Runner",
) -> _Compared:
    jitter = Jitter(dtype, runner.generator)

    def shake(plain: Subject) -> Subject:
        function, values = plain
        shaken = {key: jitter.value(value) for key, value in values.items()}
        return jitter.module(function) if isinstance(function, nn.Module) else function, shaken

    elements = sum(value.numel() for value in arguments.values() if _is_real(value))
    jittered = LARGE_DRAWS if elements > LARGE_ELEMENTS else JITTER_DRAWS
    # All before the first run, which draws cotangents.
    subjects = list(plain_and_jittered((reference, arguments), shake, jittered=jittered))
    draws = draw(
        subjects,
        reference=lambda drawn: runner.run(*drawn),
        golden=lambda drawn: runner.run(*_in_float64(*drawn)),
        dtype=dtype,
    )
    expected = draws.references[0]
    _refuse_other_outputs(expected)
    written: list[str] = []  # by the candidate: what the reference does to its own copies is its affair
    with fast_path_off():
        c = runner.run(candidate, arguments, written)
    names = [name for name in expected if name in c or not name.startswith(PARAMETER)]
    extra = [name for name in c if name not in expected and not name.startswith(PARAMETER)]
    verdicts = []
    for name in names:
        if not _is_real(expected[name]):
            verdicts.append(_same(name, c.get(name), expected[name], regime))
            continue
        of_name = draws.map(itemgetter(name))
        verdicts.append(judge(name, c.get(name), *of_name, regime=regime, is_gradient=name.startswith("grad ")))
    verdicts += [TensorVerdict(name, regime, "mismatch", "the reference has none") for name in extra]
    verdicts += [TensorVerdict(f"input {name}", regime, "mismatch", "was written into") for name in written]
    finite = all(bool(value.isfinite().all()) for value in expected.values() if _is_real(value))
    return _Compared(verdicts, c, finite)


def _same(name: str, found: Any, expected: Tensor, regime: str) -> TensorVerdict:
    """Whole numbers are not rounded."""
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        shown = f"{tuple(found.shape)} {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        reason = f"is {shown} instead of {tuple(expected.shape)} {expected.dtype}"
        return TensorVerdict(name, regime, "mismatch", reason)
    differ = (found != expected).nonzero()
    if not len(differ):
        return TensorVerdict(name, regime, "ok")
    reason = f"{len(differ)} of {expected.numel()} numbers differ, the first at {differ[0].tolist()}"
    return TensorVerdict(name, regime, "mismatch", reason)


def _shadow(
    candidate: Function, reference: Function, arguments: dict[str, Any], runner: "_Runner"
) -> list[TensorVerdict]:
    """The same rounded numbers in float32, where half a percent is not hidden by rounding. A candidate that is for half
    precision alone has none."""
    wide = {key: value.float() if _is_real(value) else value for key, value in arguments.items()}
    sides = [copy.deepcopy(f).float() if isinstance(f, nn.Module) else f for f in (candidate, reference)]
    try:
        found = _compare(sides[0], sides[1], wide, "given", torch.float32, runner)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError):
        return []
    return [replace(verdict, tensor=f"{verdict.tensor} (in float32)", is_aside=True) for verdict in found.verdicts]


QKV = (("0", "1", "2"), ("q", "k", "v"), ("query", "key", "value"))
# What plain numbers hide: overflow without the max subtraction, cancellation, flushed small numbers, a lost row.
SHAPES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "peaked": lambda noise, _: 6 * noise,
    "offset": lambda noise, _: noise + 8,
    "tiny": lambda noise, _: 1e-3 * noise,
    "wide": lambda noise, draw: noise * 10 ** (3 * torch.rand(*noise.shape[:-1], 1, generator=draw) - 2),
}
REGIMES = tuple(SHAPES)


def qkv_of(inputs: Any) -> tuple[str, ...] | None:
    """The names of q, k and v, where that is what the inputs are: (B, H, L, D), (B, H_kv, S, D), (B, H_kv, S, D_v)."""
    named = _named(inputs)
    for names in QKV:
        found: list[Any] = [named.get(name) for name in names]
        if not all(_is_real(value) and value.ndim == 4 for value in found):
            continue
        q, k, v = found
        fits = q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1:3] == v.shape[1:3] and q.shape[3] == k.shape[3]
        if fits and q.dtype == k.dtype == v.dtype and k.shape[1] and q.shape[1] % k.shape[1] == 0:
            return names
    return None


def shaped(regime: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Fresh numbers, so that an answer that is remembered by its shape is found."""
    if regime not in SHAPES:
        raise ValueError(f"unknown regime {regime!r}; known: {', '.join(SHAPES)}{nearest(regime, SHAPES)}")
    return SHAPES[regime](torch.randn(like.shape, generator=generator), generator).to(like.dtype)


def assert_equivalent(candidate: Function, reference: Function, inputs: Any, **options: Any) -> None:
    """`check`, as an assertion whose message is the table of everything compared.

    A call of q, k and v is repeated in all REGIMES (`regimes=()`: not), as a cell of a run is.
    """
    options.setdefault("regimes", REGIMES if qkv_of(inputs) else ())
    found = check(candidate, reference, inputs, **options)
    if not found.passed:
        worst = max((verdict for verdict in found.verdicts if verdict.status != "ok"), key=lambda v: v.rank)
        table = found.table().to_string(index=False)
        raise AssertionError(f"{found.status}: {worst.tensor}: {worst.reason}\n{table}")


def _refuse_other_outputs(outputs: Mapping[str, Any]) -> None:
    """Before the candidate is blamed for giving the same."""
    for name, value in outputs.items():
        if not isinstance(value, Tensor) or value.is_complex():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the reference's {name} is {kind}: outputs must be real tensors; name some by `outputs`")
    if not outputs:
        raise ValueError("the reference returned nothing: there is nothing to compare")
    if not any(map(_is_real, outputs.values())):
        (name, value), *_ = outputs.items()
        raise ValueError(f"the reference's {name} is {value.dtype}: one output at least must be floating-point")


def _named(inputs: Any) -> dict[str, Any]:
    """Positional arguments get their number as name."""
    if isinstance(inputs, Tensor):
        return {"0": inputs}
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return {str(index): value for index, value in enumerate(inputs)}


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _in_float64(function: Function, values: Mapping[str, Any]) -> Subject:
    doubled = {key: value.double() if _is_real(value) else value for key, value in values.items()}
    return copy.deepcopy(function).double() if isinstance(function, nn.Module) else function, doubled


class _Runner:
    """All outputs (and gradients) by name. Cotangents are drawn once: every run differentiates the same scalar."""

    def __init__(
        self, gradients: bool | Sequence[str], generator: torch.Generator, only: Sequence[str] | None = None
    ) -> None:
        self.gradients = bool(gradients)
        self.chosen = None if isinstance(gradients, bool) else tuple(gradients)
        self.generator, self.only = generator, only
        self.cotangents: dict[str, Tensor] = {}

    def run(self, function: Function, values: Mapping[str, Any], written: list[str] | None = None) -> dict[str, Any]:
        """On copies of the values; the names of those that the function changed are added to `written`."""
        leaves = {key: self._leaf(key, value) for key, value in values.items()}
        positional = [leaves[key] for key in leaves if key.isdecimal()]
        keyword = {key: value for key, value in leaves.items() if not key.isdecimal()}
        with torch.set_grad_enabled(self.gradients):
            named = self._chosen(dict(_outputs("out", function(*positional, **keyword))), "outputs", self.only)
        if written is not None:
            given = [key for key, value in values.items() if isinstance(value, Tensor)]
            written += [k for k in given if not torch.equal(leaves[k].nan_to_num(), values[k].nan_to_num())]
        if not self.gradients:
            return named
        outputs = {key: out.detach() if isinstance(out, Tensor) else out for key, out in named.items()}
        return outputs | self._gradients(function, leaves, named)

    def _leaf(self, key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        wanted = self.gradients and _is_real(value) and (self.chosen is None or key in self.chosen)
        return value.detach().clone().requires_grad_(wanted)

    def _chosen(self, found: dict[str, Any], kind: str, names: Sequence[str] | None) -> dict[str, Any]:
        if names is None:
            return found
        if lost := [name for name in names if name not in found]:
            hint = nearest(lost[0], found)
            raise ValueError(f"{kind} = {lost[0]!r}: there is none of that name (there are: {', '.join(found)}){hint}")
        return {name: found[name] for name in names}

    def _gradients(self, function: Function, leaves: dict[str, Any], named: dict[str, Any]) -> dict[str, Tensor]:
        roots = {key: out for key, out in named.items() if isinstance(out, Tensor) and out.requires_grad}
        for key, out in roots.items():
            if key not in self.cotangents:
                self.cotangents[key] = torch.randn(out.shape, generator=self.generator).to(out.dtype)
        wanted = {key: value for key, value in leaves.items() if _is_real(value)}
        if isinstance(function, nn.Module):
            wanted |= {f"parameter {key}": p for key, p in function.named_parameters() if p.requires_grad}
        wanted = self._chosen(wanted, "gradients", self.chosen)
        cotangents = [self.cotangents[key].to(out.dtype) for key, out in roots.items()]
        gradients = gradients_of(list(roots.values()), list(wanted.values()), cotangents)
        return {f"grad {key}": gradient for key, gradient in zip(wanted, gradients, strict=True)}


def _outputs(name: str, result: Any) -> Iterator[tuple[str, Any]]:
    """Every output by its place: `out`, `out[0]`, `logits`, `past[1][0]`."""
    if isinstance(result, Mapping):
        for key, value in result.items():
            yield from _outputs(str(key) if name == "out" else f"{name}[{key}]", value)
    elif isinstance(result, tuple | list):
        for index, value in enumerate(result):
            yield from _outputs(f"{name}[{index}]", value)
    elif result is not None or name == "out":
        yield name, result
