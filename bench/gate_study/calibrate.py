"""How many rows of extra work are so many per cent of a cell's call, and what they really turned out to be.

`python -P calibrate.py ROOT < request > answers`: run by path once per study, in a process whose `harness` is ROOT's.
The count is found by timing the work where it stands, after a call, then corrected by the difference of whole calls,
in which the work costs more than alone: the call finds other caches. What was injected is measured once more as such a
difference over many blocks, with its interval.
"""

import json
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

ADJUSTMENTS, IN_TURN = 4, 2  # of the count by the work alone, then by whole calls
MOST_STEP = 1.5  # of one of the latter: a difference of two calls is noisy
MIN_BLOCKS = 25
SAMPLE_S = 1e-3
QUIET = 0.25  # quantile of the samples: others' work only ever adds to a call's time
RESAMPLES = 500

Call = Callable[[], object]


@dataclass(frozen=True)
class Injection:
    """`rows` were asked to slow the call by `share`.

    Timed in turn with the plain call they did so by `measured`, 95 % interval `lo` to `hi`; timed by themselves they
    are `alone` of the call.
    """

    share: float
    rows: int
    measured: float
    lo: float
    hi: float
    alone: float


def calibrate(
    fields: Mapping[str, Any], shares: Sequence[float], *, suite_seed: int, seconds: float
) -> list[Injection]:
    from bench.gate_study.extra_work import PIECE, ExtraWork, followed_by
    from harness.case import Case
    from harness.cell.build import build_pair
    from harness.cell.measure import timed_call
    from harness.kernels.front import find_kernel

    case = Case(**fields)
    pair = build_pair(case, find_kernel(case.kernel), case.seed(suite_seed))
    pair.watch.checking = False
    call = timed_call(pair, pair.candidate, case.seed(suite_seed))
    rows = dict.fromkeys(shares, PIECE)
    step_s = seconds / 4 / (ADJUSTMENTS + 1)
    for _ in range(ADJUSTMENTS):
        alone = shares_of_a_call(call, {x: ExtraWork(rows[x]) for x in shares}, step_s)
        rows = {x: max(1, round(rows[x] * x / alone[x])) for x in shares}

    def measured() -> dict[float, tuple[float, float, float]]:
        calls = {0.0: call} | {x: followed_by(call, ExtraWork(rows[x])) for x in shares}
        samples = in_turn(calls, seconds / 4)
        return {x: slowdown(samples[x], samples[0.0]) for x in shares}

    for _ in range(IN_TURN):
        found = measured()
        steps = {x: min(max(x / max(found[x][0], 1e-6), 1 / MOST_STEP), MOST_STEP) for x in shares}
        rows = {x: max(1, round(rows[x] * steps[x])) for x in shares}
    found = measured()
    alone = shares_of_a_call(call, {x: ExtraWork(rows[x]) for x in shares}, step_s)
    return [Injection(x, rows[x], *found[x], alone[x]) for x in shares]


def shares_of_a_call(call: Call, works: Mapping[float, Call], budget_s: float) -> dict[float, float]:
    """Each work's time over the call's, timed right after a call."""
    import numpy as np

    # The processor's clock where being interrupted is likely; it is too coarse to read for some microseconds of work.
    clock, own_clock, order = time.perf_counter, time.process_time, list(works)
    calls: list[float] = []
    times: dict[float, list[float]] = {x: [] for x in works}
    call()
    deadline = clock() + budget_s
    while clock() < deadline or len(calls) < MIN_BLOCKS * len(order):
        random.shuffle(order)
        for x in order:
            start = own_clock()
            call()
            calls.append(own_clock() - start)
            start = clock()
            works[x]()
            times[x].append(clock() - start)
    once = float(np.quantile(calls, QUIET))
    return {x: max(float(np.quantile(times[x], QUIET)) / once, 1e-6) for x in works}


def in_turn(calls: Mapping[float, Call], budget_s: float) -> dict[float, list[float]]:
    """Seconds of the processor per call, of each in every block."""
    clock, order = time.process_time, list(calls)
    samples: dict[float, list[float]] = {name: [] for name in calls}

    def sample(call: Call, repeats: int) -> float:
        start = clock()
        for _ in range(repeats):
            call()
        return (clock() - start) / repeats

    for call in calls.values():
        sample(call, 2)  # warm up
    repeats = math.ceil(SAMPLE_S / max(min(sample(call, 1) for call in calls.values()), 1e-9))
    deadline = time.perf_counter() + budget_s
    while time.perf_counter() < deadline or len(samples[order[0]]) < MIN_BLOCKS:
        random.shuffle(order)
        for name in order:
            samples[name].append(sample(calls[name], repeats))
    return samples


def slowdown(slowed: Sequence[float], plain: Sequence[float]) -> tuple[float, float, float]:
    """Of undisturbed calls, with a 95 % bootstrap interval over blocks."""
    import numpy as np

    pairs = np.asarray([slowed, plain])
    picks = np.random.default_rng(0).integers(pairs.shape[1], size=(RESAMPLES, pairs.shape[1]))
    value = np.quantile(pairs, QUIET, axis=1)
    again = np.quantile(pairs[:, picks], QUIET, axis=2)
    lo, hi = np.quantile(again[0] / again[1], [0.025, 0.975])
    return float(value[0] / value[1]) - 1, float(lo) - 1, float(hi) - 1


def main() -> None:
    request = json.load(sys.stdin)
    sys.path[:] = [sys.argv[1], *request["path"]]
    import torch

    from bench.gate_study.orphans import die_with_parent

    die_with_parent()
    torch.set_num_threads(request["threads"])
    for fields in request["cases"]:
        found = calibrate(fields, request["shares"], suite_seed=request["suite_seed"], seconds=request["seconds"])
        print(json.dumps([asdict(injection) for injection in found]), flush=True)


if __name__ == "__main__":
    main()
