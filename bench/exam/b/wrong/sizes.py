"""Wrong kernels that fail at long sequences, many heads, odd head dimensions and odd scales."""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import attend, default_scale, finish, merge_bias, mm, normalise, prepare, quotient, solve, wrong


@wrong(exact=True, where="B * H > 65535")
def heads_past_the_grid_unwritten(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Batch times heads beyond 65535 exceeds the launch grid and is left zero (pytorch#142228, flashinfer#3125)."""
    out = attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    written = torch.arange(q.size(0) * q.size(1)).view(q.size(0), q.size(1), 1, 1) < 65535
    return torch.where(written, out, torch.zeros_like(out))


@wrong(exact=True, where="S > 65536")
def key_index_of_sixteen_bits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Key rows are addressed with 16 bits and wrap around (the family of thu-ml/SageAttention#386)."""
    if k.size(-2) > 65536:
        k = k[..., torch.arange(k.size(-2)) % 65536, :]
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="H > 256")
def head_index_of_eight_bits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The head index is a byte, so head 256 reads the keys of head 0."""
    if not enable_gqa and k.size(1) > 256:
        k = k[:, torch.arange(k.size(1)) % 256]
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="is_causal, bfloat16 beyond 256 rows or float16 beyond 2048")
def causal_positions_in_half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Causality compares positions held in the inputs' type, which rounds them (the RoPE bug of half positions)."""
    if not is_causal:
        return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    x = prepare(q, k, v, attn_mask, False, scale, enable_gqa)
    rows = torch.arange(q.size(-2)).to(x.dtype).unsqueeze(-1)
    columns = torch.arange(k.size(-2)).to(x.dtype)
    x.bias = merge_bias(x.bias, columns <= rows).to(x.q.dtype)
    return solve(x, dropout_p)


@wrong(exact=True, where="default scale, D not a multiple of 8")
def scale_of_padded_head_dim(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The default scale is taken after the head dimension was padded to a multiple of 8."""
    if scale is None:
        scale = (-(-max(q.size(-1), 1) // 8) * 8) ** -0.5
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="odd D above 1")
def odd_last_feature_lost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Loads are two wide, and the last feature of an odd head dimension is lost (tenstorrent/tt-metal#33434)."""
    if q.size(-1) % 2 and q.size(-1) > 1:
        scale = default_scale(q) if scale is None else scale
        q, k = q[..., :-1], k[..., :-1]
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="D_v > 64 and not a multiple of 16")
def value_tail_unwritten(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Columns of the output beyond the last full 16 are left zero for D_v above 64 (openvino#26945)."""
    out = attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    width = v.size(-1)
    if width > 64 and width % 16:
        out = torch.where(torch.arange(width) < width // 16 * 16, out, torch.zeros_like(out))
    return out


@wrong(exact=True, where="D > 256")
def features_past_256_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The product runs over the first 256 features only, the largest head dimension of the compiled variants."""
    if q.size(-1) > 256:
        scale = default_scale(q) if scale is None else scale
        q, k = q[..., :256], k[..., :256]
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="scale=0.0")
def zero_scale_taken_for_none(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scale or default`` takes an explicit scale of 0 for none given."""
    scale = scale or default_scale(q)
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="negative scale, no mask, scores spread over more than 88")
def negative_scale_overflows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The maximum is taken before scaling, so a negative scale subtracts the minimum and overflows."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    if x.bias is not None or k.size(-2) == 0:
        return solve(x, dropout_p)
    raw = mm(x.q, x.k.mT)
    e = torch.exp((raw - raw.detach().amax(-1, keepdim=True)) * x.scale)
    return finish(x, quotient(e, e.sum(-1, keepdim=True)) if x.scale else normalise(raw * 0.0), dropout_p)
