"""Masks read wrongly: each maps the call that was made to the call that was understood.

Where the two let every query see the same keys with the same bias, there is no bug: that is how `applies` is found.
At the end: queries that may attend nothing, and garbage behind a mask.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps

import torch
from torch import Tensor

from harness.case import Case
from harness.cell.build import steps_of
from harness.cell.regimes import hidden_tokens
from harness.kernels.call import AttentionCall
from harness.mutants.saboteurs import saboteur as core
from harness.mutants.saboteurs.reach import any_call, attends_several, calls_of, seen, some_query
from harness.mutants.saboteurs.saboteur import Applies, Result, attend, in_kernel

Misreading = Callable[[AttentionCall, Tensor, Tensor], AttentionCall]


def changes(misread: Misreading) -> Applies:
    def applies(case: Case) -> bool:
        for reached in calls_of(case):
            wrong = misread(reached.call, reached.q, reached.k)
            if bool((seen(wrong, reached.q, reached.k) != reached.visible).any()):
                return True
            if wrong.bias is not reached.call.bias and _bias_differs(wrong.bias, reached.call.bias):
                return attends_several(case)
        return False

    return applies


def _bias_differs(a: Tensor | None, b: Tensor | None) -> bool:
    zero = torch.zeros(())
    return bool(((zero if a is None else a) != (zero if b is None else b)).any())


def misreads(misread: Misreading) -> Misreading:
    @in_kernel(applies=changes(misread))
    @wraps(misread)
    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
        return attend(q, k, v, misread(call, q, k))

    return misread


@misreads
def causal_sees_one_ahead(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """j <= i + 1 instead of j <= i: the next token is seen, and training looks excellent."""
    if call.right is not None:
        return replace(call, right=call.right + 1)
    return replace(call, causal=False, right=1) if call.causal else call


@misreads
def causal_hides_self(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """j < i instead of j <= i: a query does not see its own token."""
    if call.right is not None:
        return replace(call, right=call.right - 1)
    return replace(call, causal=False, right=-1) if call.causal else call


@misreads
def causal_ignored(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """is_causal taken for a hint, as nn.MultiheadAttention takes it."""
    return replace(call, causal=False)


@misreads
def queries_start_at_zero(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """Top-left instead of lower-right alignment where there are fewer queries than keys: SDPA's is_causal."""
    return replace(call, q_start=0)


@misreads
def causal_applied_in_decode(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """The triangle of a prefill laid over a decode step, which then sees key 0 alone."""
    return replace(call, q_start=0, causal=True) if q.shape[2] < k.shape[2] else call


@misreads
def window_one_wider(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """W keys beside self instead of W keys with it."""
    return call if call.left is None else replace(call, left=call.left + 1)


@misreads
def window_one_narrower(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """i - j < W - 1: self counted twice."""
    return call if call.left is None else replace(call, left=call.left - 1)


@misreads
def window_ignored(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """Sliding-window attention run as full causal attention: right for prompts shorter than the window."""
    return replace(call, left=None)


@misreads
def window_open_to_the_right(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """A window that bounds the past and forgets the future."""
    return replace(call, right=None)


@misreads
def bool_mask_inverted(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """True = blocked (nn.MultiheadAttention) read as True = attends (SDPA), or the other way round."""
    return replace(call, mask=~call.mask) if call.mask is not None and call.bias is None else call


@misreads
def bool_mask_ignored(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """The mask argument accepted and never used."""
    return call if call.bias is not None else replace(call, mask=None)


@misreads
def mask_ignored_in_last_batch_row(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """A loop over the batch that stops one row early when it builds the mask."""
    if call.mask is None or call.bias is not None:
        return call
    mask = call.mask.expand(q.shape[0], *call.mask.shape[1:]).clone()
    mask[-1] = True
    return replace(call, mask=mask)


@misreads
def padding_applied_to_queries(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """A key padding mask laid along the wrong dimension: padded queries see nothing, padded keys are seen."""
    if call.mask is None or call.bias is not None or call.mask.shape[-2] != 1:
        return call
    return replace(call, mask=call.mask.mT[..., -q.shape[2] :, :])


@misreads
def mask_of_first_batch_row(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """mask[0] for the whole batch: right wherever all rows are alike."""
    return call if call.mask is None else replace(call, mask=call.mask[:1])


@misreads
def mask_of_first_head(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """mask[:, 0] for all heads: right until masks differ between heads, as ALiBi's do."""
    return call if call.mask is None else replace(call, mask=call.mask[:, :1])


@misreads
def float_mask_ignored(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """A kernel for bool masks that takes a float one for no mask."""
    return call if call.bias is None else replace(call, mask=None)


@misreads
def float_mask_ignored_in_last_head(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """A head loop that ends one too early when it adds the bias."""
    if call.bias is None:
        return call
    mask = call.bias.expand(call.bias.shape[0], q.shape[1], *call.bias.shape[2:]).clone()
    mask[:, -1] = 0.0
    return replace(call, mask=mask)


@misreads
def float_mask_scaled_too(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """(q k + mask) * scale instead of q k * scale + mask."""
    return call if call.bias is None else replace(call, mask=call.bias * call.scale)


@misreads
def float_mask_rounded_to_bfloat16(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """A float32 bias stored in half precision: distances beyond 256 lose their last digits."""
    return call if call.bias is None else replace(call, mask=call.bias.to(torch.bfloat16).to(call.bias.dtype))


@misreads
def first_key_skipped(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """A loop over keys that starts at 1."""
    return hide_keys(call, torch.arange(k.shape[2]) > 0)


@misreads
def last_key_skipped(call: AttentionCall, q: Tensor, k: Tensor) -> AttentionCall:
    """A cache length read before the new token was appended."""
    return hide_keys(call, torch.arange(k.shape[2]) < k.shape[2] - 1)


def hide_keys(call: AttentionCall, kept: Tensor) -> AttentionCall:
    """Only the keys that are `kept`, besides whatever the call hides."""
    if call.bias is not None:
        return replace(call, mask=call.bias.masked_fill(~kept, float("-inf")))
    return replace(call, mask=kept[None, None, None] if call.mask is None else call.mask & kept)


# A bool mask that becomes a number: nothing is hidden any more, only made less likely.


def _added(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *, hidden: float, shown: float) -> Result:
    mask = None if call.bias is not None else call.mask

    def score(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
        scores = core.score(q, k, call)
        return scores if mask is None else scores + torch.where(mask, shown, hidden).to(scores.dtype)

    return attend(q, k, v, bool_mask_ignored(call, q, k), score=score)


@in_kernel(applies=changes(bool_mask_ignored))
def bool_mask_added(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """mask.float() added to the scores: 1 for visible keys, 0 for hidden ones."""
    return _added(q, k, v, call, hidden=0.0, shown=1.0)


@in_kernel(applies=changes(bool_mask_ignored))
def hidden_keys_leak_softly(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """-10 for "masked": small enough to look hidden, large enough to leak."""
    return _added(q, k, v, call, hidden=-10.0, shown=0.0)


@in_kernel(applies=any_call(lambda reached: not bool(reached.visible.any(-1).all())))
def hidden_keys_at_minus_1e4(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """-1e4 for -inf: the same until a query may see nothing, which then sees everything."""
    return _added(q, k, v, call, hidden=-1e4, shown=0.0)


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
