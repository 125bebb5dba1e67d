"""The loop: load, measure each case, store it at once, derive the tables."""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from harness import environment, store
from harness.case import Case
from harness.config import Suite, load_suite
from harness.document import REGIMES
from harness.errors import BadInput
from harness.executors import Executor
from harness.executors.here import Here
from harness.job import Job
from harness.report import rebuild
from harness.report.progress import progress

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)


def run(
    config: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    kernels: Sequence[str] = (),
    shard: tuple[int, int] | None = None,
    quiet: bool = True,
    started: float | None = None,
    executor: Executor | None = None,
) -> "pd.DataFrame":
    """Measure every case of a config and give the table; `frame.attrs` holds the run's folder, wall time and
    the share of it spent inside measured or compared calls.

    `out` is the folder to write (default: a new one under results/), `kernels` take the place of the config's own,
    `shard` (i, n) takes every n-th case from the i-th on. A case that fails is a row, never an exception. `started`
    is the time.time() from which the wall time counts; `executor` says where cases are measured.
    """
    started = time.time() if started is None else started
    suite = load_suite(config, kernels=kernels)
    cases = take_shard(suite.cases, shard)
    folder = measure_all(
        suite, cases, None if out is None else Path(out), Console(stderr=True, quiet=quiet), executor or Here()
    )
    frame = rebuild(folder, suite=suite.name, elapsed=time.time() - started)
    frame.attrs["folder"] = str(folder)
    return frame


def take_shard(cases: Sequence[Case], shard: tuple[int, int] | None) -> Sequence[Case]:
    if shard is None:
        return cases
    index, count = shard
    if not 1 <= index <= count:
        raise BadInput(f"shard {index}/{count}: must be 1/{count} to {count}/{count}")
    return cases[index - 1 :: count]


def measure_all(suite: Suite, cases: Sequence[Case], out: Path | None, console: Console, executor: Executor) -> Path:
    import torch

    from harness.kernels.front import find_kernel

    threads = suite.threads or torch.get_num_threads()  # all cores, or what OMP_NUM_THREADS says
    # Before the folder is made: a kernel that cannot be loaded is bad input, not a row.
    kernels = [find_kernel(name) for name in dict.fromkeys(case.kernel for case in cases)]
    folder = store.RunFolder.create(out, suite.name)
    store.write_config(folder.path, suite.source)
    store.write_environment(folder.path, environment.collect(threads))
    for kernel in kernels:
        log.info("kernel %s from %s", kernel.name, kernel.origin)
    regimes = suite.regimes or REGIMES
    jobs = [Job(case, suite.seed, regimes, suite.timing, threads) for case in cases]
    with progress(len(jobs), console) as report:
        for done, record in enumerate(executor.run(jobs), start=1):
            folder.append(record)
            report(done, record.case_id)
            log.info("%d/%d %s %s %s", done, len(jobs), record.case_id, record.status, record.error or "")
    return folder.path
