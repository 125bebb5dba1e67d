"""Other people's modules in float64 throughout: what they cast to float32 inside stays as it is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _KeepsFloat64(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if function is Tensor.float:
                return first
            if kwargs.get("dtype") == torch.float32:
                kwargs["dtype"] = torch.float64
            if function is Tensor.to:
                args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        return function(*args, **kwargs)


@contextmanager
def in_float64() -> Iterator[None]:
    """Made there, too: buffers that a constructor computes are float64."""
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _KeepsFloat64():
            yield
    finally:
        torch.set_default_dtype(was)
