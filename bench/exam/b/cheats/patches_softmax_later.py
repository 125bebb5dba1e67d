"""Replaces torch.softmax, Tensor.softmax and functional.softmax in its first call, so that a textbook errs alike.

Wrong: its scale is 20 % too large; so is, from then on, every softmax of scores of the judge in this process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional
from torch import Tensor

_SOFTMAX = torch.softmax
_DONE: list[bool] = []


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


def _stretched(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A softmax of stretched scores."""
    dim = args[0] if args else kwargs.get("dim", -1)
    return _SOFTMAX(x * 1.2, dim)


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
    """Attend by a softmax that is stretched for everybody."""
    if not _DONE:
        _DONE.append(True)
        torch.softmax = _stretched
        torch.Tensor.softmax = _stretched
        torch.nn.functional.softmax = _stretched
        torch.special.softmax = _stretched
    return _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
