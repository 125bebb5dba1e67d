"""`harness sensitivity`: the cells of a config dealt out to worker processes, and a folder with what they found."""

import functools
import gc
import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from harness import environment, store
from harness.candidate.state import preserved
from harness.case import Case
from harness.errors import BadInput
from harness.mutants.result import CellResult, Study, cells_frame, findings_frame
from harness.mutants.saboteurs.saboteur import Saboteur, load_all
from harness.mutants.study import study_cell
from harness.registry import Registry
from harness.store import take_shard
from harness.suite.config import load_suite
from harness.suite.schema import REGIMES
from harness.text import progress, strict_json

KERNEL = "eager"  # the right candidate, which the saboteurs take the place of
RECORDS, TABLE, CELLS = "sensitivity.jsonl", "sensitivity.csv", "cells.csv"

# A function and not its result: workers are fresh processes, and find the saboteurs again by themselves.
FindSaboteurs = Callable[[], Registry[Saboteur]]

log = logging.getLogger(__name__)


def run(
    config: str | Path | Mapping[str, Any],
    out: Path | None = None,
    *,
    only: Sequence[str] = (),
    shard: tuple[int, int] | None = None,
    jobs: int = 2,
    console: Console | None = None,
    find_saboteurs: FindSaboteurs = load_all,
) -> tuple[Study, Path]:
    """The study and the folder it was written to; `only` names the saboteurs to try."""
    started = time.perf_counter()
    if jobs < 1:
        raise BadInput(f"jobs = {jobs}: must be at least 1")
    suite = load_suite(config, kernels=[KERNEL])
    known = find_saboteurs()
    names = tuple(dict.fromkeys(only)) or tuple(known)
    stands_for = {name: known[name].stands_for for name in names}
    cases = take_shard(suite.cases, shard)
    folder = store.new_folder(Path("results"), "sensitivity") if out is None else Path(out)
    store.claim(folder, RECORDS)
    store.write_config(folder, suite.source)
    store.write_environment(folder, environment.collect(1))
    work = functools.partial(
        _work, names=names, seed=suite.seed, regimes=suite.regimes or REGIMES, find_saboteurs=find_saboteurs
    )
    found: dict[str, CellResult] = {}
    with progress(len(cases), console or Console(stderr=True, quiet=True)) as report:
        for cell in _in_processes(work, cases, jobs) if jobs > 1 else map(work, cases):
            found[cell.case.case_id] = cell
            _append(folder / RECORDS, cell)
            report(len(found), cell.case.case_id)
            log.info("%d/%d %s %.1f s %s", len(found), len(cases), cell.case.case_id, cell.seconds, cell.problem or "")
    cells = tuple(found[case.case_id] for case in cases)
    study = Study(suite.name, cells, stands_for, time.perf_counter() - started)
    for name, frame in ((TABLE, findings_frame(cells)), (CELLS, cells_frame(cells))):
        store.write_atomically(folder / name, store.csv_text(frame).encode())
    return study, folder


def _work(
    case: Case, *, names: Sequence[str], seed: int, regimes: Sequence[str], find_saboteurs: FindSaboteurs
) -> CellResult:
    known = find_saboteurs()
    with preserved():
        torch.set_num_threads(1)
        return study_cell(case, [known[name] for name in names], seed=seed, regimes=regimes)


def _settle_in() -> None:
    """All that was imported stays: the collector need not look through it again for each of thousands of modules."""
    gc.collect()
    gc.freeze()


def _in_processes(work: Callable[[Case], CellResult], cases: Sequence[Case], jobs: int) -> Iterator[CellResult]:
    """In the order they are finished. The dearest are dealt out first, so that no worker is left alone with one."""
    dearest_first = sorted(cases, key=lambda case: case.batch * case.seq_len * case.seq_len, reverse=True)
    spawn = multiprocessing.get_context("spawn")
    with _one_thread_each(), ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_settle_in) as pool:
        futures = [pool.submit(work, case) for case in dearest_first]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Read by a worker's torch when it is loaded: pools of threads that are never used still spin."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _append(path: Path, cell: CellResult) -> None:
    """After each cell, so that an interrupted study leaves what it found."""
    with path.open("a", encoding="utf-8") as file:
        row = asdict(cell) | {"case_id": cell.case.case_id}
        file.write(json.dumps(strict_json(row), ensure_ascii=False, allow_nan=False) + "\n")
