"""Wrong kernels: alignment and borders of the causal mask."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import INF, expand_heads, lower_triangle, textbook  # noqa: E402
from wrong.registry import wrong  # noqa: E402


def _triangle(rows: int, keys: int, diagonal: int) -> Tensor:
    """A lower triangle with a shifted diagonal."""
    return torch.ones(rows, keys, dtype=torch.bool).tril(diagonal)


@wrong(exact=True, where="is_causal, L != S")
def causal_bottom_right(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The causal mask is aligned bottom-right (as in flash-attention 2.1) instead of top-left."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        causal=lambda rows, keys, _: _triangle(rows, keys, keys - rows),
    )


@wrong(exact=True, where="is_causal")
def causal_strict(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A query does not see its own position."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        causal=lambda rows, keys, _: _triangle(rows, keys, -1),
    )


@wrong(exact=True, where="is_causal, S > 1")
def causal_one_ahead(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A query sees one position ahead."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        causal=lambda rows, keys, _: _triangle(rows, keys, 1),
    )


@wrong(exact=True, where="is_causal")
def causal_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """is_causal is ignored."""
    return textbook(q, k, v, attn_mask, dropout_p, False, scale, enable_gqa)


@wrong(exact=True, where="is_causal, L = 1, S > 1")
def causal_ignored_for_one_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A single query is taken for a decode step and sees every key although is_causal is set."""
    return textbook(q, k, v, attn_mask, dropout_p, is_causal and q.shape[-2] > 1, scale, enable_gqa)


@wrong(exact=True, where="is_causal, L != S")
def causal_ignored_when_not_square(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """is_causal is ignored when L != S (taken for cross attention)."""
    return textbook(q, k, v, attn_mask, dropout_p, is_causal and q.shape[-2] == k.shape[-2], scale, enable_gqa)


@wrong(exact=True, where="is_causal and enable_gqa with groups")
def causal_ignored_in_gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The grouped path forgets is_causal."""
    grouped = enable_gqa and q.shape[-3] != k.shape[-3]
    return textbook(q, k, v, attn_mask, dropout_p, is_causal and not grouped, scale, enable_gqa)


@wrong(exact=True, where="is_causal, inside the diagonal tile")
def causal_by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Only whole tiles of 64 keys are masked; the tile on the diagonal is seen in full."""

    def blocks(rows: int, keys: int, _: object) -> Tensor:
        return torch.arange(keys) // 64 <= torch.arange(rows)[:, None] // 64

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal=blocks)


@wrong(exact=True, where="is_causal")
def causal_upper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The upper triangle is kept instead of the lower one."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        causal=lambda rows, keys, _: torch.ones(rows, keys, dtype=torch.bool).triu(),
    )


@wrong(exact=True, where="is_causal, S > 1024")
def causal_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A sliding window of 1024 positions is left on by default."""

    def window(rows: int, keys: int, _: object) -> Tensor:
        return _triangle(rows, keys, 0) & ~_triangle(rows, keys, -1024)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal=window)


@wrong(exact=True, where="is_causal, L > S")
def causal_long_query_shifted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With L > S the mask is bottom-right aligned, so that the first L - S rows see nothing."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        causal=lambda rows, keys, _: _triangle(rows, keys, min(keys - rows, 0)),
    )


@wrong(exact=True, where="is_causal, last row, S > L")
def causal_last_row_sees_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last query is taken for the newest token and sees all the keys."""

    def seen(rows: int, keys: int, _: object) -> Tensor:
        return _triangle(rows, keys, 0) | (torch.arange(rows) == rows - 1)[:, None]

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal=seen)


@wrong(exact=True, where="is_causal, S <= 16")
def causal_ignored_for_short_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The small-problem path (S <= 16) has no causal mask."""
    return textbook(q, k, v, attn_mask, dropout_p, is_causal and k.shape[-2] > 16, scale, enable_gqa)


@wrong(exact=True, where="is_causal, scores below -1e4")
def causal_minus_ten_thousand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Future keys get -1e4 added instead of -inf."""
    gone = ~lower_triangle(q.shape[-2], k.shape[-2])
    bias = gone.to(torch.float32) * -1e4 if is_causal else 0.0
    return textbook(q, k, v, attn_mask, dropout_p, False, scale, enable_gqa, on_scores=lambda s: s + bias)


@wrong(exact=True, where="is_causal, S > 1024")
def causal_buffer_too_short(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The causal mask is a buffer of 1024 x 1024; what lies outside of it is not masked."""

    def buffered(rows: int, keys: int, _: object) -> Tensor:
        seen = torch.ones(rows, keys, dtype=torch.bool)
        seen[:1024, :1024] = _triangle(min(rows, 1024), min(keys, 1024), 0)
        return seen

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal=buffered)


@wrong(exact=True, where="is_causal, row 0")
def causal_first_row_sees_two(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The first row is given a second key so that its softmax is never trivial."""

    def seen(rows: int, keys: int, _: object) -> Tensor:
        mask = _triangle(rows, keys, 0)
        mask[:1, :2] = True
        return mask

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal=seen)


@wrong(exact=True, where="is_causal, L >= 65: rows at a multiple of 64")
def causal_tile_bound_exclusive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last key tile of a row tile is found from its first row, exclusively: rows 64, 128, ... lose themselves."""

    def seen(rows: int, keys: int, _: object) -> Tensor:
        row, key = torch.arange(rows)[:, None], torch.arange(keys)
        return (key <= row) & ~((row % 64 == 0) & (row > 0) & (key == row))

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal=seen)


@wrong(exact=True, where="is_causal, B > 1, batches after the first")
def causal_flat_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The row number runs over the flattened (batch, row), so later batches see the future."""
    if not is_causal:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    rows, keys = q.shape[-2], k.shape[-2]
    row = torch.arange(q.shape[0] * rows).view(q.shape[0], 1, rows, 1)
    gone = torch.arange(keys) > row
    return textbook(
        q, k, v, attn_mask, dropout_p, False, scale, enable_gqa, on_scores=lambda s: s.masked_fill(gone, -INF)
    )


@wrong(exact=True, where="is_causal, L = 1 decode, S > 1, with GQA only")
def causal_decode_bottom_right_in_gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The grouped decode path (L = 1) lets the query see all the keys under is_causal."""
    lone = q.shape[-2] == 1 and enable_gqa and k.shape[-3] != q.shape[-3]
    return textbook(q, k, v, attn_mask, dropout_p, is_causal and not lone, scale, enable_gqa)


@wrong(exact=True, where="is_causal, heads after the 8th")
def causal_only_first_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The causal mask is applied to the first 8 heads of the tile only."""
    if not is_causal:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    first = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    rest = textbook(q, k, v, attn_mask, dropout_p, False, scale, enable_gqa)
    return torch.cat([first[..., :8, :, :], rest[..., 8:, :, :]], -3)


@wrong(exact=True, where="is_causal, L > 1, GQA: rows packed by head")
def causal_packed_gqa_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Query heads are packed into rows (row * group + head) and the packed row is used as the causal row."""
    group = q.shape[-3] // max(k.shape[-3], 1) if enable_gqa and k.shape[-3] else 1
    if not is_causal or group <= 1:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    head = torch.arange(q.shape[-3]) % group
    row = torch.arange(q.shape[-2])[:, None] * group + head[:, None, None]
    gone = torch.arange(k.shape[-2]) > row
    kk, vv = expand_heads(k, q.shape[-3]), expand_heads(v, q.shape[-3])
    return textbook(q, kk, vv, attn_mask, dropout_p, False, scale, False, on_scores=lambda s: s.masked_fill(gone, -INF))
