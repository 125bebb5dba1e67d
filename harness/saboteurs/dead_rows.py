"""Queries that may attend nothing, and garbage behind a mask."""

import torch
from torch import Tensor

from harness.build import steps_of
from harness.case import Case
from harness.kernels.call import AttentionCall
from harness.regimes import hidden_tokens
from harness.saboteurs.core import Result, attend
from harness.saboteurs.reach import seen, some_query
from harness.saboteurs.saboteur import in_kernel

has_dead_rows = some_query(lambda visible: ~visible.any(-1))


def _dead(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    return ~seen(call, q, k).any(-1, keepdim=True)  # (..., L, 1)


@in_kernel(applies=has_dead_rows)
def dead_rows_uniform(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """-1e9 for -inf: a row of equal numbers is a uniform softmax, so the query gets the mean of all values."""
    out, weights = attend(q, k, v, call)
    mean = v.mean(-2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.where(_dead(q, k, call), mean, out), weights


@in_kernel(applies=has_dead_rows)
def dead_rows_nan(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """softmax of a row of -inf, as nn.MultiheadAttention leaves it."""
    out, weights = attend(q, k, v, call)
    return out.masked_fill(_dead(q, k, call), float("nan")), weights


@in_kernel(applies=has_dead_rows)
def dead_rows_see_first_key(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """A key forced open so that no row is empty: the query gets the first value."""
    out, weights = attend(q, k, v, call)
    first = v[:, :, :1].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.where(_dead(q, k, call), first, out), weights


def _leaks(case: Case) -> bool:
    """A token hidden from all others stands among the keys of a step in which another token asks."""
    if case.phase == "train":  # poison would reach gradients whatever the kernel does, so there is none
        return False
    hidden = hidden_tokens(case).any(0)
    return any(bool(hidden[t]) and len(set(queries) - {t}) > 0 for queries, keys in steps_of(case) for t in keys)


@in_kernel(applies=_leaks, shielded=False)
def nan_leaks_from_behind_the_mask(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """0 * NaN = NaN in P V: uninitialised cache rows and padding reach every query."""
    return attend(q, k, v, call)
