"""Wrong kernels: queries and keys of different length (decode, chunked prefill, cross attention)."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import INF, hide, lower_triangle, safe_softmax, textbook  # noqa: E402
from wrong.registry import wrong  # noqa: E402


@wrong(exact=True, where="S > L > 1")
def lengths_keys_cut_at_query_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The loop over the keys ends at L: keys beyond L are never read (decode with L = 1 has its own path)."""
    rows = q.shape[-2]
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: hide(s, slice(rows, None)) if rows > 1 else s,
    )


@wrong(exact=True, where="L > S")
def lengths_query_tail_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Only the first S rows of the output are written when L > S."""

    def cut(out: Tensor) -> Tensor:
        return torch.cat([out[..., : k.shape[-2], :], torch.zeros_like(out[..., k.shape[-2] :, :])], -2)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_out=cut)


@wrong(exact=True, where="L = 1, S > 1")
def lengths_decode_last_key_lost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The decode path takes the cache length before the new token: the last key is not read."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: hide(s, slice(-1, None)) if s.shape[-2] == 1 < s.shape[-1] else s,
    )


@wrong(exact=True, where="L = 1, S > 256")
def lengths_decode_splits_averaged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The decode path splits more than 256 keys in chunks and averages the chunks without their weights."""
    if q.shape[-2] != 1 or k.shape[-2] <= 256:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def softmax(s: Tensor) -> Tensor:
        parts = [safe_softmax(x) for x in s.split(256, -1)]
        return torch.cat(parts, -1) / len(parts)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(exact=True, where="L = 1, S > 128 and S % 4 != 0")
def lengths_decode_split_remainder_lost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The decode path gives S // 4 keys to each of four splits and loses the remainder."""

    def lose(s: Tensor) -> Tensor:
        keys = s.shape[-1]
        return hide(s, slice(keys // 4 * 4, None)) if s.shape[-2] == 1 and keys > 128 else s

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_biased=lose)


@wrong(exact=True, where="is_causal, 1 < L < S, S a multiple of L")
def lengths_chunk_taken_for_last(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A query chunk whose length divides S is taken for the last chunk of a prefill (bottom-right causal)."""

    def chunk(rows: int, keys: int, _: object) -> Tensor:
        last = 1 < rows < keys and keys % rows == 0
        return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows if last else 0)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal=chunk)


@wrong(exact=True, where="S = 1 with a mask that hides the key")
def lengths_single_key_shortcut(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With one key the value is returned as it is, whatever the mask says."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        softmax=lambda s: torch.ones_like(s) if s.shape[-1] == 1 else safe_softmax(s),
    )


@wrong(exact=True, where="mask (..., L, S) with L != S, both > 1")
def lengths_mask_read_transposed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A mask with L != S is read with its two lengths swapped (memory order of (S, L))."""
    mask = attn_mask
    if mask is not None and 1 < mask.shape[-2] != mask.shape[-1] > 1:
        mask = mask.reshape(*mask.shape[:-2], mask.shape[-1], mask.shape[-2]).transpose(-2, -1)
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="is_causal, L > 128 and L % 128 != 0")
def lengths_query_tail_offset(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last partial chunk of 128 queries starts, for its causal rows, at L - 128 instead of at its own start."""

    def shifted(rows: int, keys: int, _: object) -> Tensor:
        row = torch.arange(rows)
        if rows > 128 and rows % 128:
            start = rows // 128 * 128
            row[start:] += rows - 128 - start
        return torch.arange(keys) <= row[:, None]

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal=shifted)


@wrong(exact=True, where="L > S: raises")
def lengths_output_shaped_as_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The output buffer is allocated with the length of the values, so L > S raises."""
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if k.shape[-2] and q.shape[-2] > k.shape[-2]:
        out = torch.empty(*out.shape[:-2], k.shape[-2], out.shape[-1], dtype=out.dtype).copy_(out)
    return out


@wrong(exact=True, where="1 < L < 8 (speculative decode)")
def lengths_few_queries_share_last_mask_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With 2 to 7 queries (speculative decode) every row uses the last row of the mask or causal triangle."""

    def seen(rows: int, keys: int, _: object) -> Tensor:
        mask = lower_triangle(rows, keys)
        return mask[-1:].expand(rows, keys) if 1 < rows < 8 else mask

    few = attn_mask is not None and 1 < q.shape[-2] < 8 and attn_mask.shape[-2] > 1
    mask = attn_mask[..., -1:, :] if few else attn_mask
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa, causal=seen)


@wrong(exact=True, where="L > 1024 (query chunks), float or bool mask with rows")
def lengths_query_chunk_mask_not_sliced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Queries are worked off in chunks of 1024; every chunk reads the mask from row 0."""
    mask = attn_mask
    if mask is not None and mask.shape[-2] > 1024:
        mask = mask.index_select(-2, torch.arange(mask.shape[-2]) % 1024)
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="is_causal, L > S: rows past S")
def lengths_causal_tail_rows_dead(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With L > S and is_causal the rows past S are masked out wholly."""

    def seen(rows: int, keys: int, _: object) -> Tensor:
        return lower_triangle(rows, keys) & (torch.arange(rows) < keys)[:, None]

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, causal=seen)


@wrong(exact=True, where="L = 1, S > 2048")
def lengths_decode_ring_buffer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The decode path reads only the newest 2048 keys of the cache."""

    def newest(s: Tensor) -> Tensor:
        old = torch.arange(s.shape[-1]) < s.shape[-1] - 2048
        return s.masked_fill(old, -INF) if s.shape[-2] == 1 else s

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_biased=newest)
