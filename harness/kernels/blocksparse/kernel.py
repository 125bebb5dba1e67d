"""Selectors, which say what blocks are worth computing, and the kernel that is made of one of them and the engine.

A selector gives a map (B, H, NQ, NK); the kernel keeps it within sight, and counts what it leaves out.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.kernels.blocksparse.blocks import SPARGE_BLOCKS, Blocks, block_sight, covered
from harness.kernels.blocksparse.engine import block_sparse, expanded, refuse
from harness.kernels.call import AttentionCall, BlockChoice, Kernel, Tally
from harness.kernels.threads import alone

Selector = Callable[[Tensor, Tensor, AttentionCall], Tensor]


@dataclass(frozen=True, slots=True)
class Sparge:
    """SpargeAttn's first stage: pooled blocks stand for their tokens, where these are alike.

    topk  the share of the key blocks, of those that any query sees, that each block of queries keeps; 1 keeps all
    cdf   or: as many as together hold this share of the pooled softmax; 1 keeps all
    sim   blocks whose tokens are less alike than this are always computed: their mean says little about them
    sink  the first block of keys is kept too
    """

    blocks: Blocks = SPARGE_BLOCKS
    topk: float | None = 0.5
    cdf: float | None = None
    sim: float = -0.1
    smooth: bool = True
    sink: bool = False

    def __call__(self, q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
        seen = block_sight(q, k, call, self.blocks)
        if self.keeps_all:
            return seen.expand(q.shape[0], q.shape[1], *seen.shape[2:])
        G = q.shape[1] // k.shape[1]
        shown = shown_keys(q, k, call)
        if shown is not None and shown.shape[1] > 1:  # each query head hides keys of its own
            k, G = k.repeat_interleave(G, 1), 1
        pooled_q, pooled_k = pool(q, self.blocks.queries), pool(k, self.blocks.keys, shown)
        if self.sim < 0:  # no likeness is less: that pass over all queries and keys is saved
            q_alike, k_alike = (torch.ones_like(t[..., 0], dtype=torch.bool) for t in (pooled_q, pooled_k))
        else:
            # What all keys share moves no softmax, and would make all of them alike.
            own = k - (k.mean(2, keepdim=True) if shown is None else pool(k, k.shape[2], shown)) if self.smooth else k
            q_alike = likeness(q, self.blocks.queries) > self.sim
            k_alike = likeness(own, self.blocks.keys, shown) > self.sim
        pooled_k, k_alike = (t.repeat_interleave(G, 1) for t in (pooled_k, k_alike))
        scores = pooled_q @ pooled_k.mT * call.scale  # (B, H, NQ, NK)
        unknown = ~scores.isfinite()  # what is no finite number is not hidden by being skipped
        scores = scores.masked_fill(unknown | ~(k_alike[:, :, None] & seen), float("-inf"))
        # A row of -inf alone, whose blocks are all kept for another reason, is 0/0.
        weights = torch.softmax(scores, -1).nan_to_num(0.0)
        keep = self._choose(weights, seen.any(2, keepdim=True).sum(-1, keepdim=True))
        keep |= unknown | ~k_alike[:, :, None] | ~q_alike[..., None] | diagonal(q, k, call, self.blocks)
        if self.sink:
            keep[..., 0] = True
        return keep & seen

    @property
    def keeps_all(self) -> bool:
        # By itself: a sum of float32 shares may exceed 1, and blocks would be lost at the end of it.
        return self.cdf >= 1 if self.cdf is not None else self.topk is None or self.topk >= 1

    def _choose(self, weights: Tensor, countable: Tensor) -> Tensor:
        """`countable`, (B or 1, H or 1, 1, 1): blocks that some query sees. Padding makes a share of them no larger."""
        shares, order = weights.sort(dim=-1, descending=True, stable=True)
        if self.cdf is not None:
            chosen = shares.cumsum(-1) <= self.cdf
        else:
            assert self.topk is not None
            wanted = (self.topk * countable.double() + 1e-9).floor()  # 0.29 of 100 blocks are 29, not 28.999…
            chosen = (torch.arange(weights.shape[-1], device=weights.device) < wanted).expand(shares.shape).clone()
        chosen[..., 0] = True  # at least one
        return torch.zeros_like(chosen).scatter_(-1, order, chosen)


@dataclass(frozen=True, slots=True)
class Window:
    """Blocks with a key at most `window` tokens from one of the queries, and those of the first `sink` tokens."""

    blocks: Blocks = SPARGE_BLOCKS
    window: int = 1024
    sink: int = 0

    def __call__(self, q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
        near = diagonal(q, k, call, self.blocks, margin=self.window)
        first = torch.arange(near.shape[-1], device=q.device) * self.blocks.keys
        return (near | (first < self.sink)).expand(q.shape[0], q.shape[1], *near.shape[2:])


@dataclass(frozen=True, slots=True)
class TopBlocks:
    """The `count` blocks of the highest pooled score, and the queries' own.

    As in NSA the query heads of a group choose together, so that they read the same keys.
    """

    blocks: Blocks = SPARGE_BLOCKS
    count: int = 16

    def __call__(self, q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
        H, H_kv = q.shape[1], k.shape[1]
        seen = block_sight(q, k, call, self.blocks)
        shown = shown_keys(q, k, call)
        per_head = k.repeat_interleave(H // H_kv, 1) if shown is not None and shown.shape[1] > 1 else k
        pooled_k = pool(per_head, self.blocks.keys, shown)
        scores = pool(q, self.blocks.queries) @ pooled_k.repeat_interleave(H // pooled_k.shape[1], 1).mT * call.scale
        unknown = ~scores.isfinite()  # what is no finite number is not hidden by being skipped
        scores = scores.masked_fill(unknown | ~seen, float("-inf"))
        importance = torch.softmax(scores, -1).nan_to_num(0.0).unflatten(1, (H_kv, -1)).sum(2)  # (B, H_kv, NQ, NK)
        best = importance.topk(min(self.count, importance.shape[-1]), -1).indices
        keep = torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, best, True).repeat_interleave(H // H_kv, 1)
        return (keep | unknown | diagonal(q, k, call, self.blocks)) & seen


def shown_keys(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor | None:
    """(B or 1, H or 1, S): the keys that some query sees; None if these are all. The others must not choose."""
    if not call.hides:
        return None
    shown = block_sight(q, k, call, Blocks(queries=q.shape[2], keys=1))[:, :, 0]
    return None if bool(shown.all()) else shown


def pool(t: Tensor, size: int, shown: Tensor | None = None) -> Tensor:
    """The mean token of each block, (.., N, D); in float64, so that scores of means add no rounding of their own.

    Of those that are `shown` alone, where that is given; a block without any gives 0.
    """
    L = t.shape[2]
    if shown is not None:
        sums = pool(torch.where(shown[..., None], t, 0), size)
        return sums / pool(shown[..., None].to(t.dtype), size).clamp(min=0.5 / size)  # nothing counts for less than one
    whole = L // size * size
    wide = torch.promote_types(t.dtype, torch.float32)
    means = t[:, :, :whole].unflatten(2, (-1, size)).sum(3, dtype=wide).double() / size
    if whole == L:
        return means
    return torch.cat([means, t[:, :, whole:].sum(2, keepdim=True, dtype=wide).double() / (L - whole)], 2)


def likeness(t: Tensor, size: int, shown: Tensor | None = None) -> Tensor:
    """How alike the tokens of each block are, (.., N): 1 if all point the same way.

    The squared length of the mean of unit vectors: the mean cosine of all pairs.
    """
    units = F.normalize(t.to(torch.promote_types(t.dtype, torch.float32)), dim=-1)
    return pool(units, size, shown).square().sum(-1)


def diagonal(q: Tensor, k: Tensor, call: AttentionCall, blocks: Blocks, *, margin: int | None = None) -> Tensor:
    """(B or 1, 1, NQ, NK): blocks that hold the position of one of the queries, or one within `margin` of it.

    Without a margin only where position counts: there a row without its own key could be left with nothing. It counts
    for a causal call, one with a window, a mask that differs from query to query (a causal one, spelt out by a model),
    and a single query, a decode step, of which the call says no more that it is causal.
    """
    if margin is None:
        by_query = call.mask is not None and call.mask.ndim >= 2 and call.mask.shape[-2] > 1
        if not (call.is_slanted or by_query or q.shape[2] == 1):
            return torch.zeros((1, 1, *blocks.counts(q, k)), dtype=torch.bool, device=q.device)
        margin = 0
    near = AttentionCall(scale=1.0, q_start=call.q_start, left=margin, right=margin)
    return block_sight(q, k, near, blocks)


def block_sparse_kernel(
    name: str, selector: Selector, *, blocks: Blocks, pv: float | None = None, exact: bool = False
) -> Kernel:
    """`exact`: the selector keeps all and nothing else is left out, so the result is judged as dense attention."""
    tally = Tally()

    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, None]:
        refuse(q, k, v, call)
        if 0 in (q.numel(), k.numel(), v.numel()):
            return q.new_zeros(*q.shape[:3], v.shape[3]), None
        keep = alone(lambda: choose(selector, q, k, call, blocks=blocks))
        out, count = block_sparse(q, k, v, call, keep, blocks=blocks, pv=pv)
        choice = BlockChoice(functools.partial(expanded, keep, blocks, q.shape[2], k.shape[2]), pv)
        tally.add(count, choice=choice, call=call, is_spoilt=is_spoilt(out, call))
        return out, None

    return Kernel(name, run, approximate=not exact, tally=tally)


def is_spoilt(out: Tensor, call: AttentionCall) -> bool:
    """As the shield asks, which then runs the same call once more."""
    return call.hides and not math.isfinite(float(out.sum(dtype=torch.promote_types(out.dtype, torch.float32))))


def choose(selector: Selector, q: Tensor, k: Tensor, call: AttentionCall, *, blocks: Blocks) -> Tensor:
    """The selector's map within sight, and no query that sees keys left without any."""
    keep = selector(q.detach(), k.detach(), call)
    return covered(keep.expand(*q.shape[:2], *keep.shape[2:]), q, k, call, blocks)
