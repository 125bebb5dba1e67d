"""`harness.check`: the acceptance rule for any two callables, in a user's own tests."""

import copy
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from harness.cell.draws import Jitter, draw, fast_path_off, plain_and_jittered
from harness.cell.rule import JITTER_DRAWS, LARGE_DRAWS, LARGE_ELEMENTS, Equivalence, TensorVerdict, judge
from harness.cell.side import gradients_of

Function = Callable[..., Any]
Subject = tuple[Function, dict[str, Any]]  # what is called, and its arguments by name
PARAMETER = "grad parameter "  # two modules may name and cut their parameters differently: only shared names compare


def check(
    candidate: Function,
    reference: Function,
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    *,
    gradients: bool = False,
    seed: int = 0,
) -> Equivalence:
    """Is `candidate` numerically the same function as `reference` on these inputs?

    Both are functions or modules called with `inputs`: one tensor, positional arguments, or keyword arguments. The
    reference must work in float64, because its float64 run is the golden. Outputs are a tensor, or a tuple or mapping
    of tensors. With `gradients` those of every floating input are compared too, and of every parameter that both
    modules have under the same name; a function that closes over parameters leaves its gradients in them.
    """
    arguments = _named(inputs)
    # Of the numbers that are rounded: the inputs, or of a model that is given tokens alone, its weights.
    weights = reference.parameters() if isinstance(reference, nn.Module) else ()
    dtype = next((value.dtype for value in (*arguments.values(), *weights) if _is_real(value)), None)
    if dtype is None:
        raise ValueError("neither inputs nor reference hold a floating-point tensor: there is nothing to compare")
    generator = torch.Generator().manual_seed(seed)
    jitter, runner = Jitter(dtype, generator), _Runner(gradients, generator)

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
        of_name = draws.map(itemgetter(name))
        verdicts.append(judge(name, c.get(name), *of_name, regime="given", is_gradient=name.startswith("grad ")))
    verdicts += [TensorVerdict(name, "given", "mismatch", "the reference has none") for name in extra]
    verdicts += [TensorVerdict(f"input {name}", "given", "mismatch", "was written into") for name in written]
    return Equivalence(tuple(verdicts))


def assert_equivalent(candidate: Function, reference: Function, inputs: Any, **options: Any) -> None:
    """`check`, as an assertion whose message is the table of everything compared."""
    found = check(candidate, reference, inputs, **options)
    if not found.passed:
        worst = max((verdict for verdict in found.verdicts if verdict.status != "ok"), key=lambda v: v.rank)
        table = found.table().to_string(index=False)
        raise AssertionError(f"{found.status}: {worst.tensor}: {worst.reason}\n{table}")


def _refuse_other_outputs(outputs: Mapping[str, Any]) -> None:
    """Before the candidate is blamed for giving the same."""
    for name, value in outputs.items():
        if not _is_real(value):
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the reference's {name} is {kind}: outputs must be floating-point tensors, in one level")
    if not outputs:
        raise ValueError("the reference returned nothing: there is nothing to compare")


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

    def __init__(self, gradients: bool, generator: torch.Generator) -> None:
        self.gradients, self.generator = gradients, generator
        self.cotangents: dict[str, Tensor] = {}

    def run(self, function: Function, values: Mapping[str, Any], written: list[str] | None = None) -> dict[str, Any]:
        """On copies of the values; the names of those that the function changed are added to `written`."""
        leaves = {k: v.detach().clone().requires_grad_(self.gradients) if _is_real(v) else v for k, v in values.items()}
        positional = [leaves[key] for key in leaves if key.isdecimal()]
        keyword = {key: value for key, value in leaves.items() if not key.isdecimal()}
        with torch.set_grad_enabled(self.gradients):
            named = _outputs(function(*positional, **keyword))
        if written is not None:
            real = [key for key, value in values.items() if _is_real(value)]
            written += [k for k in real if not torch.allclose(leaves[k], values[k], rtol=0, atol=0, equal_nan=True)]
        if not self.gradients:
            return named
        outputs = {key: out.detach() if isinstance(out, Tensor) else out for key, out in named.items()}
        return outputs | self._gradients(function, leaves, named)

    def _gradients(self, function: Function, leaves: dict[str, Any], named: dict[str, Any]) -> dict[str, Tensor]:
        roots = {key: out for key, out in named.items() if isinstance(out, Tensor) and out.requires_grad}
        for key, out in roots.items():
            if key not in self.cotangents:
                self.cotangents[key] = torch.randn(out.shape, generator=self.generator).to(out.dtype)
        wanted = {key: value for key, value in leaves.items() if _is_real(value)}
        if isinstance(function, nn.Module):
            wanted |= {f"parameter {key}": p for key, p in function.named_parameters() if p.requires_grad}
        cotangents = [self.cotangents[key].to(out.dtype) for key, out in roots.items()]
        gradients = gradients_of(list(roots.values()), list(wanted.values()), cotangents)
        return {f"grad {key}": gradient for key, gradient in zip(wanted, gradients, strict=True)}


def _outputs(result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return {str(key): value for key, value in result.items() if value is not None}
    if isinstance(result, tuple | list):
        return {f"out[{index}]": value for index, value in enumerate(result) if value is not None}
    return {"out": result}
