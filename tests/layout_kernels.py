"""A user's kernel file: kernels with signatures of their own, some right, most wrong in one known way."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import harness


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, seen: Tensor | None = None, p: float = 0.0) -> Tensor:
    """One sequence: q (L, H, D) over k (S, H_kv, D), v (S, H_kv, D_v); `seen` (L, S). Gives (L, H, D_v)."""
    dtype, groups = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = (t.to(torch.promote_types(dtype, torch.float32)).transpose(0, 1) for t in (q, k, v))  # (H, L, D)
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    weights = torch.softmax(scores, -1)
    if seen is not None:
        weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return (torch.dropout(weights, p, train=p > 0) @ v).transpose(0, 1).to(dtype)


def bottom_right(L: int, S: int) -> Tensor:
    return torch.ones(L, S, dtype=torch.bool).tril(S - L)


def top_left(L: int, S: int) -> Tensor:
    return torch.ones(L, S, dtype=torch.bool).tril()


# (B, L, H, D)


def _blhd(causal_mask: Any) -> Any:
    @harness.kernel(layout="blhd")
    def flash(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        seen = causal_mask(q.shape[1], k.shape[1]) if causal else None
        return torch.stack([attend(*row, softmax_scale, seen, dropout_p) for row in zip(q, k, v, strict=True)])

    return flash


flash = _blhd(bottom_right)
flash_top_left = _blhd(top_left)


@harness.kernel(layout="blhd")
def flash_untransposed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out: Tensor = flash(q, k, v, **options)
    return out.transpose(1, 2).contiguous()


@harness.kernel(layout="blhd")
def flash_with_lse(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return flash(q, k, v, **options), q.sum(-1)


# Packed


def _varlen(causal_mask: Any = bottom_right, late: int = 0) -> Any:
    @harness.kernel(layout="varlen")
    def packed(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        parts = []
        starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        assert max_seqlen_k == max(b - a for a, b in pairwise(starts_k))
        for row in range(len(starts_q) - 1):
            own_q = slice(starts_q[row], starts_q[row + 1])
            own_k = slice(starts_k[row], min(starts_k[row + 1] + late, len(k)))
            L, S = own_q.stop - own_q.start, own_k.stop - own_k.start
            seen = causal_mask(L, S) if causal else None
            parts.append(attend(q[own_q], k[own_k], v[own_k], softmax_scale, seen, dropout_p))
        return torch.cat(parts)

    return packed


packed = _varlen()
packed_top_left = _varlen(top_left)
packed_one_key_more = _varlen(late=1)


@harness.kernel(layout="varlen")
def packed_as_one(
    q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, *longest: int, **o: Any
) -> Tensor:
    """Takes all sequences for one."""
    ends = (torch.tensor([0, len(q)]), torch.tensor([0, len(k)]))
    out: Tensor = packed(q, k, v, *ends, len(q), len(k), **o)
    return out


# Pages


def _paged(read: Any) -> Any:
    @harness.kernel(layout="paged")
    def paged(
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        softmax_scale: float | None = None,
    ) -> Tensor:
        rows = []
        for row in range(len(q)):
            k, v = (read(pages, block_table[row].long(), int(seq_lens[row])) for pages in (k_pages, v_pages))
            rows.append(attend(q[row, None], k, v, softmax_scale)[0])
        return torch.stack(rows)

    return paged


def _keys(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """Of the pages that `length` keys need, all keys: (pages * page size, H_kv, D)."""
    return pages[table[: -(-length // pages.shape[1])]].flatten(0, 1)


paged = _paged(lambda pages, table, n: _keys(pages, table, n)[:n])
paged_with_tail = _paged(_keys)
paged_in_order = _paged(lambda pages, table, n: _keys(pages, table.sort()[0], n)[:n])
paged_without_table = _paged(lambda pages, table, n: pages.flatten(0, 1)[:n])
paged_next_page = _paged(lambda pages, table, n: _keys(pages, (table + 1) % len(pages), n)[:n])
paged_last_key_lost = _paged(lambda pages, table, n: _keys(pages, table, n)[: max(n - 1, 1)])


@harness.kernel(layout="paged")
def paged_masked(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float | None = None,
) -> Tensor:
    """Right, and loads everything that the table names: hidden numbers get no weight."""
    k, v = (pages[block_table.long()].flatten(1, 2) for pages in (k_pages, v_pages))  # (B, S, H_kv, D)
    seen = torch.arange(k.shape[1]) < seq_lens[:, None]
    rows = [attend(q[b, None], k[b], v[b], softmax_scale, seen[b, None])[0] for b in range(len(q))]
    return torch.stack(rows)
