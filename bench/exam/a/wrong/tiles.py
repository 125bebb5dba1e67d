"""Wrong kernels: tile borders, partial tiles, skipped tiles, long sequences."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

import math  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import INF, additive, hide, lower_triangle, safe_softmax, textbook  # noqa: E402
from wrong.registry import wrong  # noqa: E402


@wrong(exact=True, where="S > 64 and S % 64 != 0")
def tiles_last_partial_lost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last partial tile of 64 keys is not read (S // 64 tiles, at least one)."""
    keys = k.shape[-2]
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: hide(s, slice(keys // 64 * 64, None)) if keys > 64 else s,
    )


@wrong(exact=True, where="S % 16 != 0")
def tiles_padding_counted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keys are padded with zeros to a multiple of 16 and the padding is not masked: it counts in the softmax."""
    extra = -k.shape[-2] % 16
    if not extra or not k.shape[-2]:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def softmax(s: Tensor) -> Tensor:
        dead = (s == -INF).all(-1, keepdim=True)
        padded = torch.cat([s, s.new_zeros(*s.shape[:-1], extra)], -1)
        return safe_softmax(padded)[..., : s.shape[-1]].masked_fill(dead, 0.0)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(exact=True, where="S > 64 and S % 64 == 1")
def tiles_remainder_of_one_lost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A last tile of a single key is not read."""
    keys = k.shape[-2]
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: hide(s, slice(-1, None)) if keys > 64 and keys % 64 == 1 else s,
    )


@wrong(exact=True, where="S > 64 and S % 64 == 0")
def tiles_last_full_lost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With S an exact multiple of 64 the last tile is not read ((S - 1) // 64 tiles)."""
    keys = k.shape[-2]
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: hide(s, slice(-64, None)) if keys > 64 and keys % 64 == 0 else s,
    )


@wrong(exact=True, where="S > 512 with a bool mask")
def tiles_mask_ignored_beyond_512(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A bool mask is silently ignored for keys past position 512."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        bias = additive(m, s)
        return bias.index_fill(-1, torch.arange(512, max(m.shape[-1], 512)), 0.0) if m.dtype == torch.bool else bias

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="S > 4096")
def tiles_keys_beyond_4096_lost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keys past 4096 are not read."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_biased=lambda s: hide(s, slice(4096, None))
    )


@wrong(exact=True, where="S > 2048")
def tiles_second_pass_unweighted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Above 2048 keys two passes are merged by averaging instead of by their log-sum-exp."""
    if k.shape[-2] <= 2048:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def softmax(s: Tensor) -> Tensor:
        return torch.cat([safe_softmax(s[..., :2048]), safe_softmax(s[..., 2048:])], -1) * 0.5

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(exact=True, where="mask with rows, S > 64: tile hidden for the first row of a 64 row tile only")
def tiles_skipped_by_first_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A tile of 64 x 64 is skipped when its first row is masked out, although other rows see it."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        bias = additive(m, s).expand(s.shape).clone()
        for r in range(0, s.shape[-2], 64):
            for c in range(0, s.shape[-1], 64):
                tile = bias[..., r : r + 64, c : c + 64]
                dead = (tile[..., :1, :] == -INF).all(-1, keepdim=True)
                bias[..., r : r + 64, c : c + 64] = tile.masked_fill(dead, -INF)
        return bias

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="mask where the first key of a 32 key tile is hidden and others are not")
def tiles_skipped_by_first_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A tile of 32 keys is skipped for a row when its first key is masked."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        bias = additive(m, s).expand(s.shape)
        first = bias[..., ::32].repeat_interleave(32, -1)[..., : s.shape[-1]]
        return bias.masked_fill(first == -INF, -INF)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="mask that differs between batches, S > 64")
def tiles_skipped_by_first_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The list of 64 key tiles to skip is made from the mask of batch 0, head 0."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        bias = additive(m, s).expand(s.shape)
        for c in range(0, s.shape[-1], 64):
            if s.shape[0] and bool((bias[0, 0, :, c : c + 64] == -INF).all()):
                bias = hide(bias, slice(c, c + 64))
        return bias

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="L > 32 and L % 32 != 0")
def tiles_query_tail_not_written(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last partial tile of 32 queries is not written: its rows stay zero."""
    rows = q.shape[-2]
    keep = rows // 32 * 32 if rows > 32 else rows
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_out=lambda o: o.masked_fill((torch.arange(rows) >= keep)[:, None], 0.0),
    )


@wrong(exact=True, where="S > 64 and S % 64 != 0")
def tiles_last_overlaps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last tile is moved back to be full, and the keys it shares with the tile before count twice."""
    keys = k.shape[-2]
    if keys <= 64 or keys % 64 == 0:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    place = torch.arange(keys)
    twice = ((place >= keys - 64) & (place < keys // 64 * 64)).float() * math.log(2.0)
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_biased=lambda s: s + twice.to(s.dtype)
    )


@wrong(exact=True, where="mask, S > 128")
def tiles_mask_tile_not_advanced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The pointer into the mask is not advanced: every tile of 128 keys uses the first 128 mask columns."""
    mask = attn_mask
    if mask is not None and mask.shape[-1] > 128:
        mask = mask.index_select(-1, torch.arange(mask.shape[-1]) % 128)
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="S > 65536 with a mask")
def tiles_mask_index_sixteen_bits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The key index into the mask is kept in 16 bits and wraps at 65536."""
    mask = attn_mask
    if mask is not None and mask.shape[-1] > 65536:
        mask = mask.index_select(-1, torch.arange(mask.shape[-1]) % 65536)
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="1 < L < 64 < S")
def tiles_key_tile_as_short_as_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The key tile is as wide as the query tile min(64, L), but the loop advances by 64: keys in between are lost."""
    rows = q.shape[-2]
    lost = torch.arange(k.shape[-2]) % 64 >= rows
    active = 1 < rows < 64 < k.shape[-2]
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: s.masked_fill(lost, -INF) if active else s,
    )


@wrong(exact=True, where="S > 64 with an odd number of 64 key tiles")
def tiles_unrolled_by_two(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The loop over 64 key tiles is unrolled by two and an odd last tile is lost."""
    keys = k.shape[-2]
    tiles = -(-keys // 64)
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: hide(s, slice((tiles - 1) * 64, None)) if tiles > 1 and tiles % 2 else s,
    )


@wrong(exact=True, where="S >= 192: third tile")
def tiles_value_buffer_stale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Double buffering: the third tile of 64 keys is multiplied with the values of the first."""
    place = torch.arange(k.shape[-2])
    place = torch.where((place >= 128) & (place < 192), place - 128, place)
    return textbook(q, k, v.index_select(-2, place), attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="k with stride 0 over heads or batch, and S % 32 == 1")
def tiles_broadcast_keys_remainder(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """For expanded (stride 0) keys with S % 32 == 1 the last key is lost."""
    spread = any(k.stride(i) == 0 and k.shape[i] > 1 for i in (0, 1))
    lost = spread and k.shape[-2] % 32 == 1 and k.shape[-2] > 1
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: hide(s, slice(-1, None)) if lost else s,
    )


@wrong(exact=True, where="is_causal, L > 64: rows 64 to 95, 192 to 223, ...")
def tiles_causal_limit_rounded_down(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The number of 64 key tiles of a 32 row tile is rounded down: half of the row tiles lose their diagonal tile."""

    def seen(rows: int, keys: int, _: object) -> Tensor:
        row, key = torch.arange(rows)[:, None], torch.arange(keys)
        limit = ((row // 32 + 1) * 32).clamp(min=64) // 64 * 64
        return (key <= row) & (key < limit)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal=seen)


@wrong(exact=True, where="S < 8")
def tiles_short_keys_padded_with_first(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Fewer than 8 keys are padded by repeating the first key, which then counts more than once."""
    keys = k.shape[-2]
    if not 0 < keys < 8:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    extra = torch.zeros(keys).index_fill(0, torch.tensor([0]), math.log(9.0 - keys))
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_biased=lambda s: s + extra.to(s.dtype)
    )


@wrong(exact=True, where="L >= 128 and S >= 128 and not multiples of 128: bottom-right corner tile")
def tiles_corner_tile_lost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The corner tile that is partial in both directions (128 x 128) is skipped."""
    rows, keys = q.shape[-2], k.shape[-2]
    if rows <= 128 or keys <= 128 or rows % 128 == 0 or keys % 128 == 0:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    corner = (torch.arange(rows) >= rows // 128 * 128)[:, None] & (torch.arange(keys) >= keys // 128 * 128)
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_biased=lambda s: s.masked_fill(corner, -INF)
    )


@wrong(exact=True, where="1024 < S, is_causal: tiles past the first 1024 keys")
def tiles_causal_off_beyond_1024(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Past key 1024 the loop enters its unmasked main part one 64 key tile too early."""

    def seen(rows: int, keys: int, _: object) -> Tensor:
        row, key = torch.arange(rows)[:, None], torch.arange(keys)
        return lower_triangle(rows, keys) | ((key >= 1024) & (key // 64 <= row // 64))

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal=seen)


@wrong(exact=True, where="mask, S > 8 and S % 8 != 0")
def tiles_mask_vector_tail_unmasked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The mask is read in vectors of 8; the S % 8 tail is taken as unmasked (short masks have their own path)."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        bias, keys = additive(m, s), m.shape[-1]
        return F.pad(bias[..., : keys // 8 * 8], (0, keys % 8)) if keys > 8 else bias

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)
