"""Does the timer know when it was disturbed? A/A cells: both sides are the same code, so that the true ratio is 1.

    python -m bench.timing_study quiet          on a machine that does nothing else (at most 8 minutes)
    python -m bench.timing_study busy           starts two busy processes of its own

Each trial builds a cell twice and times the two builds by the timer as it is and, beside it, by the one that was
before: all threads, all samples, the median of the ratios within blocks. Writes its state's table into docs/timing.md.
"""

import argparse
import contextlib
import copy
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as `harness run` does

import numpy as np
import torch

from harness.case import Case
from harness.cell.build import build_pair
from harness.cell.measure import timed_call
from harness.cell.timing import Samples, free_threads, interleave, paired_ratio
from harness.environment import Others, collect
from harness.kernels.front import find_kernel
from harness.suite.schema import Timing
from harness.text import plural

PAGE = Path(__file__).parents[1] / "docs" / "timing.md"
NEIGHBOURS = 2
TRIALS = 300
TIMING = Timing(budget_s=0.4)
FAR = 0.1  # no ratio that is not marked may be farther from 1
# Calls of 0.1 to 10 ms.
SIZES = (("mha", 64, 64), ("gqa", 256, 128), ("mla", 128, 128), ("mqa", 512, 256), ("mha", 512, 512))
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Found:
    """An A/A ratio, in logs."""

    off: float
    covers: bool
    disturbed: bool


@dataclass(frozen=True)
class Trial:
    now: Found
    before: Found
    others: float


def cells() -> list[Case]:
    return [
        Case(
            variant=variant,
            kernel="eager",
            embed_dim=E,
            heads=8,
            kv_heads={"mha": 8, "gqa": 2, "mqa": 1}.get(variant),
            head_dim=E // 8,
            seq_len=S,
            batch=1,
            mask="causal",
            dtype="float32",
            phase=phase,
            kv_lora_rank=E // 2 if variant == "mla" else None,
            rope_head_dim=E // 16 if variant == "mla" else None,
            v_head_dim=E // 8 if variant == "mla" else None,
        )
        for variant, E, S in SIZES
        for phase in PHASES
    ]


def trial(case: Case, threads: int, others: Others, *, seed: int) -> Trial:
    pair = build_pair(case, find_kernel(case.kernel), seed)
    pair.watch.checking = False
    twin = copy.deepcopy(pair.candidate)
    calls = {"a": timed_call(pair, pair.candidate, seed), "b": timed_call(pair, twin, seed)}
    before = median_ratio(sample(calls, seed=seed), seed=seed)
    busy = others.stop()[1]
    torch.set_num_threads(free_threads(threads, busy))
    try:
        samples = sample(calls, seed=seed)
    finally:
        torch.set_num_threads(threads)
    ratio = paired_ratio(samples["a"], samples["b"], seed=seed)
    return Trial(Found(float(np.log(ratio.value)), ratio.lo <= 1 <= ratio.hi, ratio.disturbed), before, busy)


def sample(calls: dict[str, Callable[[], object]], *, seed: int) -> dict[str, Samples]:
    return interleave(
        calls,
        budget_s=TIMING.budget_s,
        min_blocks=TIMING.min_blocks,
        max_blocks=TIMING.max_blocks,
        seed=seed,
    )


def median_ratio(samples: dict[str, Samples], *, seed: int) -> Found:
    """By the timer that was: the median of the log ratios within blocks, with a bootstrap's interval."""
    logs = np.log(np.asarray(samples["a"].seconds) / np.asarray(samples["b"].seconds))
    picks = np.random.default_rng(seed).integers(len(logs), size=(1000, len(logs)))
    lo, hi = np.quantile(np.median(logs[picks], axis=1), [0.025, 0.975])
    return Found(float(np.median(logs)), bool(lo <= 0 <= hi), disturbed=False)


def study(*, trials: int, minutes: float, threads: int) -> list[Trial]:
    torch.set_num_threads(threads)
    order, found, deadline = cells(), list[Trial](), time.monotonic() + 60 * minutes
    chance = random.Random(0)
    with torch.no_grad():
        for number in range(trials):
            if time.monotonic() > deadline:
                break
            if number % len(order) == 0:
                chance.shuffle(order)
            found.append(trial(order[number % len(order)], threads, Others(), seed=number))
    return found


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that never rest."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def table(trials: Sequence[Trial]) -> list[str]:
    lines = [
        "| timer | cells | marked disturbed | of the rest: interval holds 1 | off by over 10 % | 95 % are within |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for name, found in (("as it is", [t.now for t in trials]), ("before", [t.before for t in trials])):
        sure = [each for each in found if not each.disturbed]
        off = np.abs([each.off for each in sure])
        holds = f"{sum(each.covers for each in sure) / len(sure):.1%}" if sure else "-"
        within = f"±{np.expm1(np.quantile(off, 0.95)):.1%}" if sure else "-"
        marked = f"{1 - len(sure) / len(found):.0%}"
        far = int((off > np.log1p(FAR)).sum())
        lines.append(f"| {name} | {len(found)} | {marked} | {holds} | {far} | {within} |")
    return lines


def reached(trials: Sequence[Trial]) -> bool:
    sure = [each.now for each in trials if not each.now.disturbed]
    return (
        bool(sure)
        and sum(each.covers for each in sure) >= 0.9 * len(sure)
        and all(abs(each.off) <= np.log1p(FAR) for each in sure)
    )


def write(state: str, text: str, page: Path) -> None:
    """Into this state's place on the page."""
    begin, end = f"<!-- {state}: from `python -m bench.timing_study {state}` -->\n", f"<!-- /{state} -->"
    head, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(head + begin + text + end + rest.split(end, 1)[1], encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", choices=("quiet", "busy"))
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--minutes", type=float, default=8.0, help="at most")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    started = time.monotonic()
    with neighbours(NEIGHBOURS if options.state == "busy" else 0):
        trials = study(trials=options.trials, minutes=options.minutes, threads=options.threads)
    others = float(np.median([each.others for each in trials]))
    machine = collect(options.threads)
    about = (
        f"{plural(len(trials), 'cell', 'cells')}, {machine.cores} cores ({machine.cpu}), torch {machine.torch}; others "
        f"kept {others:.1f} cores busy; {(time.monotonic() - started) / 60:.1f} minutes."
    )
    text = "\n".join([*table(trials), "", about, ""])
    print(text)
    write(options.state, text, options.page)
    print("REACHED" if reached(trials) else "NOT REACHED")
    return 0 if reached(trials) else 1


if __name__ == "__main__":
    sys.exit(main())
