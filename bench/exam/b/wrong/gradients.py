"""Wrong kernels whose output is right and whose gradients are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._base import HALVES, Problem, as_if_contiguous, attend, mm, normalise, prepare, scores, solve, untracked, wrong

Grads = tuple[Tensor, Tensor, Tensor, Tensor | None]


def rebuilt(ctx: Any) -> Problem:
    """The problem as the forward pass saved it."""
    q, k, v, bias = ctx.saved_tensors
    return Problem(q, k, v, bias, ctx.scale, q.dtype)


def true_grads(x: Problem, probs: Tensor, grad: Tensor) -> Grads:
    """The textbook gradients of attention with respect to q, k, v and the bias."""
    grad_probs = mm(grad, x.v.mT)
    grad_scores = probs * (grad_probs - (grad_probs * probs).sum(-1, keepdim=True))
    grad_q = (mm(grad_scores, x.k) * x.scale).sum_to_size(x.q.shape)
    grad_k = (mm(grad_scores.mT, x.q) * x.scale).sum_to_size(x.k.shape)
    grad_v = mm(probs.mT, grad).sum_to_size(x.v.shape)
    return grad_q, grad_k, grad_v, None if x.bias is None else grad_scores.sum_to_size(x.bias.shape)


class Hand(torch.autograd.Function):
    """Attention with a backward pass written by hand; each bug overrides ``edited``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, low: object) -> Tensor:
        """Attend and remember the inputs."""
        ctx.save_for_backward(q, k, v, bias)
        ctx.scale, ctx.low = scale, low
        ctx.probs = normalise(scores(Problem(q, k, v, bias, scale, q.dtype)))
        return mm(ctx.probs, v)

    @classmethod
    def edited(cls, ctx: Any, x: Problem, grad: Tensor) -> Grads:
        """The gradients that this class hands back."""
        return true_grads(x, normalise(scores(x)), grad)

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Recompute the weights and hand back the gradients."""
        return (*cls.edited(ctx, rebuilt(ctx), grad), None, None)


def through(kind: type[Hand], x: Problem, dropout_p: float) -> Tensor:
    """Attend with a hand-written backward; dropout has the ordinary one."""
    if dropout_p > 0.0 or torch.compiler.is_compiling():
        return solve(x, dropout_p)
    return kind.apply(x.q, x.k, x.v, x.bias, x.scale, x.dtype).to(x.dtype)


class _MaskNotSummed(Hand):
    @classmethod
    def edited(cls, ctx: Any, x: Problem, grad: Tensor) -> Grads:
        grad_q, grad_k, grad_v, grad_bias = true_grads(x, normalise(scores(x)), grad)
        if x.bias is not None:
            wide = torch.broadcast_to(x.bias, (*grad.shape[:-1], x.k.size(-2)))
            full = true_grads(Problem(x.q, x.k, x.v, wide, x.scale, x.dtype), normalise(scores(x)), grad)[3]
            assert full is not None
            full = full[(0,) * (full.dim() - x.bias.dim())] if x.bias.dim() < full.dim() else full
            for axis, size in enumerate(x.bias.shape[:-2]):
                full = full.narrow(axis, 0, 1) if size == 1 else full
            grad_bias = full.sum_to_size(x.bias.shape)
        return grad_q, grad_k, grad_v, grad_bias


@wrong(exact=True, where="gradient of a float mask that broadcasts over batch or heads")
def mask_gradient_of_first_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradient of a broadcast bias is that of the first batch and head and not the sum (cf. xformers#783)."""
    return through(_MaskNotSummed, prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa), dropout_p)


@wrong(exact=True, where="only the mask requires grad")
def mask_alone_gets_no_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Nothing is kept for backward unless q, k or v wants it, so a mask alone gets none (pytorch#148476)."""
    if untracked(q, k, v) and attn_mask is not None:
        attn_mask = attn_mask.detach()
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="k or v requires grad and q does not")
def gradients_only_if_query_wants_them(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Whether to record is decided by the query alone, so frozen queries cut off keys and values."""
    if not q.requires_grad:
        k, v = k.detach(), v.detach()
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


class _KeyScale(Hand):
    @classmethod
    def edited(cls, ctx: Any, x: Problem, grad: Tensor) -> Grads:
        grad_q, grad_k, grad_v, grad_bias = true_grads(x, normalise(scores(x)), grad)
        return grad_q, grad_k * (max(x.q.size(-1), 1) ** -0.5 / x.scale if x.scale else 1.0), grad_v, grad_bias


@wrong(exact=True, where="gradient of k with an explicit scale")
def key_gradient_uses_default_scale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The backward of the keys uses the default scale whatever the forward used."""
    return through(_KeyScale, prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa), dropout_p)


class _HalfLogSum(Hand):
    @classmethod
    def edited(cls, ctx: Any, x: Problem, grad: Tensor) -> Grads:
        if ctx.low not in HALVES or x.k.size(-2) == 0:
            return true_grads(x, normalise(scores(x)), grad)
        s = scores(x)
        total = torch.logsumexp(s, -1, keepdim=True).to(ctx.low).to(s.dtype)
        return true_grads(x, torch.exp(s - torch.where(total.isinf(), torch.zeros_like(total), total)), grad)


@wrong(exact=False, where="gradients in half precision, scores of some tens")
def logsumexp_saved_in_half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The log-sum-exp saved for backward is half precision, so recomputed weights do not sum to one."""
    return through(_HalfLogSum, prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa), dropout_p)


class _FrozenWeights(Hand):
    @classmethod
    def edited(cls, ctx: Any, x: Problem, grad: Tensor) -> Grads:
        return true_grads(x, ctx.probs.detach(), grad)


@wrong(exact=True, where="second-order gradients")
def second_order_sees_frozen_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Backward uses weights kept on ctx, which double backward takes for constants (pytorch#58509, #76185)."""
    return through(_FrozenWeights, prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa), dropout_p)


class _GradStrides(Hand):
    @classmethod
    def edited(cls, ctx: Any, x: Problem, grad: Tensor) -> Grads:
        return true_grads(x, normalise(scores(x)), as_if_contiguous(grad))


@wrong(exact=True, where="backward from an incoming gradient that is a transposed view")
def incoming_gradient_strides_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Backward reads the incoming gradient as if it were contiguous."""
    return through(_GradStrides, prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa), dropout_p)


class _TailLost(Hand):
    @classmethod
    def edited(cls, ctx: Any, x: Problem, grad: Tensor) -> Grads:
        grad_q, grad_k, grad_v, grad_bias = true_grads(x, normalise(scores(x)), grad)
        keys = x.k.size(-2)
        if keys > 64:
            kept = (torch.arange(keys) < keys // 64 * 64).unsqueeze(-1)
            grad_k, grad_v = grad_k * kept, grad_v * kept
        return grad_q, grad_k, grad_v, grad_bias


@wrong(exact=True, where="gradients of k and v, S > 64 and not a multiple of 64")
def gradient_of_last_keys_lost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Backward skips the last partial tile of 64 keys (cf. flash-attention#2337, jvp_flash_attention#13)."""
    return through(_TailLost, prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa), dropout_p)


class _Uncleared(Hand):
    @classmethod
    def edited(cls, ctx: Any, x: Problem, grad: Tensor) -> Grads:
        grad_q, grad_k, grad_v, grad_bias = true_grads(x, normalise(scores(x)), grad)
        if not torch.is_grad_enabled():
            grad_q = torch.empty_like(grad_q).add_(grad_q)
        return grad_q, grad_k, grad_v, grad_bias


@wrong(exact=True, where="gradient of q, whenever fresh memory is not zero")
def query_gradient_accumulates_into_garbage(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The accumulator of the query's gradient is allocated and not cleared."""
    return through(_Uncleared, prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa), dropout_p)


class _WeightsReused(Hand):
    @classmethod
    def edited(cls, ctx: Any, x: Problem, grad: Tensor) -> Grads:
        if torch.is_grad_enabled():
            return true_grads(x, normalise(scores(x)), grad)
        grads = true_grads(x, ctx.probs, grad)
        ctx.probs.mul_(mm(grad, x.v.mT))
        return grads


@wrong(exact=True, where="a second backward through a retained graph")
def backward_consumes_its_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Backward overwrites the saved weights in place, so a second one through a retained graph is wrong."""
    return through(_WeightsReused, prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa), dropout_p)
