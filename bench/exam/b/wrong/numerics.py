"""Wrong kernels whose arithmetic is not good enough."""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import HALVES, Problem, attend, finish, mm, normalise, prepare, quotient, row_max, scores, solve, wrong


@wrong(exact=False, where="half precision, hundreds of keys of like weight")
def denominator_summed_in_half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The softmax denominator is accumulated in the inputs' half type (huggingface/candle#3727, sonos/tract#2586)."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    if x.dtype not in HALVES:
        return solve(x, dropout_p)
    s = scores(x)
    e = torch.exp(s - row_max(s))
    total = torch.zeros_like(e[..., :1]) if e.size(-1) else e.new_zeros(*e.shape[:-1], 1)
    for part in e.split(4, -1):
        total = (total + part.sum(-1, keepdim=True)).to(x.dtype).to(e.dtype)
    return finish(x, quotient(e, total), dropout_p)


@wrong(exact=False, where="half precision, scores of some tens")
def scores_rounded_to_half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scores are stored in half before the softmax (the fallback of osaurus-ai/vmlx-swift#60)."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    s = (mm(x.q, x.k.mT) * x.scale).to(x.dtype).to(x.q.dtype)
    return finish(x, normalise(s if x.bias is None else s + x.bias), dropout_p)


@wrong(exact=False, where="half precision, scale not a power of two, large scores")
def query_scaled_in_half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The scale is multiplied into the half precision query and rounded before the product."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    x.q = (x.q * x.scale).to(x.dtype).to(x.q.dtype)
    x.scale = 1.0
    return solve(x, dropout_p)


@wrong(exact=False, where="float64")
def exp2_with_single_precision_log2e(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The exponential goes through exp2 with log2(e) to nine digits, as in Triton's tutorial 06, for float64 too."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    s = scores(x)
    e = torch.exp2((s - row_max(s)) * 1.44269504)
    return finish(x, quotient(e, e.sum(-1, keepdim=True)), dropout_p)


@wrong(exact=False, where="float64")
def double_computed_in_single(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Inputs of float64 are computed in float32 and only the result is float64."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    if x.dtype == torch.float64:
        bias = None if x.bias is None else x.bias.float()
        single = Problem(x.q.float(), x.k.float(), x.v.float(), bias, x.scale, torch.float32)
        return solve(single, dropout_p).double()
    return solve(x, dropout_p)


@wrong(exact=True, where="rows whose scores are all below about -90")
def running_maximum_starts_at_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The running maximum starts at 0 and not at minus infinity, so very negative rows underflow."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    s = scores(x)
    e = torch.exp(s - row_max(s).clamp(min=0))
    return finish(x, quotient(e, e.sum(-1, keepdim=True)), dropout_p)


@wrong(exact=False, where="half precision, more than a few tiles of 32 keys")
def accumulator_kept_in_half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The running output is rounded to half after each tile of keys (the kind of ggml-org/llama.cpp#24389)."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    if x.dtype not in HALVES or dropout_p > 0.0:
        return solve(x, dropout_p)
    probs = normalise(scores(x))
    out = mm(probs[..., :32], x.v[..., :32, :]).to(x.dtype)
    for start in range(32, probs.size(-1), 32):
        part = mm(probs[..., start : start + 32], x.v[..., start : start + 32, :])
        out = (out.to(part.dtype) + part).to(x.dtype)
    return out


@wrong(exact=True, where="thousands of keys that weigh little each and much together")
def small_weights_skipped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Weights below 1e-4 of the largest are skipped, as sparse-attention shortcuts do; their sum may be large."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    s = scores(x)
    e = torch.exp(s - row_max(s))
    e = torch.where(e < 1e-4, torch.zeros_like(e), e)
    return finish(x, quotient(e, e.sum(-1, keepdim=True)), dropout_p)


@wrong(exact=True, where="float16, unscaled products above 65504")
def product_overflows_before_scaling(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The float16 product is stored before it is scaled and overflows (pytorch/pytorch#121558 is of this family)."""
    if q.dtype != torch.float16:
        return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    raw = mm(x.q, x.k.mT)
    raw = torch.where(raw.abs() > 65504.0, raw * float("inf"), raw)
    s = raw * x.scale
    return finish(x, normalise(s if x.bias is None else s + x.bias), dropout_p)
