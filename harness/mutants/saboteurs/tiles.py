"""Mistakes of kernels that walk over tiles of keys with a running maximum and a running sum."""

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall
from harness.mutants.saboteurs import saboteur as core
from harness.mutants.saboteurs.masks import hide_keys, misreads
from harness.mutants.saboteurs.reach import any_call, some_query
from harness.mutants.saboteurs.saboteur import Result, attend, in_kernel, in_step

TILE = 32  # keys, and queries


def partial(length: int) -> int:
    """Size of the last tile, if it is not full and not the only one."""
    return length % TILE if length > TILE else 0


@misreads
def last_partial_key_tile_dropped(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """S // TILE tiles instead of ceil(S / TILE): right for every power of two that anyone tried."""
    rest = partial(k.shape[2])
    return hide_keys(call, torch.arange(k.shape[2]) < k.shape[2] - rest) if rest else call


@in_kernel(
    applies=any_call(lambda r: bool(partial(r.q.shape[2])) and bool(r.visible[..., -partial(r.q.shape[2]) :, :].any()))
)
def last_partial_query_tile_unwritten(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """L // TILE blocks of queries launched: the rows of the last, partial one stay as they were allocated."""
    out, weights = attend(q, k, v, call)
    rest = partial(q.shape[2])
    if not rest:
        return out, weights
    return torch.cat((out[..., :-rest, :], torch.zeros_like(out[..., -rest:, :])), dim=-2), weights


def _running_excess(scores: Tensor) -> Tensor:
    """exp(final max - running max) of each key's tile: by how much its terms are too large if never rescaled."""
    S = scores.shape[-1]
    padded = torch.nn.functional.pad(scores.detach(), (0, -S % TILE), value=float("-inf"))
    running = padded.unflatten(-1, (-1, TILE)).amax(-1).cummax(-1).values  # (B, H, L, tiles)
    excess = torch.exp(running[..., -1:] - running).masked_fill(running == float("-inf"), 1.0)
    return excess.repeat_interleave(TILE, dim=-1)[..., :S]


def _sees_two_tiles(visible: Tensor) -> Tensor:
    S = visible.shape[-1]
    tiles = torch.nn.functional.pad(visible, (0, -S % TILE)).unflatten(-1, (-1, TILE)).any(-1)
    return tiles.sum(-1) > 1


@in_step("normalise", applies=some_query(_sees_two_tiles))
def accumulator_not_rescaled(scores: Tensor) -> Tensor:
    """A new maximum rescales the running sum, but not the output accumulated so far."""
    return core.normalise(scores) * _running_excess(scores)


@in_step("normalise", applies=some_query(_sees_two_tiles))
def normaliser_not_rescaled(scores: Tensor) -> Tensor:
    """A new maximum rescales the output accumulated so far, but not the running sum."""
    weights = core.normalise(scores)
    return weights / (1 + (weights * (_running_excess(scores) - 1)).sum(-1, keepdim=True))


def _count_twice(weights: Tensor, first: int, last: int) -> Tensor:
    """Keys first..last-1 enter sum and output twice. Rows that see no others, or none of these, stay as they are."""
    twice = weights[..., first:last].sum(-1, keepdim=True)
    others = (weights[..., :first] > 0).any(-1, keepdim=True) | (weights[..., last:] > 0).any(-1, keepdim=True)
    times = torch.ones(weights.shape[-1], dtype=weights.dtype)
    times[first:last] = 2
    return torch.where(others, weights * times / (1 + twice), weights)


def _sees_both_sides(first: int, last: int, visible: Tensor) -> Tensor:
    inside = visible[..., first:last].any(-1)
    return inside & (visible[..., :first].any(-1) | visible[..., last:].any(-1))


@in_step("normalise", applies=some_query(lambda visible: _sees_both_sides(0, TILE, visible)))
def first_tile_counted_twice(scores: Tensor) -> Tensor:
    """The tile that is loaded before the loop is loaded in the loop again."""
    return _count_twice(core.normalise(scores), 0, TILE)


def _overlap(keys: int) -> tuple[int, int]:
    rest = partial(keys)
    return (keys - TILE, keys - rest) if rest else (0, 0)


@in_step("normalise", applies=some_query(lambda visible: _sees_both_sides(*_overlap(visible.shape[-1]), visible)))
def last_tile_overlaps(scores: Tensor) -> Tensor:
    """The last tile moved back to fit, start = S - TILE, without masking the keys that were read already."""
    return _count_twice(core.normalise(scores), *_overlap(scores.shape[-1]))
