"""The search: layer after layer, and in each head by head, for the sparsest thresholds within the budget.

As SpargeAttn tunes: first the threshold that chooses blocks, under `l1`, then the one that leaves out products with the
values, under `pv_l1`. Layers go in order of execution and each is calibrated behind those already tuned, so that
its inputs are those it will get. A head's error is that of its worst batch.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.candidate.state import preserved
from harness.kernels.call import Kernel
from harness.kernels.front import find_kernel
from harness.kernels.names import read_options, split_name
from harness.models.families.family import Family
from harness.models.tuning.calibration import Measured, Recorder, Seen, measure, run_batches
from harness.models.tuning.file import Head, Options, Tuned, TuningError, fingerprint
from harness.models.tuning.heads import HeadKernels
from harness.models.verify.subject import subject
from harness.swaps import SwapReport, swap

L1, PV_L1 = 0.07, 0.08  # SpargeAttn's
STEPS = 64

# From the densest, which is exact, to the sparsest.
TOPK = tuple(1 - step / STEPS for step in range(STEPS))
CDF = tuple(1 - (step / STEPS) ** 2 for step in range(STEPS + 1))  # what matters lies close to 1
SIMS = (0.6, 0.4, 0.2, -0.1)  # tried one by one, each with its own cdf: SpargeAttn's defaults and between
PV = (math.inf, *(float(nats) for nats in (50, 40, 32, 26, 21, 17, 14, 11, 9, 7.5, 6, 5, 4, 3, 2, 1)))  # inf: none
WAYS = ("topk", "cdf")


@dataclass(frozen=True)
class BestThreshold:
    threshold: float
    measured: Measured
    monotone: bool  # along what was tried, a sparser threshold was never the more exact one
    tried: int


def sparsest_within(limit: float, ladder: Sequence[float], measure: Callable[[float], Measured]) -> BestThreshold:
    """The sparsest threshold whose error stays within the limit, by bisection.

    `ladder` goes from the densest threshold, which must keep the limit, to the sparsest.

    Of thresholds that are equally sparse the densest is taken: on other inputs it risks the least. Where the error is
    no monotone function of the threshold a sparser one may be missed; the limit is kept all the same, for what is
    returned was measured.
    """
    found: dict[int, Measured] = {}

    def at(place: int) -> Measured:
        if place not in found:
            found[place] = measure(ladder[place])
        return found[place]

    if not at(0).error <= limit:  # so that a NaN never passes
        raise ArithmeticError(f"relative L1 {at(0).error:.3g} at the densest threshold {ladder[0]:g}: limit {limit:g}")
    low, high = 0, len(ladder)  # the ladder at `low` is within the limit, at `high` beyond it or at its end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle).error <= limit else (low, middle)
    best, first, last = low, 0, low
    while first < last:
        middle = (first + last) // 2
        if at(middle).sparsity >= at(low).sparsity:
            last = middle
        else:
            first = middle + 1
        if at(middle).sparsity == at(low).sparsity and at(middle).error <= limit:
            best = min(best, middle)
    tried = [found[place] for place in sorted(found)]
    monotone = all(a.error <= b.error and a.sparsity <= b.sparsity for a, b in pairwise(tried))
    return BestThreshold(ladder[best], found[best], monotone, len(found))


@dataclass(frozen=True)
class LayerTuned:
    """One layer, as it ends."""

    name: str
    place: int  # 1 for the first
    layers: int
    heads: tuple[Head, ...]
    seconds: float


def tune(
    target: str | Family | nn.Module,
    *,
    kernel: str = "sparse",
    by: str = "topk",
    l1: float = L1,
    pv_l1: float | None = PV_L1,
    config: Mapping[str, Any] | None = None,
    path: str | Path | None = None,
    inputs: Any = None,
    seed: int = 0,
    on_layer: Callable[[LayerTuned], None] | None = None,
) -> Tuned:
    """
    target    as for `harness.models.verify.verify`; its batches are the calibration inputs
    kernel    `sparse`, with what holds for all heads: `sparse?block_q=64&block_k=64`
    by        "topk", a share of the blocks, or "cdf", a share of the pooled softmax (with how alike blocks must be)
    l1        limit of each head's relative L1 by the choice of blocks
    pv_l1     limit with a PV threshold on top; None looks for none
    on_layer  is told of each layer as it ends
    """
    common = _common(kernel, by)
    for name, limit in (("l1", l1), ("pv_l1", pv_l1)):
        if limit is not None and not (0 < limit < math.inf):
            raise TuningError(f"{name} = {limit}: must be a positive number")
    if pv_l1 is not None and pv_l1 < l1:
        raise TuningError(f"pv_l1 = {pv_l1}: must not be below l1 = {l1}, which the choice of blocks may use up")
    name, load = subject(target, config or {}, None if path is None else Path(path), inputs)
    with preserved():
        torch.manual_seed(seed)
        model, family = load()
        flags = [(module, module.training) for module in model.modules()]
        try:
            found = _Search(family, model.eval(), split_name(kernel)[0], common, by, l1, pv_l1, seed).through(on_layer)
        finally:
            for module, training in flags:
                module.training = training
        return Tuned(
            family=name,
            model=type(model).__name__,
            weights=fingerprint(model),
            kernel=split_name(kernel)[0],
            options=common,
            l1=l1,
            pv_l1=pv_l1,
            seed=seed,
            layers=found,
        )


def _common(kernel: str, by: str) -> Options:
    name, _ = split_name(kernel)
    if by not in WAYS:
        raise TuningError(f"by = {by!r}: must be one of {', '.join(WAYS)}")
    if name != "sparse":
        raise TuningError(f"kernel {name!r} has no thresholds to tune: must be sparse")
    find_kernel(kernel)  # its options are checked here
    common = read_options(kernel)
    if fixed := sorted(common.keys() & {"topk", "cdf", "sim", "pv"}):
        raise TuningError(f"{kernel}: {', '.join(fixed)} is what the search is for; leave it out")
    return dict(common)


@dataclass(frozen=True)
class _Search:
    family: Family
    model: nn.Module
    kernel: str
    common: Options
    by: str
    l1: float
    pv_l1: float | None
    seed: int

    def through(self, on_layer: Callable[[LayerTuned], None] | None) -> dict[str, tuple[Head, ...]]:
        batches = self.family.batches(self.model, torch.Generator().manual_seed(self.seed))
        swapped, report = swap(self.model, kernel="eager", **self.family.swap_options)
        rows = {row.name: row for row in report.swapped}
        found: dict[str, tuple[Head, ...]] = {}
        order = self._order(swapped, report, batches)
        for place, name in enumerate(order, start=1):
            started = time.perf_counter()
            counter = rows[name].counter
            recorder = Recorder(find_kernel("eager"))
            counter.kernel = recorder.as_kernel()
            run_batches(swapped, batches, [recorder], self.seed)
            heads = range(recorder.calls[0].q.shape[1])
            tuned = found[name] = tuple(self._head(name, head, recorder.calls) for head in heads)
            options = [{**self.common, **head.options} for head in tuned]
            counter.kernel = HeadKernels(name, self.kernel, options).as_kernel()
            if on_layer is not None:
                on_layer(LayerTuned(name, place, len(order), tuned, time.perf_counter() - started))
        return found

    def _order(self, swapped: nn.Module, report: SwapReport, batches: Any) -> list[str]:
        """Layers as they run."""
        order: list[str] = []
        dense = find_kernel("eager")

        def noting(name: str) -> Kernel:
            def run(*given: Any) -> Any:
                if name not in order:
                    order.append(name)
                return dense.run(*given)

            return replace(dense, run=run)

        for row in report.swapped:
            row.counter.kernel = noting(row.name)
        run_batches(swapped, batches, [], self.seed)
        if idle := [row.name for row in report.swapped if row.name not in order]:
            raise TuningError(f"no calibration batch runs {', '.join(idle)}: there is nothing to tune it by")
        for row in report.swapped:
            row.counter.kernel = dense
        return order

    def _head(self, layer: str, head: int, calls: list[Seen]) -> Head:
        def search(
            option: str, limit: float, ladder: tuple[float, ...], given: Options
        ) -> tuple[Options, BestThreshold]:
            def measured(threshold: float) -> Measured:
                return measure(calls, head, self.kernel, {**self.common, **_with(given, option, threshold)})

            try:
                choice = sparsest_within(limit, ladder, measured)
            except ArithmeticError as error:
                raise TuningError(f"{layer}, head {head}: {error}") from error
            return _with(given, option, choice.threshold), choice

        if self.by == "topk":
            options, choice = search("topk", self.l1, TOPK, {})
        else:
            tried = [search("cdf", self.l1, CDF, {"sim": sim}) for sim in SIMS]
            options, choice = max(tried, key=lambda one: one[1].measured.sparsity)  # the first of equals
        monotone = choice.monotone
        if self.pv_l1 is not None:
            options, choice = search("pv", self.pv_l1, PV, options)
        found = choice.measured
        return Head(
            options=options,
            rel_l1=_rounded(found.error),
            sparsity=_rounded(found.block_sparsity),
            pv_skipped=_rounded(found.pv_skipped),
            monotone=monotone and choice.monotone,
        )


def _rounded(value: float) -> float:
    """Six digits: sums of float32 depend on the number of threads from the seventh on, and the file must not."""
    return float(f"{value:.6g}")


def _with(options: Options, option: str, threshold: float) -> Options:
    return options if threshold == math.inf else {**options, option: threshold}
