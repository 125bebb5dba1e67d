"""Memory, neighbours and order: what a single comparison of values may never see."""

import random

import torch
from torch import Tensor

from harness.case import Case
from harness.kernels.call import AttentionCall
from harness.mutants.saboteurs import saboteur as core
from harness.mutants.saboteurs.precision import rounded
from harness.mutants.saboteurs.reach import any_call, seen, several_rows, some_query
from harness.mutants.saboteurs.saboteur import Result, Run, attend, in_kernel, with_memory

CHUNKS = 8


def _as_if_contiguous(t: Tensor) -> Tensor:
    if t.is_contiguous():
        return t
    H, L, D = t.shape[1:]
    return t.as_strided(t.shape, (H * L * D, L * D, D, 1))


@in_kernel()
def strides_ignored(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """A raw pointer and a shape: a transposed query is read in the order of its memory."""
    return attend(_as_if_contiguous(q), k, v, call)


@in_kernel(applies=several_rows)
def quantised_by_the_whole_batch(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """One int8 scale for all requests of a batch: an outlier in one coarsens its neighbours."""
    if v.shape[0] == 1:
        return attend(q, k, v, call)
    # Not NaN: behind a mask there may be some, and a maximum would hand it to everybody.
    step = v.detach().nan_to_num(0.0).abs().amax().clamp(min=1e-30) / 127
    return attend(q, k, rounded(v, lambda t: (t / step).round() * step), call)


def _chunks_seen(visible: Tensor) -> Tensor:
    return torch.stack([chunk.any(-1) for chunk in visible.tensor_split(CHUNKS, dim=-1)]).sum(0)


@in_kernel(applies=some_query(lambda visible: _chunks_seen(visible) > 2))
def sums_in_random_order(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """Partial sums of P V added in the output's dtype by whoever comes first: atomics, another result every time."""

    def mix(weights: Tensor, v: Tensor) -> Tensor:
        parts = list(zip(weights.tensor_split(CHUNKS, dim=-1), v.tensor_split(CHUNKS, dim=-2), strict=True))
        random.SystemRandom().shuffle(parts)  # a race has no seed
        total = torch.zeros((), dtype=q.dtype)
        for w, values in parts:
            total = total + (w @ values).to(q.dtype)
        return total

    races = bool((_chunks_seen(seen(call, q, k)) > 2).any())
    return attend(q, k, v, call, mix=mix if races else core.mix)


def _not_in_training(case: Case) -> bool:
    return case.phase != "train"  # there the result is part of a graph, and left alone


@in_kernel(applies=_not_in_training)
def output_in_the_memory_of_q(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """The output written over the queries to save a buffer: whoever still needs them reads the output."""
    out, weights = attend(q, k, v, call)
    if out.requires_grad:
        return out, weights
    reused = q[..., : v.shape[-1]]
    reused.copy_(out)
    return reused, weights


@in_kernel(applies=any_call(lambda reached: reached.call.scale != 1))
def keys_scaled_in_place(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """k *= scale, as a memory saving: a cache that is read again shrinks with every step."""
    out, weights = attend(q, k, v, call)
    k.data.mul_(call.scale)  # past autograd's guard, as a kernel behind a raw pointer goes
    return out, weights


@with_memory(applies=_not_in_training)
def output_buffer_reused() -> Run:
    """One output buffer per shape, handed out at every call: the next call overwrites the last result."""
    buffers: dict[tuple[int, ...], Tensor] = {}

    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
        out, weights = attend(q, k, v, call)
        if out.requires_grad:
            return out, weights
        buffer = buffers.setdefault(tuple(out.shape), torch.empty_like(out))
        return buffer.copy_(out), weights

    return run
