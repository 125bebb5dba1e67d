"""The reference as it is and jittered, each followed by its float64 golden: what the acceptance rule is made of."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from harness.build import jitter, jittered_module
from harness.compare import fast_path_off, golden_backend
from harness.equivalence import JITTER_DRAWS
from harness.families.family import Batch
from harness.verify.golden import true_double

T = TypeVar("T")
Batches = Mapping[str, Batch]


def dtype_of(model: nn.Module) -> torch.dtype:
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    raise TypeError(f"{type(model).__name__} has no floating-point parameter: there is nothing to compare")


def draw_all(
    model: nn.Module, batches: Batches, run: Callable[[nn.Module, Batches], T], *, seed: int
) -> tuple[list[T], list[T]]:
    """`run` on every draw of the reference, and on every golden: the plain draw first, then the jittered ones.

    One draw at a time: of a large checkpoint no more than one copy is alive.
    """
    dtype = dtype_of(model)
    u = torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(seed)

    def shake(tensor: Tensor) -> Tensor:
        return jitter(tensor, u, generator)

    references: list[T] = []
    goldens: list[T] = []
    for number in range(1 + JITTER_DRAWS):
        drawn, given = (model, batches) if number == 0 else (jittered_module(model, u, generator), each(batches, shake))
        references.append(run(drawn, each(given, Tensor.clone)))  # a model may write into its inputs
        drawn = (copy.deepcopy(drawn) if drawn is model else drawn).double()
        given = each(given, Tensor.double)
        with true_double(dtype), golden_backend(dtype):
            goldens.append(run(drawn, given))
    return references, goldens


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
