"""The same numbers at other places in memory: strides and offsets that SDPA's callers really have.

Around a view lies NaN, so that whoever reads beside it shows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

NAN = float("nan")


def _around(t: Tensor, dim: int, before: int, after: int) -> Tensor:
    """A slice along `dim` of a buffer that is longer on both sides."""
    shape = list(t.shape)
    shape[dim] += before + after
    buffer = t.new_full(shape, NAN)
    view = buffer.narrow(dim, before, t.shape[dim])
    view.copy_(t)
    return view


def _offset(t: Tensor) -> Tensor:
    """Contiguous, but not where the allocator puts things."""
    flat = t.new_full((t.numel() + 8,), NAN)
    flat[1 : 1 + t.numel()] = t.flatten()
    return flat[1 : 1 + t.numel()].view(t.shape)


def _steps(t: Tensor) -> Tensor:
    """Every second number of a buffer."""
    buffer = t.new_full((*t.shape, 2), NAN)
    buffer[..., 0] = t
    return buffer[..., 0]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "heads last": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "longer": lambda t: _around(t, 2, 3, 5),
    "channels": lambda t: _around(t, 3, 4, 3),
    "offset": _offset,
    # Equal along the batch, or the heads; the values are made so before.
    "expanded": lambda t: t[:1].clone().expand(t.shape),
    "shared heads": lambda t: t[:, :1].clone().expand(t.shape),
    "steps": _steps,
    "columns": lambda t: t.mT.contiguous().mT,
}


def arranged(t: Tensor, layout: str) -> Tensor:
    """(B, H, L, D) with the same numbers; for `expanded` and `shared heads` those of the first entry or head."""
    return LAYOUTS[layout](t) if t.numel() else t


def arranged_mask(mask: Tensor, strides: str, full: tuple[int, int, int, int]) -> Tensor:
    """`full` is (B, H, L, S), to which `expanded` brings the mask without a copy."""
    if strides == "expanded":
        return mask.expand(full)
    if strides == "transposed":
        return mask.mT.contiguous().mT
    if strides == "sliced":
        shape = (*mask.shape[:-2], mask.shape[-2] + 2, mask.shape[-1] + 5)
        buffer = torch.zeros(shape, dtype=mask.dtype)
        buffer[..., 1:-1, 3:-2] = mask
        return buffer[..., 1:-1, 3:-2]
    return mask
