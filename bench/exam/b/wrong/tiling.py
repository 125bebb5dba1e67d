"""Wrong kernels that go over keys in tiles and slip at their edges."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ._base import Problem, finish, mm, normalise, prepare, quotient, row_max, scores, select_keys, solve, wrong


@wrong(exact=True, where="S > 64 and S not a multiple of 64")
def last_tile_shifted_back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last partial tile of 64 keys is moved back inside the tensor and counts some keys twice (jax#27224)."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    keys = k.size(-2)
    if keys > 64 and keys % 64:
        x = select_keys(x, torch.cat([torch.arange(keys // 64 * 64), torch.arange(keys - 64, keys)]))
    return solve(x, dropout_p)


@wrong(exact=True, where="no mask, S > 32 and S not a multiple of 32")
def zero_padding_attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Without a mask, keys padded with zeros to a multiple of 32 take part (66RING/tiny-flash-attention#12)."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    missing = -k.size(-2) % 32
    if x.bias is None and k.size(-2) > 32:
        x.k, x.v = (functional.pad(t, (0, 0, 0, missing)) for t in (x.k, x.v))
    return solve(x, dropout_p)


@wrong(exact=True, where="S > 128, maximum grows by little from tile to tile")
def small_rescale_skipped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The accumulators are not rescaled when the maximum grows by less than 5, yet the new maximum is used."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    if dropout_p > 0.0 or k.size(-2) <= 128:
        return solve(x, dropout_p)
    s = scores(x)
    top = row_max(s[..., :128])
    e = torch.exp(s[..., :128] - top)
    total, out = e.sum(-1, keepdim=True), mm(e, x.v[..., :128, :])
    for start in range(128, k.size(-2), 128):
        part = s[..., start : start + 128]
        grown = torch.maximum(top, part.detach().amax(-1, keepdim=True))
        factor = torch.where(grown - top < 5.0, torch.ones_like(top), torch.exp(top - grown))
        e = torch.exp(part - grown)
        total = total * factor + e.sum(-1, keepdim=True)
        out = out * factor + mm(e, x.v[..., start : start + 128, :])
        top = grown
    return quotient(out, total).to(x.dtype)


@wrong(exact=True, where="S > 128 and a row that sees nothing in one split of 128 keys")
def empty_split_is_nan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A split of 128 keys that is masked out for a row merges as NaN (flashinfer#4051, tilelang#328)."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    if dropout_p > 0.0 or k.size(-2) <= 128:
        return solve(x, dropout_p)
    s = scores(x)
    outs, totals = [], []
    for part, values in zip(s.split(128, -1), x.v.split(128, -2), strict=True):
        outs.append(mm(torch.softmax(part, -1), values))
        totals.append(torch.logsumexp(part, -1, keepdim=True))
    weights = normalise(torch.cat(totals, -1))
    return sum(w * o for w, o in zip(weights.split(1, -1), outs, strict=True)).to(x.dtype)


@wrong(exact=True, where="S % 32 == 1 and S > 32")
def lonely_last_key_lost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last key is lost when it is alone in its tile of 32 (pytorch/pytorch#191937)."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    if k.size(-2) > 32 and k.size(-2) % 32 == 1:
        x = select_keys(x, torch.arange(k.size(-2) - 1))
    return solve(x, dropout_p)


@wrong(exact=True, where="rows of one tile of 16 queries whose maxima differ by more than about 100")
def maximum_shared_by_a_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One maximum serves a tile of 16 queries, so rows far below it underflow."""
    x: Problem = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    s = scores(x)
    top = row_max(s)
    tiles = [t.amax(-2, keepdim=True).expand_as(t) for t in top.split(16, -2)] if top.numel() else [top]
    e = torch.exp(s - torch.cat(tiles, -2))
    return finish(x, quotient(e, e.sum(-1, keepdim=True)), dropout_p)
