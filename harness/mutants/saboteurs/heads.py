"""Heads and batch rows that are not where they should be."""

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall
from harness.mutants.saboteurs.reach import any_call, several_heads, several_kv_heads, several_rows
from harness.mutants.saboteurs.saboteur import Result, attend, in_kernel, spread


@in_kernel(applies=any_call(lambda r: 1 < r.groups[1] < r.groups[0]))
def kv_heads_tiled(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """repeat instead of repeat_interleave: query head h reads kv head h mod H_kv."""

    def tile(kv: Tensor, heads: int) -> Tensor:
        return kv if kv.shape[1] == heads else kv.repeat(1, heads // kv.shape[1], 1, 1)

    return attend(q, k, v, call, spread=tile)


@in_kernel(applies=several_kv_heads)
def two_kv_heads_swapped(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """A checkpoint's kv heads sharded in another order: the first two change places."""
    order = torch.arange(k.shape[1])
    order[:2] = order[:2].flip(0)
    return attend(q, k[:, order], v[:, order], call)


@in_kernel(applies=several_kv_heads)
def values_of_the_next_group(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """k and v of different groups: a fused kv buffer read with the wrong stride."""
    return attend(q, k, v.roll(1, dims=1), call)


@in_kernel(applies=several_kv_heads)
def first_kv_head_for_all(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """A broadcast written for MQA, used with several kv heads."""
    return attend(q, k, v, call, spread=_first_for_all)


def _first_for_all(kv: Tensor, heads: int) -> Tensor:
    return spread(kv if kv.shape[1] == 1 else kv[:, :1], heads)


@in_kernel(applies=any_call(lambda r: r.groups[0] > 1 and r.q.shape[2] > 1))
def heads_viewed_not_transposed(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """(B, L, H, D) viewed as (B, H, L, D): heads and tokens interleaved."""
    out, weights = attend(q, k, v, call)
    return out.transpose(1, 2).reshape(out.shape), weights


@in_kernel(applies=several_heads)
def heads_in_reverse_order(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """Heads stacked from the last to the first: each is right, their order is not."""
    out, weights = attend(q, k, v, call)
    return out.flip(1), weights


@in_kernel()
def last_head_zero(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """A launch grid one block short: the last head is never written."""
    out, weights = attend(q, k, v, call)
    return torch.cat((out[:, :-1], torch.zeros_like(out[:, -1:])), dim=1), weights


@in_kernel(applies=several_rows)
def batch_rows_reversed(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """A batch sorted by length and not put back in order."""
    out, weights = attend(q, k, v, call)
    return out.flip(0), weights


@in_kernel(applies=several_rows)
def first_batch_row_for_all(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """The batch stride of the keys set to 0: every row reads the cache of row 0."""
    return attend(q, k[:1].expand_as(k), v[:1].expand_as(v), call)
