"""The study: night after night into one folder. A killed study continues where it stopped; more can be added later."""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from bench.gate_study import night as nights
from bench.gate_study.calibrate import Injection
from bench.gate_study.neighbour import neighbours
from bench.gate_study.night import SHARES, CellResult, Night, NightResult
from bench.gate_study.tools import OURS, TOOLS, Task
from bench.gate_study.trees import SOURCE, Trees, make_trees
from harness import environment, store
from harness.case import Case
from harness.environment import Others
from harness.errors import BadInput
from harness.suite.config import Suite, load_suite

CALIBRATION, TREES = "calibration.json", "trees"
CONFIG = SOURCE / "configs" / "gate_study.yaml"
CALIBRATION_S = 6.0  # for a cell
TYPICAL = {OURS: 0.5}  # of the seconds that a cell may take, those that it takes: clear answers come early
NIGHT_STARTS_S = 8.0  # processes that import torch


@dataclass(frozen=True)
class Plan:
    config: Path = CONFIG
    tools: tuple[str, ...] = tuple(TOOLS)
    modes: tuple[str, ...] = nights.MODES
    same: int = 35
    slowed: int = 28
    rival_same: int = 4
    rival_slowed: int = 4
    seconds: float = 5.0
    rival_seconds: float = 5.0
    cells: int | None = None  # only the first so many
    calibration_s: float = CALIBRATION_S

    def asks_for(self, night: Night, tool: str) -> bool:
        most = {"same": (self.same, self.rival_same), "slowed": (self.slowed, self.rival_slowed)}[night.kind]
        return night.number < most[tool != OURS]


@dataclass(frozen=True)
class Work:
    """One tool's turn in one night."""

    night: Night
    tool: str


def left_to_do(plan: Plan, done: Sequence[NightResult]) -> list[Work]:
    """Tools in random order within a night."""
    seen = {(result.night, result.tool) for result in done}
    work = []
    for night in nights.planned(max(plan.same, plan.rival_same), max(plan.slowed, plan.rival_slowed), plan.modes):
        order = random.Random(night.seed).sample(list(TOOLS), len(TOOLS))
        work += [
            Work(night, t) for t in order if t in plan.tools and plan.asks_for(night, t) and (night, t) not in seen
        ]
    return work


def seconds_needed(plan: Plan, work: Sequence[Work], done: Sequence[NightResult], cells: int) -> float:
    """From the nights so far, or at a guess."""

    def one(tool: str, mode: str) -> float:
        own = [r.seconds for r in done if r.tool == tool and r.night.mode == mode] or [
            r.seconds for r in done if r.tool == tool
        ]
        budget = plan.seconds if tool == OURS else plan.rival_seconds
        return sum(own) / len(own) if own else NIGHT_STARTS_S + cells * budget * TYPICAL.get(tool, 1.0)

    return sum(one(each.tool, each.night.mode) for each in work)


def run(plan: Plan, folder: Path, *, console: Console) -> None:
    folder = folder.resolve()  # tools run elsewhere, by the paths of the trees in it
    folder.mkdir(parents=True, exist_ok=True)
    suite = load_suite(plan.config)
    if suite.threads != 1:
        # The extra work is counted out by the one thread's own clock.
        raise BadInput(f"{plan.config}: the study needs threads: 1, not {suite.threads}")
    _same_study(folder, suite)
    cases = suite.cases[: plan.cells]
    trees = make_trees(folder / TREES)
    injections = calibrated(folder, trees, suite, cases, plan.calibration_s, console)
    done = nights.read(folder)
    work = left_to_do(plan, done)
    needed = seconds_needed(plan, work, done, len(cases))
    console.print(f"{len(work)} turns of {len(cases)} cells left: about {needed / 60:.0f} minutes", highlight=False)
    for number, each in enumerate(work):
        result = one_night(each, plan, suite, cases, trees, injections)
        nights.append(folder, result)
        done.append(result)
        left = seconds_needed(plan, work[number + 1 :], done, len(cases))
        console.print(_line(result, number + 1, len(work), left), highlight=False, markup=False, soft_wrap=True)


def one_night(
    work: Work,
    plan: Plan,
    suite: Suite,
    cases: Sequence[Case],
    trees: Trees,
    injections: Mapping[str, Mapping[float, Injection]],
) -> NightResult:
    night = work.night
    shares = night.shares([case.case_id for case in cases])
    trees.slow_down({name: injections[name][share].rows for name, share in shares.items() if share})
    task = Task(
        base=trees.base,
        head=trees.same if night.kind == "same" else trees.slowed,
        cases=tuple(cases),
        suite_seed=suite.seed,
        threads=suite.threads or 1,
        seconds=plan.seconds if work.tool == OURS else plan.rival_seconds,
        seed=night.seed,
    )
    # A tool's neighbours have a rhythm of their own: no tool meets the very bursts that another met.
    seed = random.Random(f"{night.seed} {work.tool}").randrange(10**6)
    noise: AbstractContextManager[list[int]] = (
        neighbours(_cores(), seed) if night.mode == "noisy" else contextlib.nullcontext([])
    )
    began = datetime.now(UTC).isoformat(timespec="seconds")
    with noise as pids:
        watch = Others(pids)
        found = TOOLS[work.tool](task)
        seconds, others = watch.stop()
    if len(found) != len(cases):
        raise RuntimeError(f"{work.tool} judged {len(found)} of {len(cases)} cells")
    cells = tuple(
        CellResult(case.case_id, shares[case.case_id], decisions, details)
        for case, (decisions, details) in zip(cases, found, strict=True)
    )
    return NightResult(night, work.tool, began, seconds, others, cells)


def _cores() -> int:
    """Those that this study may use: with `taskset` two halves of a study run side by side."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def calibrated(
    folder: Path, trees: Trees, suite: Suite, cases: Sequence[Case], seconds: float, console: Console
) -> dict[str, dict[float, Injection]]:
    """Once per study and cell, kept in the folder: every night injects the same work."""
    known = read_calibration(folder)
    missing = [case for case in cases if case.case_id not in known]
    if not missing:
        return known
    console.print(f"calibrating the extra work of {len(missing)} cells: about {len(missing) * seconds * 1.2:.0f} s")
    threads = suite.threads or 1
    request = {
        "cases": [asdict(case) for case in missing],
        "shares": SHARES,
        "suite_seed": suite.seed,
        "seconds": seconds,
        "threads": threads,
        "path": [entry for entry in sys.path if entry],
    }
    command = [sys.executable, "-P", str(trees.base / "bench" / "gate_study" / "calibrate.py"), str(trees.base)]
    process = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True,
                             env=os.environ | {"OMP_NUM_THREADS": str(threads)})  # fmt: skip
    if process.returncode != 0:
        raise RuntimeError(f"the calibration ended with {process.returncode}: {process.stderr[-2000:]}")
    for case, line in zip(missing, process.stdout.splitlines(), strict=True):
        known[case.case_id] = {each["share"]: Injection(**each) for each in json.loads(line)}
    text = json.dumps({name: [asdict(each) for each in found.values()] for name, found in known.items()}, indent=1)
    store.write_atomically(folder / CALIBRATION, text.encode())
    return known


def read_calibration(folder: Path) -> dict[str, dict[float, Injection]]:
    path = folder / CALIBRATION
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: {each["share"]: Injection(**each) for each in listed} for name, listed in found.items()}


def _same_study(folder: Path, suite: Suite) -> None:
    """Nights on another machine or of another config are another study."""
    where = environment.collect(suite.threads or 1)
    config = folder / store.CONFIG
    if not config.exists():
        store.write_environment(folder, where)
        store.write_atomically(config, suite.source.encode())
        return
    if config.read_text(encoding="utf-8") != suite.source:
        raise BadInput(f"{folder} holds a study of another config: {config} differs from {suite.path}")
    before = store.read_environment(folder)
    told = ("cpu", "cores", "torch", "python", "threads")
    differing = {key: pair for key, pair in before.differences(where).items() if key in told}
    if differing:
        raise BadInput(f"{folder} was begun elsewhere: {differing}; give another --out")


def _line(result: NightResult, number: int, of: int, left_s: float) -> str:
    flagged: dict[str, list[int]] = {}
    for cell in result.cells:
        for decision in cell.decisions:
            counts = flagged.setdefault(decision.name, [0, 0])
            counts[cell.share > 0] += decision.flagged
    slowed = sum(cell.share > 0 for cell in result.cells)
    words = [f"{name}: {false} false" + (f", {true} of {slowed} slowed" if slowed else "")
             for name, (false, true) in flagged.items()]  # fmt: skip
    others = "" if result.others is None else f", others {result.others:.1f} cores"
    night = result.night
    return (
        f"{number}/{of}  {night.kind} {night.mode} {night.number}  {result.seconds:.0f} s"
        f" ({result.seconds / len(result.cells):.2f} a cell{others})  {'; '.join(words)}  left {left_s / 60:.0f} min"
    )
