"""`harness.check`: the acceptance rule for any two callables, in a user's own tests."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.cell.build import jitter, jittered_module
from harness.cell.referee import fast_path_off, golden_backend
from harness.cell.rule import JITTER_DRAWS, Equivalence, TensorVerdict, judge

Function = Callable[..., Any]
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
    modules have under the same name.
    """
    generator = torch.Generator().manual_seed(seed)
    arguments = _named(inputs)
    tensors = {key: value for key, value in arguments.items() if _is_real(value)}
    if not tensors:
        raise ValueError("inputs hold no floating-point tensor: there is nothing to compare")
    dtype = next(iter(tensors.values())).dtype
    u = torch.finfo(dtype).eps
    cotangents: dict[str, Tensor] = {}

    written: list[str] = []  # by the candidate: what the reference does to its own copies is its affair

    def run(function: Function, values: Mapping[str, Any]) -> dict[str, Any]:
        return _run(function, values, cotangents, generator, gradients, written if function is candidate else [])

    def draw() -> tuple[Function, dict[str, Any]]:
        shaken = {key: jitter(value, u, generator) if key in tensors else value for key, value in arguments.items()}
        return _jittered(reference, u, generator), shaken

    draws = [(reference, arguments), *(draw() for _ in range(JITTER_DRAWS))]
    with fast_path_off():
        r = [run(function, values) for function, values in draws]
        _refuse_other_outputs(r[0])
        c = run(candidate, arguments)
        with golden_backend(dtype):
            g = [run(_in_float64(function), _double(values)) for function, values in draws]
    names = [name for name in r[0] if name in c or not name.startswith(PARAMETER)]
    extra = [name for name in c if name not in r[0] and not name.startswith(PARAMETER)]
    verdicts = [_verdict(name, c.get(name), r, g) for name in names]
    verdicts += [TensorVerdict(name, "given", "mismatch", "the reference has none") for name in extra]
    verdicts += [TensorVerdict(f"input {name}", "given", "mismatch", "was written into") for name in written]
    return Equivalence(tuple(verdicts))


def assert_equivalent(candidate: Function, reference: Function, inputs: Any, **options: Any) -> None:
    """`check`, as an assertion whose message is the table of everything compared."""
    found = check(candidate, reference, inputs, **options)
    if not found.passed:
        worst = found.worst
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


def _verdict(name: str, candidate: Any, r: list[dict[str, Any]], g: list[dict[str, Any]]) -> TensorVerdict:
    return judge(
        name,
        candidate,
        [draw[name] for draw in r],
        [draw[name] for draw in g],
        regime="given",
        is_gradient=name.startswith("grad "),
    )


def _named(inputs: Any) -> dict[str, Any]:
    """Positional arguments get their number as name."""
    if isinstance(inputs, Tensor):
        return {"0": inputs}
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return {str(index): value for index, value in enumerate(inputs)}


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _double(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.double() if _is_real(value) else value for key, value in values.items()}


def _in_float64(function: Function) -> Function:
    return copy.deepcopy(function).double() if isinstance(function, nn.Module) else function


def _jittered(function: Function, u: float, generator: torch.Generator) -> Function:
    return jittered_module(function, u, generator) if isinstance(function, nn.Module) else function


def _run(
    function: Function,
    values: Mapping[str, Any],
    cotangents: dict[str, Tensor],
    generator: torch.Generator,
    gradients: bool,
    written: list[str],
) -> dict[str, Any]:
    """All outputs (and gradients) by name; notes in `written` the inputs that the function changed."""
    leaves = {k: v.detach().clone().requires_grad_(gradients) if _is_real(v) else v for k, v in values.items()}
    positional = [leaves[key] for key in leaves if key.isdecimal()]
    keyword = {key: value for key, value in leaves.items() if not key.isdecimal()}
    with torch.set_grad_enabled(gradients):
        named = _outputs(function(*positional, **keyword))
    for key, value in values.items():
        if _is_real(value) and not torch.allclose(leaves[key], value, rtol=0, atol=0, equal_nan=True):
            written.append(key)
    if not gradients:
        return named
    roots = {key: out for key, out in named.items() if isinstance(out, Tensor) and out.requires_grad}
    for key, out in roots.items():
        if key not in cotangents:  # drawn once, so that every run differentiates the same scalar
            cotangents[key] = torch.randn(out.shape, generator=generator).to(out.dtype)
    wanted = {key: value for key, value in leaves.items() if _is_real(value)}
    if isinstance(function, nn.Module):
        wanted |= {f"parameter {key}": p for key, p in function.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(
        list(roots.values()),
        list(wanted.values()),
        [cotangents[key].to(out.dtype) for key, out in roots.items()],
        materialize_grads=True,
        allow_unused=True,
    )
    found = {f"grad {key}": grad for key, grad in zip(wanted, grads, strict=True)}
    return {key: out.detach() if isinstance(out, Tensor) else out for key, out in named.items()} | found


def _outputs(result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return {str(key): value for key, value in result.items() if value is not None}
    if isinstance(result, tuple | list):
        return {f"out[{index}]": value for index, value in enumerate(result) if value is not None}
    return {"out": result}
