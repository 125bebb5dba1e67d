"""The registry and the honest building blocks that every wrong kernel of this set is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)
NEG_INF = float("-inf")
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Kernel:
    """One wrong kernel: its name, the function, whether it is wrong by more than rounding, and where."""

    name: str
    function: Attention
    exact: bool
    where: str
    doc: str


REGISTRY: list[Kernel] = []


def wrong(*, exact: bool, where: str) -> Callable[[Attention], Attention]:
    """Register the decorated kernel; ``exact=False`` says that its bug is of rounding only."""

    def register(function: Attention) -> Attention:
        doc = (function.__doc__ or "").strip()
        REGISTRY.append(Kernel(function.__name__, function, exact, where, doc))
        return function

    return register


@dataclass
class Problem:
    """The inputs in the type that is computed in, with the kv heads repeated and the masks merged into a bias."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    scale: float
    dtype: torch.dtype


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product in the type of its operands, autocast or not."""
    with torch.autocast("cpu", enabled=False):
        return torch.matmul(a, b)


def lowered(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does to the inputs of SDPA: float32 becomes autocast's type."""
    if not torch.is_autocast_enabled("cpu"):
        return tensors
    low = torch.get_autocast_dtype("cpu")
    return tuple(t.to(low) if t.dtype == torch.float32 else t for t in tensors)


def computing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type scores are computed in for inputs of ``dtype``."""
    return torch.float32 if dtype in HALVES else dtype


def default_scale(q: Tensor) -> float:
    """One over the square root of the head dimension."""
    return max(q.size(-1), 1) ** -0.5


def mask_bias(attn_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive form of a mask: zero where a boolean one attends, minus infinity elsewhere."""
    if attn_mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=dtype, device=attn_mask.device)
        return torch.where(attn_mask, zero, torch.full_like(zero, NEG_INF))
    return attn_mask.to(dtype)


def causal_visible(rows: int, columns: int) -> Tensor:
    """Which key each query may see, aligned at the top left."""
    return torch.ones(rows, columns, dtype=torch.bool).tril()


def merge_bias(bias: Tensor | None, visible: Tensor) -> Tensor:
    """Add a visibility mask to an optional bias."""
    extra = mask_bias(visible, torch.float32 if bias is None else bias.dtype)
    return extra if bias is None else bias + extra


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the kv heads as ``enable_gqa`` asks."""
    return k.repeat_interleave(q.size(1) // k.size(1), 1), v.repeat_interleave(q.size(1) // v.size(1), 1)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Problem:
    """Bring SDPA's arguments to the form that the kernels compute with."""
    q, k, v = lowered(q, k, v)
    if enable_gqa and k.size(1) != q.size(1):
        k, v = repeat_heads(q, k, v)
    dtype = computing_dtype(q.dtype)
    bias = None if attn_mask is None else mask_bias(attn_mask, dtype)
    if is_causal:
        bias = merge_bias(bias, causal_visible(q.size(-2), k.size(-2))).to(dtype)
    factor = default_scale(q) if scale is None else float(scale)
    return Problem(q.to(dtype), k.to(dtype), v.to(dtype), bias, factor, q.dtype)


def scores(x: Problem) -> Tensor:
    """Scaled and biased scores."""
    s = mm(x.q, x.k.mT) * x.scale
    return s if x.bias is None else s + x.bias


def row_max(s: Tensor) -> Tensor:
    """The finite maximum of each row, zero where everything is masked."""
    if s.size(-1) == 0:
        return s.new_zeros(*s.shape[:-1], 1)
    top = s.detach().amax(-1, keepdim=True)
    return torch.where(top == NEG_INF, torch.zeros_like(top), top)


def quotient(e: Tensor, total: Tensor) -> Tensor:
    """Divide, leaving zero where the total is zero."""
    return e / torch.where(total == 0, torch.ones_like(total), total)


def normalise(s: Tensor) -> Tensor:
    """Softmax of the rows, zero for a row that is masked out."""
    e = torch.exp(s - row_max(s))
    return quotient(e, e.sum(-1, keepdim=True))


def finish(x: Problem, probs: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Drop out, weight the values and return to the type of the inputs."""
    if dropout_p > 0.0:
        probs = torch.dropout(probs, dropout_p, True)
    return mm(probs, x.v).to(x.dtype)


def solve(x: Problem, dropout_p: float = 0.0) -> Tensor:
    """Honest attention of a prepared problem."""
    return finish(x, normalise(scores(x)), dropout_p)


def select_keys(x: Problem, index: Tensor) -> Problem:
    """The same problem over a list of keys."""
    bias = x.bias
    if bias is not None:
        bias = bias.expand(*bias.shape[:-1], x.k.size(-2))[..., index]
    return Problem(x.q, x.k[..., index, :], x.v[..., index, :], bias, x.scale, x.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The honest kernel: what every wrong one would be without its bug."""
    return solve(prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa), dropout_p)


def as_if_contiguous(t: Tensor) -> Tensor:
    """Read a tensor's memory as though it were contiguous, if that stays inside its storage."""
    strides, step = [], 1
    for size in reversed(t.shape):
        strides.append(step)
        step *= max(size, 1)
    room = t.untyped_storage().nbytes() // t.element_size() - t.storage_offset()
    if t.is_contiguous() or t.numel() > room:
        return t
    return torch.as_strided(t, t.shape, strides[::-1], t.storage_offset())


def untracked(*tensors: Tensor | None) -> bool:
    """Whether no gradient can flow to any of the tensors."""
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))
