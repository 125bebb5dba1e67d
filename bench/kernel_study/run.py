"""The study: plan, measure point by point into a folder of its own, judge, write. What is done survives a Ctrl-C."""

import csv
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console

from bench.kernel_study import pictures, report, roofline
from bench.kernel_study.cell import Point
from bench.kernel_study.cores import decode_points, prefill_points
from bench.kernel_study.exponents import exponents
from bench.kernel_study.latent import latent_points
from bench.kernel_study.measure import Patience, measure, not_run
from bench.kernel_study.multihead import multihead_points
from bench.kernel_study.result import COLUMNS, Result, frame_of
from bench.kernel_study.steps import step_points
from bench.kernel_study.targets import Verdict, judge, targets_frame
from harness import environment, store
from harness.candidate.state import preserved
from harness.errors import BadInput
from harness.text import progress

TABLE, TARGETS, EXPONENTS, MARKDOWN = "kernels.csv", "targets.csv", "exponents.csv", "kernels.md"
ROOFLINE = "roofline.json"
STUDIES = {"prefill": ("prefill",), "decode": ("decode", "step"), "mla": ("mla",), "mha": ("mha",)}
CALLS = 11  # of each side at a slow point: guard, memory, warm-up and blocks
SLOWDOWN = 3  # what the dearest side loses against the roofline, at a guess


@dataclass(frozen=True)
class Plan:
    only: tuple[str, ...] = tuple(STUDIES)
    quick: bool = False
    all_kernels: bool = False
    minutes: float = 10.0  # 0: no limit. Targets' cells are measured first and in any case
    memory_cap: int = 4 * 2**30
    point_s: float = 20.0  # a cell that would take longer is left out, unless a target needs it
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True)
class Study:
    frame: pd.DataFrame
    growth: pd.DataFrame
    verdicts: list[Verdict]
    roofline: roofline.Roofline
    seconds: float
    interrupted: bool


def run(plan: Plan, out: Path | None = None, *, console: Console | None = None) -> tuple[Study, Path]:
    points = planned(plan)
    return run_points(points, plan, out, console=console, measure_roofline=roofline.measure)


def planned(plan: Plan) -> list[Point]:
    """Targets' cells first; then from cheap to dear, so that as little as can be is left when the time is used up."""
    if unknown := sorted(set(plan.only) - set(STUDIES)):
        raise BadInput(f"unknown study {', '.join(unknown)}; known: {', '.join(STUDIES)}")
    cores: dict[str, Any] = {"quick": plan.quick, "memory_cap": plan.memory_cap, "all_kernels": plan.all_kernels}
    makers: dict[str, Callable[[], Iterator[Point]]] = {
        "prefill": lambda: prefill_points(**cores),
        "decode": lambda: _both(decode_points(**cores), step_points()),
        "mla": lambda: latent_points(quick=plan.quick),
        "mha": lambda: multihead_points(quick=plan.quick),
    }
    points = [point for study in STUDIES if study in plan.only for point in makers[study]()]
    return sorted(points, key=lambda p: (not p.cell.required, 0 if p.cell.required else p.work(p.cell).flops))


def run_points(
    points: Sequence[Point],
    plan: Plan,
    out: Path | None,
    *,
    console: Console | None,
    measure_roofline: Callable[[], roofline.Roofline],
) -> tuple[Study, Path]:
    started = time.perf_counter()
    folder = store.new_folder(Path("results"), "kernels") if out is None else Path(out)
    store.claim(folder, TABLE)
    where = environment.collect(plan.threads)
    store.write_environment(folder, where)
    results: list[Result] = []
    interrupted = False
    with preserved(), _settings(plan.threads), progress(len(points), console or Console(quiet=True)) as tell:
        peak = measure_roofline()
        store.write_atomically(folder / ROOFLINE, (json.dumps(asdict(peak), indent=2) + "\n").encode())
        for number, point in enumerate(points):
            tell(number, point.cell.label)
            try:
                reason = "interrupted" if interrupted else _left_out(point, plan, peak, started)
                found = not_run(point, reason) if reason else measure(point, plan.patience)
            except KeyboardInterrupt:
                interrupted = True
                found = not_run(point, "interrupted")
            results += found
            _append(folder / TABLE, found, peak)
    frame, growth = frame_of(results, peak), exponents(results)
    studies = tuple(name for study in plan.only for name in STUDIES[study])
    verdicts = judge(frame, growth, studies)
    study = Study(frame, growth, verdicts, peak, time.perf_counter() - started, interrupted)
    _write(study, folder, where)
    return study, folder


def _both(first: Iterator[Point], second: Iterator[Point]) -> Iterator[Point]:
    yield from first
    yield from second


def _left_out(point: Point, plan: Plan, peak: roofline.Roofline, started: float) -> str | None:
    """Why not, or None: nothing is left out in silence."""
    if point.cell.required:
        return None
    if plan.minutes and time.perf_counter() - started > plan.minutes * 60:
        return f"the {plan.minutes:g} minutes were used up; --minutes gives more"
    work = point.work(point.cell)
    once = peak.seconds(work.flops, work.bytes, point.cell.dtype)
    needed = once * SLOWDOWN * CALLS * len(point.side_names)
    if needed > plan.point_s:
        return f"would take about {needed:.0f} s; --point-seconds allows {plan.point_s:g}"
    return None


@contextmanager
def _settings(threads: int) -> Iterator[None]:
    torch.set_num_threads(threads)
    with torch.no_grad():
        yield


def _append(path: Path, results: Sequence[Result], peak: roofline.Roofline) -> None:
    """After each point, so that an interrupted study leaves what it found."""
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(result.row(peak) for result in results)


def _write(study: Study, folder: Path, where: environment.Environment) -> None:
    for name, frame in ((TARGETS, targets_frame(study.verdicts)), (EXPONENTS, study.growth)):
        store.write_atomically(folder / name, frame.to_csv(index=False, lineterminator="\n").encode())
    drawn = pictures.save_all(study.frame, folder)
    text = report.kernels_markdown(study, where, pictures=drawn)
    store.write_atomically(folder / MARKDOWN, text.encode())
