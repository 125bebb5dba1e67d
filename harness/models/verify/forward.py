"""Step 4: is the swapped model's output the same at its end, and at every swapped layer on the way?

The original runs as it is, jittered and in float64 (golden.py). All that a layer, and the model, puts out is caught on
the way and judged by the acceptance rule.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.cell.referee import one_thread
from harness.cell.rule import OK_FACTOR, TensorVerdict, judge
from harness.models.families.family import Batch, Family, FamilyError, floating_tensors
from harness.models.verify.golden import Batches, comparing, draw_all, each
from harness.models.verify.result import END, Judged, Kind
from harness.swaps import SwapReport
from harness.text import plural, ratio


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


Outputs = dict[Place, Tensor]


@contextmanager
def captured(model: nn.Module, layers: Iterable[str]) -> Iterator[Outputs]:
    """What each of these modules puts out while the model runs, in order of execution."""
    seen: Outputs = {}
    calls: dict[str, int] = {}

    def note(layer: str, module: nn.Module, inputs: Any, output: Any) -> None:
        call = calls[layer] = calls.get(layer, -1) + 1
        tensors = floating_tensors(output)  # streams, alike but for their length, and beside them perhaps weights
        for part, tensor in enumerate(tensors):
            optional = part > 0 and _outline(tensor) != _outline(tensors[0])
            # A clone: what follows may add the residual in place.
            seen[Place(layer, call, part, optional)] = tensor.detach().clone()

    handles = [model.get_submodule(layer).register_forward_hook(partial(note, layer)) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _outline(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions, batch and width."""
    return (tensor.ndim, *tensor.shape[:1], *tensor.shape[-1:])


@dataclass(frozen=True)
class ModelPair:
    """A model beside its swapped copy, and how both are run."""

    original: nn.Module
    swapped: nn.Module
    report: SwapReport
    family: Family
    seed: int

    @property
    def layers(self) -> list[str]:
        return [row.name for row in self.report.swapped]

    def batches(self) -> Batches:
        """The same at every call."""
        found = self.family.batches(self.original, torch.Generator().manual_seed(self.seed))
        if not found:
            raise ValueError(f"{self.family.name} gives no batch: there is nothing to compare")
        return found

    def outputs(self, model: nn.Module, batch: Batch) -> Outputs:
        """Of every swapped layer, and of the model itself."""
        with comparing(self.seed), captured(model, self.layers) as seen:
            result = batch.through(model)
        return seen | self.end(model, result)

    def end(self, model: nn.Module, result: Any) -> Outputs:
        output = self.family.output(result)
        tensors = output if isinstance(output, list) else [output]
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise FamilyError(f"the output of {type(model).__name__} is {kind}: it must be a floating-point tensor")
        return {Place(END, part=part): tensor.detach() for part, tensor in enumerate(tensors)}

    def calls(self) -> dict[str, int]:
        """How often each swapped layer's kernel ran so far."""
        return {row.name: row.calls for row in self.report.swapped}

    def idle_since(self, before: Mapping[str, int]) -> list[str]:
        """The swapped layers whose kernel did not run since `calls` gave `before`."""
        return [layer for layer, calls in self.calls().items() if calls == before[layer]]


@dataclass(frozen=True)
class Forward:
    """What step 4 gives: a row for each tensor judged, batch by batch in order of execution, and what is wrong."""

    judged: tuple[Judged, ...]
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


def compare_forward(pair: ModelPair) -> Forward:
    batches = pair.batches()

    def run(model: nn.Module, given: Batches) -> dict[str, Outputs]:
        return {name: pair.outputs(model, batch) for name, batch in given.items()}

    references, goldens = draw_all(pair.original, batches, run, seed=pair.seed)
    judged: list[Judged] = []
    bypassed: list[str] = []

    def note_bypassed(name: str, before: Mapping[str, int]) -> None:
        ran = {place.layer for place in references[0][name]}
        bypassed.extend(layer for layer in pair.idle_since(before) if layer in ran)

    for name, batch in each(batches, Tensor.clone).items():
        before = pair.calls()
        candidate = pair.outputs(pair.swapped, batch)
        note_bypassed(name, before)
        r, g = [draw[name] for draw in references], [draw[name] for draw in goldens]
        with one_thread():
            judged += _judge_batch(name, batch, candidate, r, g)
    idle = [layer for layer in pair.layers if layer not in bypassed and layer in pair.report.uncalled]
    if any(isinstance(module, nn.MultiheadAttention) for module in pair.original.modules()):
        first = next(iter(batches))
        before = pair.calls()
        judged += _judge_fast_path(pair, {first: batches[first]})
        note_bypassed(first, before)
    return Forward(tuple(judged), len(batches), _problem(judged, bypassed, idle), goldens[0])


def _judge_fast_path(pair: ModelPair, batches: Batches) -> list[Judged]:
    """The end again, as users run the model. torch's fast path gives padding other values, so it is on everywhere."""

    def run(model: nn.Module, given: Batches) -> Outputs:
        (batch,) = given.values()
        with comparing(pair.seed, fast_path=True):
            return pair.end(model, batch.through(model))

    references, goldens = draw_all(pair.original, batches, run, seed=pair.seed, fast_path=True)
    candidate = run(pair.swapped, each(batches, Tensor.clone))
    ((name, batch),) = batches.items()
    return [replace(row, kind="fast path") for row in _judge_batch(name, batch, candidate, references, goldens)]


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
