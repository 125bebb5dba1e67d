"""The three in-projections of a split drop-in as torch's one: a tensor in their memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.kernels.transforms import is_transformed


class Packed(Tensor):
    """The rows of several parameters, in their memory: no parameter, but freezing it freezes them.

    To every operation it is a plain tensor, as nn.Parameter is.
    """

    parts: Sequence[Tensor]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def requires_grad(self) -> bool:
        """That of the parameters: also read where gradients are off, when the tensor itself has none."""
        return any(part.requires_grad for part in self.parts)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        for part in self.parts:
            part.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> "Packed":
        self.requires_grad = requires_grad
        return self


def pack(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts as one tensor, in one memory where the parts are parameters; gradients flow through it.

    What is no parameter (a parametrized weight, one that is the same twice) is copied.
    """
    if not all(isinstance(part, nn.Parameter) for part in parts):
        return torch.cat(list(parts))
    if not _are_adjacent(parts):
        if len({(part.dtype, part.device) for part in parts}) > 1 or len({*map(id, parts)}) < 3:
            return torch.cat(list(parts))
        whole = torch.cat([part.detach() for part in parts])
        for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = rows
    whole = _Adjacent.apply(*parts) if torch.is_grad_enabled() else as_one(parts)  # type: ignore[no-untyped-call]
    if is_transformed():  # which know no such class
        return whole
    packed = whole.as_subclass(Packed)
    packed.parts = parts
    return packed


def as_one(parts: Sequence[Tensor]) -> Tensor:
    """Tensors that follow each other in memory."""
    first = parts[0].data
    rows = sum([len(part) for part in parts])
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def _are_adjacent(parts: Sequence[Tensor]) -> bool:
    first = parts[0]
    storage, offset = first.untyped_storage()._cdata, first.storage_offset()
    for part in parts:
        if part.storage_offset() != offset or part.dtype != first.dtype or not part.is_contiguous():
            return False
        if part.untyped_storage()._cdata != storage:
            return False
        offset += part.numel()
    return True


class _Adjacent(torch.autograd.Function):
    """`as_one`, with gradients."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.rows = [part.shape[0] for part in parts]
        return as_one(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient.split(ctx.rows)
