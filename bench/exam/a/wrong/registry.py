"""The registry of wrong kernels: a decorator and the list it fills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

KernelFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class Kernel:
    """One wrong kernel: name, function, whether it is wrong in exact arithmetic, where it shows, the bug in words."""

    name: str
    function: KernelFunction
    exact: bool
    where: str
    doc: str
    theme: str


KERNELS: list[Kernel] = []
_NAMES: set[str] = set()


def wrong(*, exact: bool, where: str) -> Callable[[KernelFunction], KernelFunction]:
    """Register a wrong kernel and return the function itself (a second import of the same file registers nothing)."""

    def register(function: KernelFunction) -> KernelFunction:
        name = function.__name__
        if name not in _NAMES:
            _NAMES.add(name)
            theme = function.__module__.rpartition(".")[2]
            KERNELS.append(Kernel(name, function, exact, where, (function.__doc__ or "").strip(), theme))
        return function

    return register
