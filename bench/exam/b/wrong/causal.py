"""Wrong kernels whose causal mask has the wrong shape somewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import attend, causal_visible, merge_bias, prepare, solve, wrong


@wrong(exact=True, where="is_causal with one query and several keys")
def causal_dropped_for_one_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """is_causal is dropped for a single query, right for bottom-right alignment only (flash-attention#282, #951)."""
    if q.size(-2) == 1:
        is_causal = False
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="is_causal with more queries than keys")
def causal_rows_past_the_keys_are_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Causal rows beyond the last key stay zero because the loop bound is negative (flash-attention#1778)."""
    out = attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if is_causal and q.size(-2) > k.size(-2):
        past = (torch.arange(q.size(-2)) >= k.size(-2)).unsqueeze(-1)
        out = torch.where(past, torch.zeros_like(out), out)
    return out


@wrong(exact=True, where="is_causal, row 128, 256, ...")
def causal_strict_on_tile_boundary(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The first row of each further tile of 128 does not see its own key, an off-by-one of the tile loop."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    if is_causal:
        rows = torch.arange(q.size(-2)).unsqueeze(-1)
        columns = torch.arange(k.size(-2))
        hidden = (rows == columns) & (rows % 128 == 0) & (rows > 0)
        x.bias = merge_bias(x.bias, ~hidden)
    return solve(x, dropout_p)


@wrong(exact=True, where="is_causal, tiles of 64 queries by 96 keys, L > 128")
def causal_tile_taken_for_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A tile counts as fully visible by its last query and not its first, leaking keys (flash-attention#436)."""
    if not is_causal:
        return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    x = prepare(q, k, v, attn_mask, False, scale, enable_gqa)
    rows = torch.arange(q.size(-2)).unsqueeze(-1)
    columns = torch.arange(k.size(-2))
    full = (rows // 64 + 1) * 64 >= (columns // 96 + 1) * 96
    x.bias = merge_bias(x.bias, causal_visible(q.size(-2), k.size(-2)) | full).to(x.q.dtype)
    return solve(x, dropout_p)


@wrong(exact=True, where="is_causal with D_v != D")
def causal_dropped_off_the_fused_path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """D_v != D leaves the fused path, and the general one forgets causality (keras#23038, xformers#103)."""
    if v.size(-1) != q.size(-1):
        is_causal = False
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
