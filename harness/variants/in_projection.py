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
    addresses: Sequence[int]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

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

    def is_still_of(self, parts: Sequence[Tensor]) -> bool:
        """No part was replaced or moved since."""
        for part, before, address in zip(parts, self.parts, self.addresses, strict=False):
            if part is not before or part.data_ptr() != address:
                return False
        return len(parts) == len(self.parts)


def pack(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts as one tensor, in one memory where the parts are parameters; gradients flow through it.

    What is no parameter (a parametrized weight, one that is the same twice) is copied.
    """
    if not all(isinstance(part, nn.Parameter) for part in parts):
        return torch.cat(list(parts))
    if not _are_adjacent(parts):
        if len({(part.dtype, part.device) for part in parts}) > 1 or len({*map(id, parts)}) < 3:
            return torch.cat(list(parts))
        # Whatever mode it is read in, they may be trained later; but for those that were made in inference mode.
        with torch.inference_mode(any(part.is_inference() for part in parts)), torch.no_grad():
            whole = torch.cat(list(parts))
            for part, rows in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                part.data = rows
    whole = _Adjacent.apply(*parts) if torch.is_grad_enabled() else as_one(parts)  # type: ignore[no-untyped-call]
    if is_transformed():  # which know no such class
        return whole
    packed = whole.as_subclass(Packed)
    packed.parts, packed.addresses = parts, [part.data_ptr() for part in parts]
    return packed


def as_one(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of as many rows that follow each other in memory."""
    first = parts[0].data
    rows, *width = first.shape
    return first.as_strided((len(parts) * rows, *width), first.stride())


def _are_adjacent(parts: Sequence[Tensor]) -> bool:
    first = parts[0]
    storage, offset, size = first.untyped_storage()._cdata, first.storage_offset(), first.numel()
    for part in parts:
        if part.storage_offset() != offset or part.dtype != first.dtype or not part.is_contiguous():
            return False
        if part.untyped_storage()._cdata != storage:
            return False
        offset += size
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
