"""Exact attention over the kept blocks alone: what is skipped is neither read nor multiplied.

For each block of queries the kept blocks of keys are gathered, and one product, one softmax and one more product over
them follow, for several such blocks at a time. Threads take batches of their own, as tiled's do with tiles.
"""

import functools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.kernels.blocksparse.blocks import (
    SPARGE_BLOCKS,
    Blocks,
    Piece,
    QueryBatch,
    batches,
    block_sight,
    is_contiguous,
)
from harness.kernels.call import AttentionCall, BlockCount, Unsupported, four_dims
from harness.kernels.eager import eager
from harness.kernels.threads import alone, spread
from harness.kernels.tiled import LOG2_E
from harness.kernels.tiles import SHARE, cache_bytes
from harness.kernels.transforms import is_transformed

INF = float("inf")


def block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    keep: Tensor,
    *,
    blocks: Blocks = SPARGE_BLOCKS,
    pv: float | None = None,
) -> tuple[Tensor, BlockCount]:
    """Attention in which a query sees what `call` lets it see of its kept blocks; without any it gives 0.

    keep  bool, broadcastable to (B, H, NQ, NK); blocks out of sight are not computed whatever it says
    pv    SpargeAttn's lambda, in nats: a kept block whose scores all lie at least that much below what its rows have
          seen up to it takes its share of the softmax, and its product with the values is left out
    """
    refuse(q, k, v, call)
    (B, H), (NQ, NK) = q.shape[:2], blocks.counts(q, k)
    sight = block_sight(q, k, call, blocks).expand(B, H, NQ, NK)
    keep = keep.expand(B, H, NQ, NK) & sight
    threads = torch.get_num_threads() if q.device.type == "cpu" else 1
    work, todo = alone(lambda: _prepare(q, k, v, call, keep, blocks=blocks, pv=pv, threads=threads))
    out = work.out
    if todo and out.numel():
        rooms = [work.room(todo) for _ in range(min(threads, len(todo)))]
        with torch.no_grad():
            spread(functools.partial(_fill, work), rooms, todo)
            # Sums that are divided last overflow a little sooner: then by eager's lines. A sum of what is finite may
            # overflow too, and merely takes the longer way.
            if not math.isfinite(float(out.sum(dtype=work.k.dtype))):
                out = _by_eager(q, k, v, call, keep, blocks)
                work.pv_skipped.clear()
    count = BlockCount(int(keep.sum()), int(sight.sum()), B * H * NQ * NK, sum(work.pv_skipped))
    return out, count


def refuse(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
    """What is not supported is said, never ignored."""
    if call.need_weights:
        raise Unsupported("block-sparse attention gives no attention weights")
    if call.dropout_p > 0:
        raise Unsupported("block-sparse attention is for inference: no dropout")
    if call.needs_gradients(q, k, v):
        raise Unsupported("block-sparse attention is for inference: no gradients (use torch.no_grad())")
    if q.is_meta or is_transformed():
        raise Unsupported(
            "block-sparse attention chooses by values: no meta tensors, no torch.compile, tracing or torch.func"
        )


def expanded(keep: Tensor, blocks: Blocks, L: int, S: int) -> Tensor:
    """The map of blocks as one of elements: (.., L, S)."""
    return keep.repeat_interleave(blocks.queries, -2)[..., :L, :].repeat_interleave(blocks.keys, -1)[..., :S]


def _by_eager(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, keep: Tensor, blocks: Blocks) -> Tensor:
    return eager(q, k, v, call.restricted(expanded(keep, blocks, q.shape[2], k.shape[2])))[0]


@dataclass(frozen=True, slots=True)
class _Work:
    """All that the batches of one call share."""

    q: Tensor
    k: Tensor  # (B * H_kv * NK, keys, D), wide, the last block of a head filled up with zeros
    v: Tensor  # (B * H_kv * NK, keys, D_v)
    out: Tensor
    call: AttentionCall
    mask: Tensor | None  # (B or 1, H or 1, L or 1, NK, keys)
    S: int
    per_head: int  # NK
    blocks: Blocks
    pv: float | None
    ceilings: dict["_Edge", Tensor] = field(default_factory=dict)  # made once for all that hide alike
    pv_skipped: list[int] = field(default_factory=list)  # of each batch: appending needs no lock

    def room(self, todo: Sequence[QueryBatch]) -> Tensor:
        """For the gathered keys, then values, the scores and the output of one batch."""
        D, D_v, width = self.k.shape[2], self.v.shape[2], self.blocks.keys

        def size(batch: QueryBatch) -> int:
            keys, rows = batch.count * width, len(batch.pieces) * batch.queries
            return len(batch.sources) * keys * max(D, D_v) + rows * (keys + D_v)

        return self.k.new_empty(max(map(size, todo)))


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    keep: Tensor,
    *,
    blocks: Blocks,
    pv: float | None,
    threads: int,
) -> tuple[_Work, list[QueryBatch]]:
    """What the batches of the call share, and the batches."""
    wide = torch.promote_types(q.dtype, torch.float32)
    S, NK = k.shape[2], keep.shape[3]
    budget = cache_bytes() // (SHARE * threads * wide.itemsize)
    todo = batches(keep, kv_heads=k.shape[1], L=q.shape[2], blocks=blocks, budget=budget)
    is_full = sum(len(batch.pieces) for batch in todo) == keep.shape[:3].numel()
    out = (q.new_empty if is_full else q.new_zeros)(*q.shape[:3], v.shape[3])
    short = NK * blocks.keys - S

    def cut(t: Tensor) -> Tensor:
        """At most one pass over the keys, so that each block lies in one piece: nothing beside the products."""
        t = t.detach().to(wide)
        return (F.pad(t, (0, 0, 0, short)) if short else t).reshape(-1, blocks.keys, t.shape[3])

    mask = call.mask
    if mask is not None:
        mask = four_dims(mask.detach())
        mask = F.pad(mask.expand(*mask.shape[:3], S), (0, short)).unflatten(3, (NK, blocks.keys))
    return _Work(q.detach(), cut(k), cut(v), out, call, mask, S, NK, blocks, pv), todo


def _fill(work: _Work, room: Tensor, todo: Iterator[QueryBatch]) -> None:
    """The output of each batch, computed in `room`: its scores, what they mix of the values, then the gathered keys."""
    width, D_v = work.blocks.keys, work.v.shape[2]
    for batch in todo:
        m, r, n = len(batch.pieces), batch.queries, batch.count
        heads, rows = (1, m * r) if batch.alike else (m, r)
        scores = room[: m * r * n * width].view(heads, rows, n * width)
        mixed = room[scores.numel() :][: m * r * D_v].view(heads, rows, D_v)
        rest = room[scores.numel() + mixed.numel() :]
        by_block = scores.view(m, r, n, width)

        _score(work, batch, scores, rest)
        _hide(work, batch, by_block)
        total, counted = _exponentiate(work, batch, by_block)
        if counted is None:
            torch.bmm(scores, _gather(work, work.v, batch.sources, rest), out=mixed)
        else:
            work.pv_skipped.append(int((~counted).sum()))
            _multiply_counted(work, batch, by_block, counted, mixed.view(m, r, D_v))
        _write(work.out, batch, mixed.view(m, r, D_v), total)


def _score(work: _Work, batch: QueryBatch, scores: Tensor, rest: Tensor) -> None:
    """Into `scores`, (heads, rows, keys); the kept keys are gathered in `rest`."""
    q = _stack(work.q, batch).view(*scores.shape[:2], -1).to(work.k.dtype)
    keys = _gather(work, work.k, batch.sources, rest).mT
    scale, softcap = work.call.scale, work.call.softcap
    alpha = scale if softcap is None else scale / softcap
    torch.baddbmm(scores, q, keys, beta=0, alpha=alpha, out=scores)
    if softcap is not None:
        scores.tanh_().mul_(softcap)


def _exponentiate(work: _Work, batch: QueryBatch, scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scores (m, r, n, keys) to weights in place, not normalised. Gives the sums of the rows, (m, r, 1), and which
    blocks, (m, n), are to be multiplied with their values; None if all are."""
    call, weights = work.call, scores.flatten(2)
    local = scores.amax(-1) if work.pv is not None else None  # (m, r, n)
    peak = (weights if local is None else local).amax(-1, keepdim=True)  # (m, r, 1)
    sink = None
    if call.sinks is not None:
        sink = call.sinks[[piece.h for piece in batch.pieces]].to(peak.dtype).view(-1, 1, 1)
        peak = torch.maximum(peak, sink)
    if call.hides:
        peak.masked_fill_(peak == -INF, 0.0)
    # exp2 takes half the time of exp; multiplied before the peak is taken away, scores would lose a digit.
    torch.add(peak * -LOG2_E, weights, alpha=LOG2_E, out=weights).exp2_()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total += torch.exp(sink - peak)
    if call.hides:
        total.masked_fill_(total == 0.0, 1.0)  # a row that sees nothing stays 0
    counted = None if local is None or work.pv is None else _matters(local, peak, work.pv)
    return total, None if counted is None or bool(counted.all()) else counted


def _stack(q: Tensor, batch: QueryBatch) -> Tensor:
    """The queries of all pieces, (m, r, D); a view of one."""
    if len(batch.pieces) == 1:
        first = batch.pieces[0]
        return q[first.b, first.h, first.rows].unsqueeze(0)
    return torch.stack([q[piece.b, piece.h, piece.rows] for piece in batch.pieces])


def _write(out: Tensor, batch: QueryBatch, mixed: Tensor, total: Tensor) -> None:
    for at, piece in enumerate(batch.pieces):
        torch.div(mixed[at], total[at], out=out[piece.b, piece.h, piece.rows])


def _gather(work: _Work, t: Tensor, sources: Sequence[Piece], rest: Tensor) -> Tensor:
    """The kept blocks of keys one after another, (sources, n * keys, D); a view where they already lie so."""
    kept, first, m = sources[0].kept, sources[0].source, len(sources)
    # Batches hold one stretch of keys alone, or none.
    if is_contiguous(kept) and all(piece.source == first + at for at, piece in enumerate(sources)):
        heads = t.view(-1, work.per_head * t.shape[1], t.shape[2])
        return heads[first : first + m, kept[0] * t.shape[1] : (kept[-1] + 1) * t.shape[1]]
    at = torch.tensor([piece.source * work.per_head + block for piece in sources for block in piece.kept])
    gathered = rest[: at.shape[0] * t.shape[1] * t.shape[2]].view(-1, t.shape[1], t.shape[2])
    torch.index_select(t, 0, at.to(t.device), out=gathered)
    return gathered.view(m, -1, t.shape[2])


def _hide(work: _Work, batch: QueryBatch, scores: Tensor) -> None:
    """In place; scores are (m, r, n, keys)."""
    if not work.call.hides and work.S % work.blocks.keys == 0:
        return
    for at, piece in enumerate(batch.pieces) if work.mask is not None else ():
        _hide_masked(work, piece, scores[at])
    # Pieces of the same place in several heads mostly hide alike: then at once.
    by_piece = [tuple(_edges(work, piece)) for piece in batch.pieces]
    together = by_piece[:1] if len(set(by_piece)) == 1 else by_piece
    for at, edges in enumerate(together):
        part = scores if len(together) == 1 else scores[at : at + 1]
        for first, edge in edges:
            shown = part[:, :, first : first + edge.blocks]
            torch.minimum(shown, _ceiling(work, edge), out=shown)


def _hide_masked(work: _Work, piece: Piece, scores: Tensor) -> None:
    assert work.mask is not None
    picks = zip((piece.b, piece.h), work.mask.shape, strict=False)
    shown = work.mask[tuple(pick if size > 1 else 0 for pick, size in picks)]  # (L or 1, NK, keys)
    shown = shown[piece.rows] if shown.shape[0] > 1 else shown
    shown = shown.index_select(1, torch.tensor(piece.kept, device=scores.device))
    if shown.is_floating_point():
        scores.add_(shown.to(scores.dtype))
    else:
        scores.masked_fill_(~shown, -INF)


class _Edge(NamedTuple):
    """What a stretch of blocks hides, relative to its first query."""

    queries: int
    position: int  # of its first key
    blocks: int
    keys: int  # that there are: the last block may be filled up


def _edges(work: _Work, piece: Piece) -> Iterator[tuple[int, _Edge]]:
    """Stretches of kept blocks with keys that some query must not see: each with the number of its first block."""
    start, (left, right), width = work.call.q_start, work.call.reach, work.blocks.keys
    top = piece.rows.start + (int(start[piece.b]) if isinstance(start, Tensor) else start)
    length, kept = piece.rows.stop - piece.rows.start, piece.kept
    # Blocks before `low` and from `high` on are not seen whole; the others are.
    low = 0 if left is None else bisect_left(kept, -(-(top + length - 1 - left) // width))
    last = work.S - 1 if right is None else min(top + right, work.S - 1)
    high = bisect_left(kept, (last + 1) // width)
    partial = enumerate([*range(low), *range(max(low, high), len(kept))])
    for _, stretch in groupby(partial, lambda pair: (pair[1] - pair[0], kept[pair[1]] - pair[1])):
        blocks = [block for _, block in stretch]
        first, count = blocks[0], len(blocks)
        position = kept[first] * width
        keys = min(count * width, work.S - position)
        yield first, _Edge(length, position - top, count, keys)


def _ceiling(work: _Work, edge: _Edge) -> Tensor:
    """-inf where hidden by position, else inf: a minimum takes an eighth of the time of a masked_fill."""
    if edge not in work.ceilings:
        left, right = work.call.reach
        i = torch.arange(edge.queries, device=work.out.device)[:, None]  # (rows, 1)
        end = edge.position + edge.blocks * work.blocks.keys
        j = torch.arange(edge.position, end, device=work.out.device)  # (keys,)
        shown = (j < edge.position + edge.keys).expand(edge.queries, -1).clone()
        if left is not None:
            shown &= j >= i - left
        if right is not None:
            shown &= j <= i + right
        endless = torch.full((), INF, dtype=work.k.dtype, device=work.out.device)
        work.ceilings[edge] = torch.where(shown, endless, -endless).unflatten(1, (edge.blocks, work.blocks.keys))
    return work.ceilings[edge]


def _matters(local: Tensor, peak: Tensor, threshold: float) -> Tensor:
    """Which of the blocks (m, n), met one after another, have a row within `threshold` of the highest score so far."""
    near = (local - peak).amax(1) > -threshold  # no score so far is above the peak: these matter in any order
    if bool(near.all()):
        return near
    running = local.cummax(-1).values
    margin = torch.where(local == -INF, -INF, local - running) + threshold  # a row that has seen nothing: -inf - -inf
    return margin.amax(1) > 0


def _multiply_counted(work: _Work, batch: QueryBatch, weights: Tensor, counted: Tensor, mixed: Tensor) -> None:
    """Each piece with the values of those of its blocks that count."""
    for at, piece in enumerate(batch.pieces):
        blocks = counted[at].nonzero()[:, 0]
        of_all = torch.tensor(piece.kept, device=blocks.device)[blocks] + piece.source * work.per_head
        own = weights[at].index_select(1, blocks).flatten(1)  # (r, counted * keys)
        torch.mm(own, work.v.index_select(0, of_all).flatten(0, 1), out=mixed[at])
