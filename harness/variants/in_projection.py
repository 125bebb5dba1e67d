"""How projections are held: the three in-projections of a split drop-in as torch's one, a tensor in their memory."""

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

    @property
    def data(self) -> Tensor:
        """Of another dtype or place, it moves the parameters there."""
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        for part, rows in zip(self.parts, value.split([len(part) for part in self.parts]), strict=True):
            part.data = rows

    @property
    def grad(self) -> Tensor | None:
        """Those of the parameters, in one memory: writes reach them."""
        grads = [part.grad for part in self.parts if part.grad is not None]
        if len(grads) < len(self.parts):
            return None
        if any(grad.requires_grad for grad in grads):  # of create_graph=True
            return torch.cat(grads)
        if not _are_adjacent(grads):
            self.grad = torch.cat(grads)
            grads = [part.grad for part in self.parts if part.grad is not None]
        return as_one(grads)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        rows = [None] * len(self.parts) if value is None else value.split([len(part) for part in self.parts])
        for part, grad in zip(self.parts, rows, strict=True):
            part.grad = grad

    def register_hook(self, hook: Any) -> Any:
        """Gradients never pass here."""
        raise RuntimeError(
            "gradients of a split in-projection have no hook of their own: hook those of q_proj, k_proj and v_proj"
        )

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


def bare_linear(in_features: int, out_features: int, *, bias: bool, **place: Any) -> nn.Linear:
    """An nn.Linear whose weights are still to come.

    Its constructor would draw random numbers, and torch.nn.utils.skip_init takes ten times as long: a swap makes
    thousands of these.
    """
    linear = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(linear)
    linear.in_features, linear.out_features = in_features, out_features
    linear.weight = nn.Parameter(torch.empty((out_features, in_features), **place))
    linear.register_parameter("bias", nn.Parameter(torch.empty(out_features, **place)) if bias else None)
    return linear


def held(module: nn.Module, name: str) -> Any:
    """`module.name`, for a parameter by the short way: nn.Module's own is felt in small calls.

    What a parametrization or pruning put in its place is no parameter.
    """
    return module._parameters[name] if name in module._parameters else getattr(module, name)
