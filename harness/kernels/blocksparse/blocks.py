"""Which blocks of keys each query sees, and which blocks of queries are computed together.

What lies out of sight, by position or mask, is neither chosen nor counted. What each call of torch costs besides
arithmetic is paid once for several blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall, four_dims
from harness.kernels.tiles import TILE_ROWS

QUERIES, KEYS = 128, 64  # SpargeAttn's


@dataclass(frozen=True, slots=True)
class Blocks:
    """The sizes of a block; the last ones may be shorter."""

    queries: int = QUERIES
    keys: int = KEYS

    def counts(self, q: Tensor, k: Tensor) -> tuple[int, int]:
        return -(-q.shape[2] // self.queries), -(-k.shape[2] // self.keys)


SPARGE_BLOCKS = Blocks()


def row_sight(q: Tensor, k: Tensor, call: AttentionCall, blocks: Blocks) -> Tensor:
    """Bool, broadcastable to (B, H, L, NK): does this query see some key of this block?"""
    L, S = q.shape[2], k.shape[2]
    NK = blocks.counts(q, k)[1]
    if call.mask is not None:
        allowed = call.allowed(q, k)
        assert allowed is not None
        allowed = four_dims(allowed)
        allowed = allowed.expand(*allowed.shape[:2], L, S)
        padded = torch.nn.functional.pad(allowed, (0, NK * blocks.keys - S))
        return padded.unflatten(-1, (NK, blocks.keys)).any(-1)
    i = torch.arange(L, device=q.device)
    return _within_reach(i, i, q, k, call, blocks)


def block_sight(q: Tensor, k: Tensor, call: AttentionCall, blocks: Blocks) -> Tensor:
    """Bool, broadcastable to (B, H, NQ, NK): does some query of the one block see some key of the other?"""
    if call.mask is not None:
        rows, NQ = row_sight(q, k, call, blocks), blocks.counts(q, k)[0]
        # The last block is filled up with queries that see nothing.
        padded = torch.nn.functional.pad(rows, (0, 0, 0, NQ * blocks.queries - rows.shape[2]))
        return padded.unflatten(2, (NQ, blocks.queries)).any(3)
    # The reaches of neighbouring queries touch: a block's goes from its first one's to its last one's.
    first, last = _ends(q, blocks)
    return _within_reach(first, last, q, k, call, blocks)


def covered(keep: Tensor, q: Tensor, k: Tensor, call: AttentionCall, blocks: Blocks) -> Tensor:
    """`keep` within sight, and a block more for each query that sees keys and would be left without any.

    Such a query takes the last block it sees, the nearest under causality: without it its output would be 0/0.
    """
    keep = keep & block_sight(q, k, call, blocks)
    if call.mask is None:
        first, last = _ends(q, blocks)
        seen_by_all = _within_reach(last, first, q, k, call, blocks)  # within reach from either end of the block
        if bool((keep & seen_by_all).any(-1).all()):  # mostly so, and found without a look at each query
            return keep
    rows = row_sight(q, k, call, blocks)
    L, NK = rows.shape[2:]
    of_row = torch.arange(L, device=keep.device) // blocks.queries
    orphans = rows.any(-1) & ~(keep[:, :, of_row] & rows).any(-1)  # (B, H, L)
    if bool(orphans.any()):
        last_seen = NK - 1 - rows.flip(-1).to(torch.uint8).argmax(-1)  # (.., L)
        b, h, i = orphans.nonzero(as_tuple=True)
        keep[b, h, of_row[i], last_seen.expand(orphans.shape)[b, h, i]] = True
    return keep


def _ends(q: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """The first and the last query of each block."""
    first = torch.arange(0, q.shape[2], blocks.queries, device=q.device)
    return first, (first + (blocks.queries - 1)).clamp(max=q.shape[2] - 1)


def _within_reach(
    left_of: Tensor, right_of: Tensor, q: Tensor, k: Tensor, call: AttentionCall, blocks: Blocks
) -> Tensor:
    """(B or 1, 1, N, NK): blocks that lie not wholly left of the reach of the one query, nor right of the other's."""
    left, right = call.reach
    first = torch.arange(0, k.shape[2], blocks.keys, device=q.device)  # (NK,)
    sees = torch.ones(1, 1, left_of.shape[0], first.shape[0], dtype=torch.bool, device=q.device)
    if left is None and right is None:
        return sees
    start = call.q_start.to(q.device)[:, None, None, None] if isinstance(call.q_start, Tensor) else call.q_start
    if right is not None:
        sees = sees & (first <= right_of[:, None] + (start + right))
    if left is not None:
        last = (first + (blocks.keys - 1)).clamp(max=k.shape[2] - 1)
        sees = sees & (last >= left_of[:, None] + (start - left))
    return sees


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of queries of one head, and the blocks of keys that it keeps."""

    b: int
    h: int
    source: int  # whose keys: among all (batch, key/value head)
    rows: slice  # its queries
    kept: tuple[int, ...]  # ascending


@dataclass(frozen=True, slots=True)
class QueryBatch:
    """Pieces of equally many queries and blocks of keys, computed together."""

    pieces: Sequence[Piece]
    alike: bool  # all keep the very same keys: their queries are rows of one product

    @property
    def queries(self) -> int:
        """Of each piece."""
        return self.pieces[0].rows.stop - self.pieces[0].rows.start

    @property
    def count(self) -> int:
        """Blocks of keys that each piece keeps."""
        return len(self.pieces[0].kept)

    @property
    def sources(self) -> Sequence[Piece]:
        """Those whose keys are read."""
        return self.pieces[:1] if self.alike else self.pieces


def batches(keep: Tensor, *, kv_heads: int, L: int, blocks: Blocks, budget: int) -> list[QueryBatch]:
    """Of a map (B, H, NQ, NK); a batch has at most `budget` scores, as far as a single piece allows.

    Longest first, so that no thread is left with it at the end.
    """
    found: list[QueryBatch] = []
    single: dict[tuple[object, ...], list[Piece]] = {}
    by_keys: dict[tuple[object, ...], list[Piece]] = {}
    for piece in _pieces(keep, kv_heads, L, blocks):
        by_keys.setdefault((piece.source, piece.rows.stop - piece.rows.start, piece.kept), []).append(piece)
    for group in by_keys.values():
        one = QueryBatch(group, alike=True)
        if len(group) > 1:
            found += _cut(one, blocks, budget)
        else:
            # Where the keys lie in one piece, those of several heads do too, and need not be gathered.
            place = group[0].kept if is_contiguous(group[0].kept) else None
            single.setdefault((one.queries, one.count, place), []).extend(group)
    for group in single.values():
        found += _cut(QueryBatch(group, alike=False), blocks, budget)
    return sorted(found, key=lambda batch: -len(batch.pieces) * batch.count)


def is_contiguous(kept: Sequence[int]) -> bool:
    return kept[-1] - kept[0] + 1 == len(kept)


def _pieces(keep: Tensor, kv_heads: int, L: int, blocks: Blocks) -> Iterator[Piece]:
    B, H = keep.shape[:2]
    flat = keep.flatten(0, 2)
    columns, lengths = flat.nonzero()[:, 1].tolist(), flat.sum(-1).tolist()
    starts = [slice(start, min(start + blocks.queries, L)) for start in range(0, L, blocks.queries)]
    at = begin = 0
    for b in range(B):
        for h in range(H):
            source = b * kv_heads + h // (H // kv_heads)
            for rows in starts:
                if lengths[at]:
                    yield Piece(b, h, source, rows, tuple(columns[begin : begin + lengths[at]]))
                begin += lengths[at]
                at += 1


def _cut(whole: QueryBatch, blocks: Blocks, budget: int) -> Iterator[QueryBatch]:
    scores = whole.queries * whole.count * blocks.keys
    most = max(min(TILE_ROWS // whole.queries, budget // scores), 1)
    for start in range(0, len(whole.pieces), most):
        yield QueryBatch(whole.pieces[start : start + most], whole.alike)
