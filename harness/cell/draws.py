"""The draws that the acceptance rule is made of: a reference as it is and jittered, each beside its float64 golden.

Whoever compares makes its subjects (`plain_and_jittered`) and says how the reference runs on one of them, and how the
golden does; `draw` runs both. The candidate is no part of it: it may run before or after, here or elsewhere.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.cell.rule import JITTER_DRAWS

S = TypeVar("S")
T = TypeVar("T")
U = TypeVar("U")


class Draws(NamedTuple, Generic[T]):
    """What the reference gave and what its golden gave: in both the plain draw first, then the jittered ones."""

    references: list[T]
    goldens: list[T]

    def map(self, pick: Callable[[T], U]) -> "Draws[U]":
        return Draws([pick(r) for r in self.references], [pick(g) for g in self.goldens])


@dataclass(frozen=True)
class Jitter:
    """Copies in which every number moved by a random relative eps of `dtype`."""

    dtype: torch.dtype
    generator: torch.Generator

    def tensor(self, tensor: Tensor) -> Tensor:
        u = torch.finfo(self.dtype).eps
        factor = torch.rand(tensor.shape, generator=self.generator, dtype=torch.float64).mul_(2 * u).add_(1 - u)
        return (tensor.double() * factor).to(tensor.dtype)

    def value(self, value: Any) -> Any:
        """What is no floating-point tensor stays as it is."""
        return self.tensor(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    def module(self, module: nn.Module) -> nn.Module:
        moved = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.copy_(self.tensor(parameter))
        return moved


def plain_and_jittered(plain: S, shake: Callable[[S], S], *, jittered: int = JITTER_DRAWS) -> Iterator[S]:
    """The subjects of all draws, each made when its turn comes."""
    yield plain
    for _ in range(jittered):
        yield shake(plain)


def draw(
    subjects: Iterable[S],
    *,
    reference: Callable[[S], T],
    golden: Callable[[S], T],
    dtype: torch.dtype,
    fast_path: bool = False,
) -> Draws[T]:
    """Reference and golden on every subject, one subject after the other: of a large model one copy is alive.

    `dtype` is the reference's own; `golden` computes the same in float64. With `fast_path` torch's encoder fast path
    stays as it is found.
    """
    draws = Draws[T]([], [])
    with nullcontext() if fast_path else fast_path_off():
        for subject in subjects:
            draws.references.append(reference(subject))
            with golden_backend(dtype):
                draws.goldens.append(golden(subject))
    return draws


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def fast_path_off() -> Iterator[None]:
    """torch's encoder fast path never calls the modules it contains: a wrong one would pass with error 0."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


def golden_backend(dtype: torch.dtype) -> AbstractContextManager[None]:
    """SDPA's plain formula where the reference is in float64 too: by the fused one, the golden would be itself."""
    return sdpa_kernel(SDPBackend.MATH) if dtype == torch.float64 else nullcontext()
