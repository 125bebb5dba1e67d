"""Watches an approximate kernel at every layer: how many blocks it skips, how far it is from dense attention."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from harness.cell.approximate import dense_draws, difference
from harness.cell.referee import one_thread
from harness.cell.rule import TensorVerdict, judge
from harness.kernels import shield
from harness.kernels.blocksparse.kernel import is_spoilt
from harness.kernels.call import AttentionCall, BlockCount, Kernel, Unsupported
from harness.kernels.front import find_kernel
from harness.models.verify.result import Deviation
from harness.swaps import SwapReport

NOTHING = BlockCount(0, 0, 0)
Meters = Mapping[str, "Meter"]  # by the layer's name


class Meter:
    """Stands around one layer's kernel. Only while `measuring` does it compute dense attention beside it."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.dense = kernel, find_kernel("eager")
        self.measuring = self.run_dense = False
        self.real: Tensor | None = None  # (B, L): queries that count
        # Of calls with one query apart from the others: among a prompt's many rows a decode step would not show.
        self.pairs: dict[bool, list[tuple[Tensor, Tensor]]] = {}
        self.count = NOTHING
        self.exact: TensorVerdict | None = None  # the worst of the calls in which nothing was skipped
        self.wrong: str | None = None  # a call that is not attention even over the blocks that it kept

    def as_kernel(self) -> Kernel:
        return dataclasses.replace(self.kernel, run=self.run)

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if self.run_dense:
            return self.dense.run(q, k, v, call)
        tally = self.kernel.tally
        if tally is None:
            raise Unsupported(f"{self.kernel.name} is approximate and does not count what it skips")
        tally.take()  # what another layer left there: they may share the kernel
        out, weights = self.kernel.run(q, k, v, call)
        self.count += tally.take()
        # Of what is hidden and not finite the shield makes a clean call, and that is looked at.
        if self.measuring and not is_spoilt(out, call):
            if tally.last.skipped_any:
                self.wrong = self.wrong or difference(tally, q, k, v, call, out)
            else:
                self._judge_exact(out, q, k, v, call)
            dense = dense_attention(q, k, v, call)
            self.pairs.setdefault(q.shape[2] == 1, []).append((self._counting(out), self._counting(dense)))
        return out, weights

    def _judge_exact(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
        """By the acceptance rule, whatever the budget: nothing was left out that an error could come from."""
        with torch.no_grad(), one_thread():
            draws = dense_draws([t.detach() for t in (q, k, v)], call, jittered=True)
            open_rows = None
            if self.real is not None and self.real.shape == (q.shape[0], q.shape[2]):
                open_rows = (~self.real.to(out.device))[:, None, :, None].expand(out.shape)
            found = judge("attention", out, *draws, may_differ=open_rows)
        if self.exact is None or found.rank > self.exact.rank:
            self.exact = found

    def _counting(self, out: Tensor) -> Tensor:
        """Without the rows of queries that are padding."""
        out = out.detach().transpose(1, 2)  # (B, L, H, D_v)
        if self.real is None or self.real.shape != out.shape[:2]:
            return out.clone()
        return out[self.real.to(out.device)]

    def deviation(self) -> Deviation:
        """Of prompts or of single steps, whichever are farther from dense."""
        found = max((Deviation.of(pairs) for pairs in self.pairs.values()), key=lambda one: one.rank)
        count = self.count
        pv_skipped = count.pv_skipped / max(count.visible, 1)
        return dataclasses.replace(found, sparsity=count.sparsity, skipped_blocks=count.skipped, pv_skipped=pv_skipped)

    def clear(self) -> None:
        self.pairs, self.count, self.exact, self.wrong = {}, NOTHING, None, None


def dense_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """In float64: (B, H, L, D_v)."""
    call = dataclasses.replace(call, need_weights=False)
    with torch.no_grad():
        return shield.run(find_kernel("eager"), q.double(), k.double(), v.double(), call)[0]


def attach_meters(report: SwapReport) -> Meters:
    meters = {}
    for row in report.swapped:
        meters[row.name] = Meter(row.counter.kernel)
        row.counter.kernel = meters[row.name].as_kernel()
    return meters


@contextmanager
def dense_instead(meters: Meters) -> Iterator[None]:
    """Every layer runs our eager kernel in the place of its own."""
    for meter in meters.values():
        meter.run_dense = True
    try:
        yield
    finally:
        for meter in meters.values():
            meter.run_dense = False


@contextmanager
def measuring(meters: Meters, real: Tensor | None = None) -> Iterator[None]:
    """From nothing; what was found is in the meters afterwards."""
    for meter in meters.values():
        meter.clear()
        meter.measuring, meter.real = True, real
    try:
        yield
    finally:
        for meter in meters.values():
            meter.measuring, meter.real = False, None
