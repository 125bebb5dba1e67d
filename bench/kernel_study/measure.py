"""Point -> results: guarded, its memory counted, then all sides timed in turn within the same blocks."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from bench.kernel_study import guard
from bench.kernel_study.cell import Point, Sides
from bench.kernel_study.result import BASELINES, MEASURED, NOT_RUN, UNSUPPORTED, WRONG, Result
from harness.cell.peak import peak_bytes
from harness.cell.timing import Ratio, Samples, interleave, paired_ratio

SEED = 0
SAMPLE_S = 4e-3  # a short call is made several times in a row


@dataclass(frozen=True)
class Patience:
    """How long a point is measured."""

    budget_s: float = 0.3
    required_s: float = 1.0  # for a cell that a target is judged by
    blocks: int = 7
    slow_blocks: int = 5  # where one round of all sides lasts longer than slow_s
    slow_s: float = 1.0
    max_blocks: int = 60


def measure(point: Point, patience: Patience) -> list[Result]:
    cell = point.cell
    sides = point.build(cell)
    found = [Result(cell, name, NOT_RUN, why) for name, why in sides.absent.items()]
    try:
        problems = guard.problems(point, sides)
    except guard.WrongReference as error:
        return found + [Result(cell, name, WRONG, str(error)) for name in sides.calls]
    for name, why in problems.items():
        found.append(Result(cell, name, UNSUPPORTED if why.startswith(UNSUPPORTED) else WRONG, why))
    calls = {name: call for name, call in sides.calls.items() if name not in problems}
    peaks = {name: peak_bytes(call) for name, call in calls.items()}
    samples = _time(calls, patience, required=cell.required)
    return found + [_result(point, sides, name, samples, peaks) for name in calls]


def not_run(point: Point, reason: str) -> list[Result]:
    """The sides that a point would have had: what is missing is stated, side by side."""
    return [Result(point.cell, name, NOT_RUN, reason) for name in point.side_names]


def _time(calls: Mapping[str, Callable[[], Tensor]], patience: Patience, *, required: bool) -> dict[str, Samples]:
    start = time.perf_counter()
    for call in calls.values():
        call()
    slow = time.perf_counter() - start > patience.slow_s
    return interleave(
        calls,
        budget_s=patience.required_s if required else patience.budget_s,
        min_blocks=patience.slow_blocks if slow else patience.blocks,
        max_blocks=patience.max_blocks,
        seed=SEED,
        sample_s=SAMPLE_S,
        warm_up=True,
    )


def _result(point: Point, sides: Sides, name: str, samples: Mapping[str, Samples], peaks: Mapping[str, int]) -> Result:
    present = [baseline for baseline in BASELINES if baseline in samples]
    ratios: dict[str, Ratio] = {
        baseline: paired_ratio(samples[name], samples[baseline], seed=SEED)
        for baseline in present
        if baseline != name and name not in sides.unlike
    }
    whole = peaks.get("textbook")
    return Result(
        point.cell,
        name,
        MEASURED,
        seconds=tuple(samples[name].seconds),
        ratios=ratios,
        baseline_seconds=statistics.median(samples[present[0]].seconds) if present else None,
        work=sides.work[name],
        peak_bytes=peaks[name],
        peak_x_textbook=peaks[name] / whole if whole else None,
    )
