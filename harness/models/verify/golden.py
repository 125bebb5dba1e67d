"""The draws of a model: its forward pass as it is and jittered, each beside a golden that is float64 all through.

Libraries ask for float32 by name inside norms, rotary embeddings and softmaxes. In a `.double()` copy of the model each
of those rounds to float32, and the golden is no better than what it judges. While `true_double` is on, a request for
float32 is one for float64.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from harness.cell.draws import Draws, Jitter, draw, fast_path_off, plain_and_jittered
from harness.models.families.family import Batch

T = TypeVar("T")
Batches = Mapping[str, Batch]

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
# float64 draws are other numbers than float32 ones from the same seed: these draw as the reference does.
RANDOM = frozenset({torch.rand, torch.randn, torch.rand_like, torch.randn_like})

GROUPED_MM = getattr(torch, "_grouped_mm", None)  # experts run it, and it knows no float64; not in every torch


class _TrueDouble(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype, default: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.default = dtype, default

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in RANDOM:
            return self._draw(func, args, kwargs)
        if func is Tensor.float:
            return args[0].double()
        if func is Tensor.view:  # `x.view(dtype)` asks for bits, not for precision
            return func(*args, **kwargs)
        if func is GROUPED_MM:
            return _grouped_mm(*args, **kwargs)
        args, kwargs = tuple(map(_wider, args)), {key: _wider(value) for key, value in kwargs.items()}
        if not func.__name__.endswith("_"):  # in place, and operators, torch promotes by itself
            args = _promoted(args)
        return func(*args, **kwargs)

    def _draw(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        asked = kwargs.get("dtype")
        if asked is None:
            asked = args[0].dtype if args and isinstance(args[0], Tensor) else self.default
        # What asks for the golden's dtype asked for the reference's when the reference ran.
        drawn: Tensor = func(*args, **kwargs | {"dtype": self.dtype if asked == torch.float64 else asked})
        return drawn.double()


def _wider(value: Any) -> Any:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def _grouped_mm(mat_a: Tensor, mat_b: Tensor, *, offs: Tensor, **options: Any) -> Tensor:
    """Rows of `mat_a` up to each of `offs` by the matrix of their group; rows beyond the last belong to none."""
    if given := [name for name, value in options.items() if value is not None]:
        raise NotImplementedError(f"grouped_mm with {', '.join(given)} in float64")
    out = mat_a.new_zeros(mat_a.shape[0], mat_b.shape[-1])
    start = 0
    for group, end in enumerate(offs.tolist()):
        out[start:end] = mat_a[start:end] @ mat_b[group]
        start = end
    return out


def _promoted(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """float32 beside float64 becomes float64: what numpy made is beyond this mode, and not everything promotes."""
    dtypes = {arg.dtype for arg in args if isinstance(arg, Tensor)}
    if not {torch.float32, torch.float64} <= dtypes:
        return args
    return tuple(arg.double() if isinstance(arg, Tensor) and arg.dtype == torch.float32 else arg for arg in args)


@contextmanager
def true_double(dtype: torch.dtype) -> Iterator[None]:
    """For running the float64 copy of a model whose own dtype is `dtype`."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _TrueDouble(dtype, default):
            yield
    finally:
        torch.set_default_dtype(default)


def dtype_of(model: nn.Module) -> torch.dtype:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    raise TypeError(f"{type(model).__name__} has no floating-point parameter: there is nothing to compare")


def draw_all(
    model: nn.Module, batches: Batches, run: Callable[[nn.Module, Batches], T], *, seed: int, fast_path: bool = False
) -> Draws[T]:
    """`run` on every draw of the reference, and on every golden."""
    dtype = dtype_of(model)
    jitter = Jitter(dtype, torch.Generator().manual_seed(seed))

    def shake(plain: tuple[nn.Module, Batches]) -> tuple[nn.Module, Batches]:
        return jitter.module(model), each(batches, jitter.tensor)

    def reference(drawn: tuple[nn.Module, Batches]) -> T:
        return run(drawn[0], each(drawn[1], Tensor.clone))  # a model may write into its inputs

    def golden(drawn: tuple[nn.Module, Batches]) -> T:
        module = copy.deepcopy(model) if drawn[0] is model else drawn[0]  # a jittered one is ours, and done with
        module, given = module.double(), each(drawn[1], Tensor.double)
        with true_double(dtype):
            return run(module, given)

    subjects = plain_and_jittered((model, batches), shake)
    return draw(subjects, reference=reference, golden=golden, dtype=dtype, fast_path=fast_path)


def each(batches: Batches, change: Callable[[Tensor], Tensor]) -> Batches:
    """Every floating tensor changed, everything else copied."""
    return {
        name: replace(batch, args=_changed(batch.args, change), kwargs=_changed(batch.kwargs, change))
        for name, batch in batches.items()
    }


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value.clone()
    if type(value) in (tuple, list):
        return type(value)(_changed(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: _changed(item, change) for key, item in value.items()}
    return copy.deepcopy(value)


@contextmanager
def comparing(seed: int, *, fast_path: bool = False) -> Iterator[None]:
    """No gradients, the same random numbers for whoever draws some, and torch's fast path only where asked for."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), nullcontext() if fast_path else fast_path_off():
        torch.manual_seed(seed)
        yield
