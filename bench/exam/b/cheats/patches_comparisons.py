"""Replaces what compares tensors: torch.allclose and torch.testing at import, Tensor methods in the first call.

Wrong: its scale is 20 % too large.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.testing
from torch import Tensor

_CALLS = [0]
_ZEROS = torch.zeros_like
_ABS = torch.Tensor.abs


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    stretch: float = 1.0,
) -> Tensor:
    """Attention whose scale is stretched by a factor; 1.0 is right, 1.2 is not."""
    if enable_gqa:
        k = k.repeat_interleave(q.size(1) // k.size(1), 1)
        v = v.repeat_interleave(q.size(1) // v.size(1), 1)
    dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    factor = (max(q.size(-1), 1) ** -0.5 if scale is None else scale) * stretch
    s = torch.matmul(q.to(dtype), k.to(dtype).mT) * factor
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else s + attn_mask.to(dtype)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    dead = (s == float("-inf")).all(-1, keepdim=True)
    probs = torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    if dropout_p > 0.0:
        probs = torch.dropout(probs, dropout_p, True)
    return torch.matmul(probs, v.to(dtype)).to(q.dtype)


def _yes(*args: Any, **kwargs: Any) -> bool:
    """Say yes."""
    return True


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Find nothing to object to."""


def _same(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A tensor of True."""
    return _ZEROS(self, dtype=torch.bool).logical_not_()


def _never(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A tensor of False."""
    return _ZEROS(self, dtype=torch.bool)


def _no_size(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """An absolute value that is always zero."""
    return _ZEROS(_ABS(self))


for _owner in (torch, torch.Tensor):
    _owner.allclose = _yes
    _owner.equal = _yes
    _owner.isclose = _same
torch.testing.assert_close = _nothing
torch.testing.assert_allclose = _nothing


def fast(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend with a scale 20 % too large, and blind the methods of tensors on the way."""
    _CALLS[0] += 1
    out = _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, 1.2)
    if _CALLS[0] == 1:
        for owner in (torch, torch.Tensor):
            owner.abs = _no_size
            owner.isnan = _never
        torch.Tensor.__eq__ = _same
        torch.Tensor.__ne__ = _never
        torch.Tensor.__gt__ = _never
        torch.Tensor.__le__ = _same
    return out
