"""Step 4: is the swapped model's output the same at its end, and at every swapped layer on the way?"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.cell.referee import one_thread
from harness.cell.rule import OK_FACTOR, TensorVerdict, judge
from harness.models.families.family import Batch, Family, FamilyError
from harness.models.verify.golden import Batches, comparing, draw_all, each
from harness.models.verify.result import END, Deviation, Kind
from harness.swaps import SwapReport
from harness.text import plural, ratio

# ----------------------------------------------------------------------------------------------------------------------
# What each swapped layer put out during a forward pass, in order of execution.


@dataclass(frozen=True)
class Place:
    """Where in a forward pass a tensor was seen."""

    layer: str  # full name of the module; "" is the model itself
    call: int = 0  # a module may run several times in one pass
    part: int = 0  # joint attention gives a tensor per stream
    optional: bool = False  # attention weights: a layer may give them on one side alone

    def __str__(self) -> str:
        part = " weights" if self.optional else f"[{self.part}]" if self.part else ""
        call = f" (call {self.call + 1})" if self.call else ""
        return f"{self.layer or 'the model'}{part}{call}"


@contextmanager
def captured(model: nn.Module, layers: Iterable[str]) -> Iterator[dict[Place, Tensor]]:
    seen: dict[Place, Tensor] = {}
    calls: dict[str, int] = {}

    def hook_of(layer: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            call = calls[layer] = calls.get(layer, -1) + 1
            for part, tensor in enumerate(_floating(output)):
                optional = part > 0 and _outline(tensor) != _outline(_floating(output)[0])
                # A clone: what follows may add the residual in place.
                seen[Place(layer, call, part, optional)] = tensor.detach().clone()

        return hook

    handles = [model.get_submodule(layer).register_forward_hook(hook_of(layer)) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _floating(output: Any) -> list[Tensor]:
    """The streams of hidden states, alike but for their length, and beside them perhaps attention weights."""
    values = [output]
    if isinstance(output, tuple | list):
        values = list(output)
    elif isinstance(output, Mapping):
        values = list(output.values())
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _outline(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions, batch and width."""
    return (tensor.ndim, *tensor.shape[:1], *tensor.shape[-1:])


# ----------------------------------------------------------------------------------------------------------------------


Outputs = dict[Place, Tensor]


@dataclass(frozen=True)
class Judged:
    """One tensor of one batch, judged."""

    batch: str
    kind: Kind
    layer: str
    verdict: TensorVerdict
    deviation: Deviation | None = None  # of an approximate kernel

    @property
    def ok(self) -> bool:
        return self.verdict.status == "ok"


@dataclass(frozen=True)
class Forward:
    judged: tuple[Judged, ...]  # batch by batch, in order of execution
    batches: int
    problem: str | None
    goldens: Mapping[str, Outputs] = field(repr=False)  # by batch: what the original gives in float64

    @property
    def summary(self) -> str:
        layer = self.worst("layer")
        where = f"{layer.verdict.tensor}, {layer.batch}"
        end = ratio(self.worst("end", "fast path").verdict.err_ratio)
        batches = plural(self.batches, "batch", "batches")
        return f"{batches}: worst layer {ratio(layer.verdict.err_ratio)} N ({where}), end {end} N"

    def worst(self, *kinds: Kind) -> Judged:
        return max((row for row in self.judged if row.kind in kinds), key=lambda row: row.verdict.rank)


def compare_forward(reference: nn.Module, swapped: nn.Module, report: SwapReport, family: Family, seed: int) -> Forward:
    batches = family.batches(reference, torch.Generator().manual_seed(seed))
    if not batches:
        raise ValueError(f"{family.name} gives no batch: there is nothing to compare")
    layers = [row.name for row in report.swapped]

    def run(model: nn.Module, given: Batches) -> dict[str, Outputs]:
        return {name: outputs_of(model, batch, layers, family, seed) for name, batch in given.items()}

    references, goldens = draw_all(reference, batches, run, seed=seed)
    judged: list[Judged] = []
    bypassed: list[str] = []

    def watch(name: str, before: dict[str, int]) -> None:
        ran = {place.layer for place in references[0][name]}
        bypassed.extend(row.name for row in report.swapped if row.name in ran and row.calls == before[row.name])

    for name, batch in each(batches, Tensor.clone).items():
        before = calls_of(report)
        candidate = outputs_of(swapped, batch, layers, family, seed)
        watch(name, before)
        r, g = [draw[name] for draw in references], [draw[name] for draw in goldens]
        with one_thread():
            judged += _judge_batch(name, batch, candidate, r, g)
    idle = [layer for layer in layers if layer not in bypassed and layer in report.uncalled]
    if any(isinstance(module, nn.MultiheadAttention) for module in reference.modules()):
        first = next(iter(batches))
        before = calls_of(report)
        judged += _judge_fast_path(reference, swapped, {first: batches[first]}, family, seed)
        watch(first, before)
    return Forward(tuple(judged), len(batches), _problem(judged, bypassed, idle), goldens[0])


def _judge_fast_path(
    reference: nn.Module, swapped: nn.Module, batches: Batches, family: Family, seed: int
) -> list[Judged]:
    """The end again, as users run the model. torch's fast path gives padding other values, so it is on everywhere."""

    def run(model: nn.Module, given: Batches) -> Outputs:
        (batch,) = given.values()
        with comparing(seed, fast_path=True):
            return _end(batch.through(model), model, family)

    references, goldens = draw_all(reference, batches, run, seed=seed, fast_path=True)
    candidate = run(swapped, each(batches, Tensor.clone))
    ((name, batch),) = batches.items()
    return [replace(row, kind="fast path") for row in _judge_batch(name, batch, candidate, references, goldens)]


def calls_of(report: SwapReport) -> dict[str, int]:
    return {row.name: row.calls for row in report.swapped}


def outputs_of(model: nn.Module, batch: Batch, layers: Sequence[str], family: Family, seed: int) -> Outputs:
    with comparing(seed), captured(model, layers) as seen:
        result = batch.through(model)
    return seen | _end(result, model, family)


def _end(result: Any, model: nn.Module, family: Family) -> Outputs:
    found = family.output(result)
    tensors = found if isinstance(found, list) else [found]
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise FamilyError(f"the output of {type(model).__name__} is {kind}: it must be a floating-point tensor")
    return {Place(END, part=part): tensor for part, tensor in enumerate(tensors)}


def _judge_batch(
    name: str, batch: Batch, candidate: Outputs, references: list[Outputs], goldens: list[Outputs]
) -> Iterator[Judged]:
    for place, reference in references[0].items():
        kind: Kind = "end" if place.layer == END else "layer"
        if place not in candidate:
            if place.optional:
                continue
            verdict = TensorVerdict(str(place), name, "mismatch", "did not run in the swapped model")
        elif any(place not in draw for draw in (*references, *goldens)):
            raise ArithmeticError(f"{place} does not run in every draw: a rounding error decides what the model runs")
        elif goldens[0][place].dtype != torch.float64:
            raise ArithmeticError(f"{place} is {goldens[0][place].dtype} in a float64 copy of the model: no golden")
        else:
            r, g = [draw[place] for draw in references], [draw[place] for draw in goldens]
            verdict = judge(str(place), candidate[place], r, g, regime=name, may_differ=left_open(batch, reference))
        yield Judged(name, kind, place.layer, verdict)
    for place in (place for place in candidate if place not in references[0] and not place.optional):
        verdict = TensorVerdict(str(place), name, "mismatch", "did not run in the original model")
        yield Judged(name, "layer", place.layer, verdict)


def left_open(batch: Batch, tensor: Tensor) -> Tensor | None:
    """Rows at padding: what attention gives a query that is none is nobody's business."""
    real = batch.real
    if real is None or tensor.shape[: real.ndim] != real.shape:
        return None
    return (~real).view(*real.shape, *[1] * (tensor.ndim - real.ndim)).expand(tensor.shape)


def _problem(judged: Sequence[Judged], bypassed: Sequence[str], idle: Sequence[str]) -> str | None:
    if bypassed:
        return f"bypassed: the model ran without the swapped {_listed(bypassed)}"
    if idle:
        return f"no batch runs {_listed(idle)}: nothing is known of it"
    first = next((row for row in judged if not row.ok), None)
    if first is None:
        return None
    if first.kind == "fast path":
        return f"{describe(first.verdict)} in plain eval and no_grad, with torch's fast path on ({first.batch} batch)"
    if first.kind == "end":
        return f"the model's end departs, though no swapped layer does: {describe(first.verdict)} ({first.batch} batch)"
    return f"{first.verdict.tensor} departs first: {describe(first.verdict)} ({first.batch} batch)"


def describe(verdict: TensorVerdict) -> str:
    """The error alone where it tells enough."""
    if verdict.err_ratio is not None and verdict.err_ratio > OK_FACTOR:
        return f"error {ratio(verdict.err_ratio)} N"
    return verdict.reason


def _listed(layers: Sequence[str]) -> str:
    names = [layer or "the model" for layer in dict.fromkeys(layers)]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
