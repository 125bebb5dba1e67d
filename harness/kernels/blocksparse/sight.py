"""Which blocks of keys each query sees, by position and mask: what lies outside is neither chosen nor counted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall

QUERIES, KEYS = 128, 64  # SpargeAttn's


@dataclass(frozen=True, slots=True)
class Blocks:
    """The sizes of a block; the last ones may be shorter."""

    queries: int = QUERIES
    keys: int = KEYS

    def counts(self, q: Tensor, k: Tensor) -> tuple[int, int]:
        return -(-q.shape[2] // self.queries), -(-k.shape[2] // self.keys)


SPARGE_BLOCKS = Blocks()


def reach(call: AttentionCall) -> tuple[int | None, int | None]:
    """Keys left and right of a query's own position that it sees; None = unbounded."""
    return call.left, 0 if call.causal else call.right


def row_sight(q: Tensor, k: Tensor, call: AttentionCall, blocks: Blocks) -> Tensor:
    """Bool, broadcastable to (B, H, L, NK): does this query see some key of this block?"""
    L, S = q.shape[2], k.shape[2]
    NK = blocks.counts(q, k)[1]
    if call.mask is not None:
        allowed = call.allowed(q, k)
        assert allowed is not None
        allowed = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)
        allowed = allowed.expand(*allowed.shape[:2], L, S)
        padded = torch.nn.functional.pad(allowed, (0, NK * blocks.keys - S))
        return padded.unflatten(-1, (NK, blocks.keys)).any(-1)
    left, right = reach(call)
    first = torch.arange(NK, device=q.device) * blocks.keys  # (NK,)
    last = (first + blocks.keys).clamp(max=S) - 1
    i = torch.arange(L, device=q.device)[:, None]  # (L, 1)
    i = i + (call.q_start.to(q.device)[:, None, None, None] if isinstance(call.q_start, Tensor) else call.q_start)
    sees = torch.ones_like(i + first, dtype=torch.bool)  # (L, NK) or (B, 1, L, NK)
    if right is not None:
        sees &= first <= i + right
    if left is not None:
        sees &= last >= i - left
    return sees.reshape((1,) * (4 - sees.ndim) + sees.shape)


def block_sight(rows: Tensor, blocks: Blocks) -> Tensor:
    """From `row_sight` to blocks: (.., NQ, NK), True where some query of the block sees some key of the other."""
    L = rows.shape[2]
    NQ = -(-L // blocks.queries)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, NQ * blocks.queries - L))
    return padded.unflatten(2, (NQ, blocks.queries)).any(3)


def covered(keep: Tensor, rows: Tensor, blocks: Blocks) -> Tensor:
    """`keep` within sight, and a block more for each query that sees keys and would be left without any.

    Such a query takes the last block it sees, the nearest under causality: without it its output would be 0/0.
    """
    keep = keep & block_sight(rows, blocks)
    L, NK = rows.shape[2:]
    of_row = torch.arange(L, device=keep.device) // blocks.queries
    orphans = rows.any(-1) & ~(keep[:, :, of_row] & rows).any(-1)  # (B, H, L)
    if bool(orphans.any()):
        last = NK - 1 - rows.flip(-1).to(torch.uint8).argmax(-1)  # (.., L)
        b, h, i = orphans.nonzero(as_tuple=True)
        keep[b, h, of_row[i], last.expand(orphans.shape)[b, h, i]] = True
    return keep
