"""Step 5: does the swapped model generate the same tokens, or denoise to the same latents?"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.cell.rule import TensorVerdict, judge
from harness.models.families.family import Family
from harness.models.verify.forward import ModelPair, describe
from harness.models.verify.golden import Batches, comparing, draw_all
from harness.models.verify.metering import Meters
from harness.models.verify.result import LATENTS, Deviation, Judged
from harness.text import ratio, small

Generate = Callable[[nn.Module, torch.Generator], Tensor]


@dataclass(frozen=True)
class Generation:
    message: str
    passed: bool
    judged: tuple[Judged, ...] = ()  # of latents
    first_difference: int | None = None  # step of the first token that is another one


def compare_generation(pair: ModelPair, generate: Generate, *, meters: Meters) -> Generation:
    """With an approximate kernel that skipped something (`meters` tell), what differs is reported and no failure."""

    def run(model: nn.Module, batches: Batches) -> Tensor:
        with comparing(pair.seed):
            return generate(model, torch.Generator().manual_seed(pair.seed))

    for meter in meters.values():
        meter.clear()
    before = pair.calls()
    found = run(pair.swapped, {})
    approximate = any(meter.count.skipped_any for meter in meters.values())
    if idle := [layer or "the model" for layer in pair.idle_since(before)]:
        return Generation(f"bypassed: generation ran without the swapped {', '.join(idle)}", passed=False)
    if not found.is_floating_point():
        with _steps(pair.original, pair.family) as steps:
            return _compare_tokens(found, run(pair.original, {}), steps, approximate=approximate)
    references, goldens = draw_all(pair.original, {}, run, seed=pair.seed)
    if approximate:
        return _measure_latents(found, goldens[0])
    verdict = judge(LATENTS, found, references, goldens, regime="generated")
    judged = (Judged("generated", "generated", LATENTS, verdict),)
    shape = " x ".join(map(str, found.shape))
    if verdict.status == "ok":
        assert verdict.err_ratio is not None
        return Generation(f"latents {shape} equal: error {ratio(verdict.err_ratio)} N", True, judged)
    return Generation(f"latents {shape} depart: {describe(verdict)}", False, judged)


def _measure_latents(found: Tensor, golden: Tensor) -> Generation:
    if found.shape != golden.shape:
        return Generation(f"latents {tuple(found.shape)} instead of {tuple(golden.shape)}", passed=False)
    own = Deviation.of([(found, golden)])
    finite = bool(found.isfinite().all())
    verdict = TensorVerdict(LATENTS, "generated", "ok" if finite else "mismatch", "" if finite else "not finite")
    judged = (Judged("generated", "generated", LATENTS, verdict, own),)
    shape = " x ".join(map(str, found.shape))
    if not finite:
        return Generation(f"latents {shape} are not finite", False, judged)
    message = f"L1 {own.rel_l1:.3g}, cosine {own.cosine:.4f}, RMSE {small(own.rmse)}, max {small(own.max_abs)}"
    return Generation(f"latents {shape} approximate the original's: {message}", True, judged)


def _compare_tokens(found: Tensor, wanted: Tensor, logits: list[Tensor], *, approximate: bool) -> Generation:
    if found.shape != wanted.shape:
        return Generation(f"tokens {tuple(found.shape)} instead of {tuple(wanted.shape)}", passed=False)
    differing = (found != wanted).nonzero()
    new = min(len(logits), wanted.shape[-1])
    if len(differing) == 0:
        return Generation(f"{wanted.shape[0]} x {new} tokens equal", passed=True)
    # The earliest step of any sequence: all that follows it is a consequence.
    sequence, position = min(differing.tolist(), key=lambda at: at[1])
    theirs, ours = int(wanted[sequence, position]), int(found[sequence, position])
    step = position - (wanted.shape[-1] - new)
    gap = ""
    if 0 <= step < len(logits):
        row = logits[step][sequence]
        gap = f"; the original's logits are {small(float(row[theirs] - row[ours]))} apart"
    message = f"sequence {sequence}, step {step}: token {ours} instead of {theirs}{gap}"
    if approximate:
        same = wanted.numel() - len(differing)
        message = f"{same} of {wanted.numel()} tokens equal; the first that differs: {message}"
    return Generation(message, approximate, first_difference=step)


@contextmanager
def _steps(model: nn.Module, family: Family) -> Iterator[list[Tensor]]:
    """The logits of each pass of a model that generates, of the last position alone."""
    logits: list[Tensor] = []

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        found = family.output(output)
        assert isinstance(found, Tensor)  # only a family of the library generates, and gives one
        logits.append(found[:, -1].detach().clone())

    handle = model.register_forward_hook(hook)
    try:
        yield logits
    finally:
        handle.remove()
