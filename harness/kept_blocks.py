"""Is an approximate kernel right in what it does compute? Limits on its error allow for what it left out alone."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from harness.build import WatchedKernel
from harness.equivalence import judge
from harness.kernels import shield
from harness.kernels.call import AttentionCall
from harness.kernels.front import find_kernel
from harness.kernels.tally import Tally


@contextmanager
def kept_blocks_checked(watch: WatchedKernel) -> Iterator[list[str]]:
    """While open, every call is compared with dense attention over its own kept blocks; the list tells what differs."""
    kernel, found = watch.kernel, list[str]()

    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        out, weights = kernel.run(q, k, v, call)
        if kernel.tally is not None and (words := difference(kernel.tally, q, k, v, call, out)):
            found.append(words)
        return out, weights

    watch.kernel = dataclasses.replace(kernel, run=run)
    try:
        yield found
    finally:
        watch.kernel = kernel


def difference(tally: Tally, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, out: object) -> str | None:
    """In words; None where there is none, or none can be told."""
    count, choice = tally.last, tally.choice
    # Of what is not finite the shield makes a clean call, and that is looked at.
    if not all(bool(t.isfinite().all()) for t in (q, k, v)) or not isinstance(out, Tensor) or not out.numel():
        return None
    if count.pv_skipped and (
        choice is None
        or choice.pv is None
        or k.shape[2] * math.exp(-choice.pv) > torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    ):
        return None  # values that count were left out, and the map does not tell which
    if not count.skipped:
        exact, words = call, "although nothing was skipped"
    elif choice is not None:
        exact, words = _restricted(call, choice.shown()), "over the blocks that it kept"
    else:
        return None
    with torch.no_grad():
        reference, golden = (_eager(q, k, v, exact, dtype) for dtype in (q.dtype, torch.float64))
        verdict = judge("out", out, [reference], [golden])
    # Without the jittered draws the noise floor is a low one: only what no rounding explains counts.
    return f"the kernel is not attention {words}: {verdict.reason}" if verdict.status == "mismatch" else None


def _restricted(call: AttentionCall, shown: Tensor) -> AttentionCall:
    if call.bias is not None:
        return dataclasses.replace(call, mask=call.bias.masked_fill(~shown, -math.inf))
    return dataclasses.replace(call, mask=shown if call.mask is None else shown & call.mask)


def _eager(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, dtype: torch.dtype) -> Tensor:
    return shield.run(find_kernel("eager"), q.to(dtype), k.to(dtype), v.to(dtype), call)[0]
