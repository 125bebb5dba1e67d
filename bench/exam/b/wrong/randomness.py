"""Wrong kernels that mistreat dropout or the random generator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._base import Problem, attend, finish, mm, normalise, prepare, quotient, row_max, scores, wrong
from .gradients import rebuilt


def kept(shape: torch.Size, dropout_p: float, generator: torch.Generator | None = None) -> Tensor:
    """A dropout mask that is already rescaled."""
    if dropout_p >= 1.0:
        return torch.zeros(shape)
    return (torch.rand(shape, generator=generator) >= dropout_p) / (1.0 - dropout_p)


class _Redrawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, p: float) -> Tensor:
        """Attend with dropout."""
        ctx.save_for_backward(q, k, v, bias)
        ctx.scale, ctx.p = scale, p
        probs = normalise(scores(Problem(q, k, v, bias, scale, q.dtype)))
        return mm(probs * kept(probs.shape, p).to(probs.dtype), v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Hand back gradients under a mask drawn anew."""
        x = rebuilt(ctx)
        probs = normalise(scores(x))
        mask = kept(probs.shape, ctx.p).to(probs.dtype)
        grad_probs = mm(grad, x.v.mT) * mask
        inner = probs * (grad_probs - (grad_probs * probs).sum(-1, keepdim=True))
        grad_bias = None if x.bias is None else inner.sum_to_size(x.bias.shape)
        grad_q, grad_k = mm(inner, x.k) * x.scale, mm(inner.mT, x.q) * x.scale
        return grad_q, grad_k, mm((probs * mask).mT, grad), grad_bias, None, None


@wrong(exact=True, where="gradients with dropout")
def dropout_redrawn_in_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Backward draws another dropout mask than forward did (pytorch/pytorch#197563 and #196586)."""
    if dropout_p <= 0.0:
        return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    return _Redrawn.apply(x.q, x.k, x.v, x.bias, x.scale, dropout_p).to(x.dtype)


@wrong(exact=True, where="dropout, from call to call")
def dropout_with_a_constant_seed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Dropout uses a constant seed, the same mask in each call (Dao-AILab/flash-attention#2088, #314)."""
    if dropout_p <= 0.0:
        return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    probs = normalise(scores(x))
    mask = kept(probs.shape, dropout_p, torch.Generator().manual_seed(0x1BF58))
    return finish(x, probs * mask.to(probs.dtype))


@wrong(exact=True, where="dropout with several batches or heads")
def dropout_shared_by_all_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One dropout mask of shape (L, S) serves all batches and heads."""
    if dropout_p <= 0.0:
        return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    probs = normalise(scores(x))
    return finish(x, probs * kept(probs.shape[-2:], dropout_p).to(probs.dtype))


@wrong(exact=True, where="dropout, sums of the weights")
def dropout_before_the_denominator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Dropout comes before the denominator is summed, so what is left is normalised to one again."""
    if dropout_p <= 0.0:
        return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    s = scores(x)
    e = torch.exp(s - row_max(s))
    e = e * (kept(e.shape, dropout_p) > 0).to(e.dtype)
    return finish(x, quotient(e, e.sum(-1, keepdim=True)))


@wrong(exact=True, where="the global random generator after a call without dropout")
def seed_drawn_without_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A dropout seed is drawn from the global generator even when nothing is dropped."""
    torch.randint(2**31, (1,))
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
