"""Exact attention over the kept blocks alone: what is skipped is neither read nor multiplied.

For each head and block of queries the kept blocks of keys are gathered, and one product, one softmax and one more
product over them follow. Threads take blocks of queries of their own, as tiled's do with tiles.
"""

import dataclasses
import functools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.kernels.blocksparse.sight import SPARGE_BLOCKS, Blocks, block_sight, reach, row_sight
from harness.kernels.call import AttentionCall, Unsupported
from harness.kernels.eager import eager
from harness.kernels.tally import BlockCount
from harness.kernels.threads import spread
from harness.kernels.tiled import LOG2_E

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
    B, H, L, _ = q.shape
    NQ, NK = blocks.counts(q, k)
    sight = block_sight(row_sight(q, k, call, blocks), blocks).expand(B, H, NQ, NK)
    keep = keep.expand(B, H, NQ, NK) & sight
    out = q.new_zeros(B, H, L, v.shape[3])
    work = _Work.of(q, k, v, call, out, blocks, pv)
    chosen = _split(keep)
    most = max(map(len, chosen), default=0)
    if most and out.numel():
        threads = torch.get_num_threads() if q.device.type == "cpu" else 1
        rooms = [work.room(most) for _ in range(threads)]
        pieces = _pieces(chosen, B, H, NQ)
        with torch.no_grad():
            spread(functools.partial(_fill, work), rooms, pieces)
            # Powers of two, and sums that are divided last, overflow a little sooner: then by eager's lines.
            if not bool(torch.linalg.vector_norm(out, INF).isfinite()):
                out = _by_eager(q, k, v, call, keep, blocks)
                work.pv_skipped.clear()
    count = BlockCount(int(keep.sum()), int(sight.sum()), B * H * NQ * NK, len(work.pv_skipped))
    return out, count


def refuse(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
    """What is not supported is said, never ignored."""
    if call.need_weights:
        raise Unsupported("block-sparse attention gives no attention weights")
    if call.dropout_p > 0:
        raise Unsupported("block-sparse attention is for inference: no dropout")
    leaves = (q, k, v, call.mask, call.sinks)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leaves):
        raise Unsupported("block-sparse attention is for inference: no gradients (use torch.no_grad())")
    if q.is_meta or torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        raise Unsupported("block-sparse attention chooses by values: no meta tensors, torch.compile or torch.func")


def expanded(keep: Tensor, blocks: Blocks, L: int, S: int) -> Tensor:
    """The map of blocks as one of elements: (.., L, S)."""
    return keep.repeat_interleave(blocks.queries, -2)[..., :L, :].repeat_interleave(blocks.keys, -1)[..., :S]


def _by_eager(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, keep: Tensor, blocks: Blocks) -> Tensor:
    shown = expanded(keep, blocks, q.shape[2], k.shape[2])
    if call.bias is not None:
        mask = call.bias.masked_fill(~shown, -INF)
    else:
        mask = shown if call.mask is None else shown & call.mask
    return eager(q, k, v, dataclasses.replace(call, mask=mask))[0]


def _split(keep: Tensor) -> list[list[int]]:
    """The kept blocks of keys of each (batch, head, block of queries)."""
    flat = keep.flatten(0, 2)
    columns = flat.nonzero()[:, 1].tolist()
    found, start = [], 0
    for length in flat.sum(-1).tolist():
        found.append(columns[start : start + length])
        start += length
    return found


@dataclass(frozen=True, slots=True)
class _Piece:
    b: int
    h: int
    block: int  # of queries
    kept: list[int]  # blocks of keys, ascending


def _pieces(chosen: list[list[int]], B: int, H: int, NQ: int) -> Iterator[_Piece]:
    at = iter(chosen)
    for b in range(B):
        for h in range(H):
            for block in range(NQ):
                if kept := next(at):
                    yield _Piece(b, h, block, kept)


@dataclass(frozen=True, slots=True)
class _Work:
    """All that the pieces of one call share."""

    q: Tensor
    k: Tensor  # (B, H_kv, NK, keys, D), wide, the last block filled up with zeros
    v: Tensor  # (B, H_kv, NK, keys, D_v)
    out: Tensor
    call: AttentionCall
    mask: Tensor | None  # (B or 1, H or 1, L or 1, NK, keys)
    S: int
    blocks: Blocks
    pv: float | None
    ceilings: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # by relative position
    pv_skipped: list[None] = field(default_factory=list)  # one for each: appending needs no lock

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, out: Tensor, blocks: Blocks, pv: float | None
    ) -> "_Work":
        wide = torch.promote_types(q.dtype, torch.float32)
        S, NK = k.shape[2], blocks.counts(q, k)[1]
        short = NK * blocks.keys - S

        def cut(t: Tensor) -> Tensor:
            """One pass over the keys, so that each block lies in one piece: nothing beside the products."""
            return F.pad(t.detach().to(wide), (0, 0, 0, short)).contiguous().unflatten(2, (NK, blocks.keys))

        mask = call.mask
        if mask is not None:
            mask = mask.detach().reshape((1,) * (4 - mask.ndim) + mask.shape)
            mask = F.pad(mask.expand(*mask.shape[:3], S), (0, short)).unflatten(3, (NK, blocks.keys))
        return _Work(q.detach(), cut(k), cut(v), out, call, mask, S, blocks, pv)

    def room(self, most: int) -> Tensor:
        """For the gathered keys, then values, the scores and the output of one piece."""
        D, D_v, keys = self.k.shape[-1], self.v.shape[-1], most * self.blocks.keys
        rows = min(self.blocks.queries, self.q.shape[2])
        return self.k.new_empty(keys * max(D, D_v) + rows * (keys + D_v))


def _fill(work: _Work, room: Tensor, pieces: Iterator[_Piece]) -> None:
    call, width = work.call, work.blocks.keys
    G = work.q.shape[1] // work.k.shape[1]
    softcap = call.softcap
    for piece in pieces:
        rows = slice(piece.block * work.blocks.queries, min((piece.block + 1) * work.blocks.queries, work.q.shape[2]))
        k, v = work.k[piece.b, piece.h // G], work.v[piece.b, piece.h // G]
        q = work.q[piece.b, piece.h, rows]
        r, n = q.shape[0], len(piece.kept)
        scores = room[: r * n * width].view(r, n * width)
        mixed = room[r * n * width :][: r * v.shape[2]].view(r, -1)
        rest = room[r * (n * width + v.shape[2]) :]

        alpha = call.scale if softcap is None else call.scale / softcap
        torch.addmm(scores, q.to(k.dtype), _gather(k, piece.kept, rest).mT, beta=0, alpha=alpha, out=scores)
        if softcap is not None:
            scores.tanh_().mul_(softcap)
        _hide(work, piece, rows, scores.view(r, n, width))

        local = scores.view(r, n, width).amax(-1) if work.pv is not None else None
        peak = (scores if local is None else local).amax(-1, keepdim=True)
        sink = None
        if call.sinks is not None:
            sink = call.sinks[piece.h].to(peak.dtype)
            peak = torch.maximum(peak, sink)
        peak.masked_fill_(peak == -INF, 0.0)
        # exp2 takes half the time of exp; multiplied before the peak is taken away, scores would lose a digit.
        torch.add(peak * -LOG2_E, scores, alpha=LOG2_E, out=scores).exp2_()
        total = scores.sum(-1, keepdim=True)
        if sink is not None:
            total += torch.exp(sink - peak)
        total.masked_fill_(total == 0.0, 1.0)  # a row that sees nothing stays 0

        kept = piece.kept
        if local is not None and work.pv is not None:
            counted = _matters(local, work.pv)
            if len(counted) < n:
                work.pv_skipped.extend([None] * (n - len(counted)))
                kept = [kept[at] for at in counted]
                at = torch.tensor(counted, device=scores.device)
                scores = scores.view(r, n, width).index_select(1, at).view(r, -1)
        torch.mm(scores, _gather(v, kept, rest), out=mixed)
        torch.div(mixed, total, out=work.out[piece.b, piece.h, rows])


def _gather(t: Tensor, kept: list[int], rest: Tensor) -> Tensor:
    """The kept blocks of (NK, keys, D) one after another; a view where they already lie so."""
    if kept[-1] - kept[0] + 1 == len(kept):
        return t[kept[0] : kept[-1] + 1].view(-1, t.shape[2])
    gathered = rest[: len(kept) * t.shape[1] * t.shape[2]].view(len(kept), t.shape[1], t.shape[2])
    torch.index_select(t, 0, torch.tensor(kept, device=t.device), out=gathered)
    return gathered.view(-1, t.shape[2])


def _hide(work: _Work, piece: _Piece, rows: slice, scores: Tensor) -> None:
    """In place; scores are (rows, n, keys)."""
    if work.mask is not None:
        at = torch.tensor(piece.kept, device=scores.device)
        picks = zip((piece.b, piece.h), work.mask.shape, strict=False)
        shown = work.mask[tuple(pick if size > 1 else 0 for pick, size in picks)]  # (L or 1, NK, keys)
        shown = (shown[rows] if shown.shape[0] > 1 else shown).index_select(1, at)
        if shown.is_floating_point():
            scores.add_(shown.to(scores.dtype))
        else:
            scores.masked_fill_(~shown, -INF)
    start = work.call.q_start
    top = rows.start + (int(start[piece.b]) if isinstance(start, Tensor) else start)
    bottom, width = top + rows.stop - rows.start - 1, work.blocks.keys
    left, right = reach(work.call)
    # Blocks before `low` and from `high` on hold keys that some row must not see; the others are seen whole.
    low = 0 if left is None else bisect_left(piece.kept, -(-(bottom - left) // width))
    last = work.S - 1 if right is None else min(top + right, work.S - 1)
    high = bisect_left(piece.kept, (last + 1) // width)
    for at in {*range(low), *range(high, len(piece.kept))}:
        shown = scores[:, at]
        torch.minimum(shown, _ceiling(work, top, rows, piece.kept[at] * width), out=shown)


def _ceiling(work: _Work, top: int, rows: slice, first: int) -> Tensor:
    """-inf where hidden by position, else inf: a minimum takes an eighth of the time of a masked_fill."""
    width, length = work.blocks.keys, rows.stop - rows.start
    valid = min(width, work.S - first)
    key = (length, first - top, valid)
    if key not in work.ceilings:
        left, right = reach(work.call)
        i = torch.arange(top, top + length, device=work.out.device)[:, None]  # (rows, 1)
        j = torch.arange(first, first + width, device=work.out.device)  # (keys,)
        shown = (j < work.S).expand(length, width).clone()
        if left is not None:
            shown &= j >= i - left
        if right is not None:
            shown &= j <= i + right
        endless = torch.full((), INF, dtype=work.k.dtype, device=work.out.device)
        work.ceilings[key] = torch.where(shown, endless, -endless)
    return work.ceilings[key]


def _matters(local: Tensor, threshold: float) -> list[int]:
    """Which of the blocks, met one after another, have a row within `threshold` of the highest score so far."""
    running = local.cummax(-1).values
    margin = torch.where(local == -INF, -INF, local - running) + threshold  # a row that has seen nothing: -inf - -inf
    found: list[int] = (margin.amax(0) > 0).nonzero()[:, 0].tolist()
    return found or [0]  # an empty product is not worth a case of its own
