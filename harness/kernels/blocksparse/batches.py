"""Blocks of queries that are computed together: what each call costs besides arithmetic is paid once for several."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from harness.kernels.blocksparse.sight import Blocks
from harness.kernels.tiles import TILE_ROWS


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of queries of one head, and the blocks of keys that it keeps."""

    at: int  # among all (batch, head, block of queries)
    b: int
    h: int
    source: int  # whose keys: among all (batch, key/value head)
    rows: slice  # its queries
    kept: tuple[int, ...]  # ascending


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces of equally many queries and blocks of keys."""

    pieces: Sequence[Piece]
    alike: bool  # all keep the very same keys: their queries are rows of one product

    @property
    def queries(self) -> int:
        return self.pieces[0].rows.stop - self.pieces[0].rows.start

    @property
    def count(self) -> int:
        return len(self.pieces[0].kept)


def batches(keep: Tensor, *, kv_heads: int, L: int, blocks: Blocks, budget: int) -> list[Batch]:
    """Of a map (B, H, NQ, NK); a batch has at most `budget` scores, as far as a single piece allows.

    Longest first, so that no thread is left with it at the end.
    """
    found: list[Batch] = []
    single: dict[tuple[object, ...], list[Piece]] = {}
    for group in _by_keys(_pieces(keep, kv_heads, L, blocks)):
        one = Batch(group, alike=True)
        if len(group) > 1:
            found += _cut(one, blocks, budget)
        else:
            # Where the keys lie in one piece, those of several heads do too, and need not be gathered.
            place = group[0].kept if is_contiguous(group[0].kept) else None
            single.setdefault((one.queries, one.count, place), []).extend(group)
    for group in single.values():
        found += _cut(Batch(group, alike=False), blocks, budget)
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
                    yield Piece(at, b, h, source, rows, tuple(columns[begin : begin + lengths[at]]))
                begin += lengths[at]
                at += 1


def _by_keys(pieces: Iterable[Piece]) -> Iterable[list[Piece]]:
    groups: dict[tuple[object, ...], list[Piece]] = {}
    for piece in pieces:
        groups.setdefault((piece.source, piece.rows.stop - piece.rows.start, piece.kept), []).append(piece)
    return groups.values()


def _cut(whole: Batch, blocks: Blocks, budget: int) -> Iterator[Batch]:
    scores = whole.queries * whole.count * blocks.keys
    most = max(min(TILE_ROWS // whole.queries, budget // scores), 1)
    for start in range(0, len(whole.pieces), most):
        yield Batch(whole.pieces[start : start + most], whole.alike)
