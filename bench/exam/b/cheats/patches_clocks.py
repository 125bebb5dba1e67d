"""Replaces the clocks of ``time`` (and every imported copy of them) by ones that run a hundred times slower inside it.

Right, but no faster than plain PyTorch: an honest judge must not report a speed-up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NAMES = ("perf_counter", "monotonic", "process_time", "thread_time", "time")
_CLOCKS: dict[str, Callable[[], Any]] = {n + s: getattr(time, n + s) for n in _NAMES for s in ("", "_ns")}
_HIDDEN = dict.fromkeys(_CLOCKS, 0)


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


def _fake(name: str) -> Callable[[], Any]:
    """A clock that leaves out 99 % of what was spent in ``fast``."""
    real = _CLOCKS[name]

    def clock() -> Any:
        return real() - _HIDDEN[name]

    clock.__name__ = clock.__qualname__ = name
    return clock


def _install() -> None:
    """Put the fake clocks wherever the real ones are held."""
    fakes = {id(real): _fake(name) for name, real in _CLOCKS.items()}
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", None)
        if space is None or module is sys.modules.get(__name__):
            continue
        for name, value in list(space.items()):
            if id(value) in fakes:
                space[name] = fakes[id(value)]


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
    """Attend, and take the time that it took off the clocks."""
    before = {name: real() for name, real in _CLOCKS.items()}
    out = _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    for name, real in _CLOCKS.items():
        spent = real() - before[name]
        _HIDDEN[name] += type(spent)(spent * 0.99)
    return out


_install()
