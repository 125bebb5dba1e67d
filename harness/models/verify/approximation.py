"""Step 4 of an approximate kernel: how far is each layer's attention from dense, and the model from the original?

First the swap is proven with dense attention in the kernel's place, by the acceptance rule: a mask that got lost, or a
wrong weight, must not hide in the budget. Then the kernel itself runs, and each layer's attention is measured against
dense attention in float64 on the very q, k and v that it was given, so that an error stays with the layer that made it.
A call in which nothing was skipped is held to the acceptance rule instead. What all of them together do to the model
shows at its end. A kernel that skipped nothing at all is judged as an exact one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from harness.cell.rule import TensorVerdict
from harness.kernels.call import BlockCount
from harness.models.families.family import Batch
from harness.models.verify.forward import Forward, ModelPair, Outputs, compare_forward, describe, left_open
from harness.models.verify.golden import each
from harness.models.verify.metering import NOTHING, Meters, dense_instead, measuring
from harness.models.verify.result import END, Budget, Deviation, Judged
from harness.text import plural


@dataclass(frozen=True)
class ApproximateForward(Forward):
    count: BlockCount = NOTHING  # of all layers and batches

    @property
    def summary(self) -> str:
        if not self.count.skipped_any:
            return f"{super().summary}; no block skipped, so judged as an exact kernel"
        layer, end = self.farthest("layer"), self.farthest("end")
        assert layer.deviation is not None and end.deviation is not None
        batches = plural(self.batches, "batch", "batches")
        where = f"{layer.verdict.tensor}, {layer.batch}"
        worst = f"worst layer L1 {layer.deviation.rel_l1:.3f} ({where}), end L1 {end.deviation.rel_l1:.3f}"
        return f"{batches}: sparsity {self.count.sparsity:.2f}, {worst}; dense in its place is equal"

    def farthest(self, kind: str) -> Judged:
        rows = (row for row in self.judged if row.kind == kind and row.deviation is not None)
        return max(rows, key=lambda row: row.deviation.rank if row.deviation else 0.0)


def compare_approximate(pair: ModelPair, *, meters: Meters, budget: Budget) -> ApproximateForward:
    with dense_instead(meters):
        dense = compare_forward(pair)
    if dense.problem is not None:
        problem = f"the swap itself is wrong, seen with dense attention in the kernel's place: {dense.problem}"
        return ApproximateForward(dense.judged, dense.batches, problem, dense.goldens)
    judged: list[Judged] = []
    count = NOTHING
    for name, batch in each(pair.batches(), Tensor.clone).items():
        with measuring(meters, batch.real):
            found = pair.outputs(pair.swapped, batch)
        controls = [row for row in dense.judged if row.batch == name]
        judged += _layers(controls, found, dense.goldens[name], batch, meters, budget)
        judged += _ends(controls, found, dense.goldens[name], batch, budget)
        count = sum((meter.count for meter in meters.values()), count)
    if not count.skipped_any:
        exact = compare_forward(pair)
        return ApproximateForward(exact.judged, exact.batches, exact.problem, exact.goldens)
    return ApproximateForward(tuple(judged), dense.batches, _problem(judged), dense.goldens, count)


def _layers(
    controls: Sequence[Judged], found: Outputs, golden: Outputs, batch: Batch, meters: Meters, budget: Budget
) -> Iterator[Judged]:
    """One row for each layer that ran, in order of execution; its dense control's errors stand beside."""
    for layer in dict.fromkeys(row.layer for row in controls if row.kind == "layer"):
        control = max((row for row in controls if row.layer == layer), key=lambda row: row.verdict.rank)
        places = [place for place in golden if place.layer == layer and not place.optional]
        flow = _deviation([_pair(found.get(place), golden[place], batch) for place in places])
        own = replace(meters[layer].deviation(), flow_rel_l1=flow.rel_l1)
        verdict = replace(control.verdict, tensor=layer or "the model")
        verdict = _judged(verdict, own, budget.rel_l1)
        exact = meters[layer].exact
        if verdict.status == "ok" and exact is not None and exact.status != "ok":
            reason = f"a call that skipped no block must equal dense attention: {describe(exact)}"
            verdict = replace(verdict, status="mismatch", reason=reason)
        if verdict.status == "ok" and (wrong := meters[layer].wrong) is not None:
            verdict = replace(verdict, status="mismatch", reason=wrong)
        yield replace(control, verdict=verdict, deviation=own)


def _ends(
    controls: Sequence[Judged], found: Outputs, golden: Outputs, batch: Batch, budget: Budget
) -> Iterator[Judged]:
    for control in (row for row in controls if row.kind == "end"):
        (place,) = (place for place in golden if place.layer == END and str(place) == control.verdict.tensor)
        own = _deviation([_pair(found.get(place), golden[place], batch)])
        yield replace(control, verdict=_judged(control.verdict, own, budget.end_rel_l1), deviation=own)


def _pair(found: Tensor | None, golden: Tensor, batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Both without padding; None where there is nothing to compare."""
    if found is None or found.shape != golden.shape:
        return None
    left = left_open(batch, golden)
    return (found, golden) if left is None else (found[~left], golden[~left])


def _deviation(pairs: Sequence[tuple[Tensor, Tensor] | None]) -> Deviation:
    complete = [pair for pair in pairs if pair is not None]
    if not complete or len(complete) < len(pairs):
        return Deviation.unknown()  # a NaN never passes
    return Deviation.of(complete)


def _judged(verdict: TensorVerdict, found: Deviation, limit: float) -> TensorVerdict:
    if found.rel_l1 <= limit:
        return verdict
    return replace(verdict, status="mismatch", reason=f"relative L1 {found.rel_l1:.3g} is beyond {limit:g}")


def _problem(judged: Sequence[Judged]) -> str | None:
    """The first layer beyond the budget, and how many more there are."""
    beyond = [row for row in judged if not row.ok]
    if not beyond:
        return None
    first = beyond[0]
    assert first.deviation is not None
    where = "the model's end, though each layer is within its limit" if first.kind == "end" else first.verdict.tensor
    sparsity = "" if first.deviation.sparsity is None else f" at sparsity {first.deviation.sparsity:.2f}"
    more = len({row.verdict.tensor for row in beyond} - {first.verdict.tensor})
    rest = f"; {more} more beyond" if more else ""
    return f"{where}: {first.verdict.reason}{sparsity} ({first.batch} batch){rest}"
