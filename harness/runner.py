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
) -> "pd.DataFrame":
    """Measure every case of a config and give the table; `frame.attrs` holds the run's folder, wall time and
    the share of it spent inside measured or compared calls.

    `out` is the folder to write (default: a new one under results/), `kernels` take the place of the config's own,
    `shard` (i, n) takes every n-th case from the i-th on. A case that fails is a row, never an exception. `started`
    is the time.time() from which the wall time counts.
    """
    started = time.time() if started is None else started
    suite = load_suite(config, kernels=kernels)
    cases = take_shard(suite.cases, shard)
    folder = measure_all(suite, cases, None if out is None else Path(out), Console(stderr=True, quiet=quiet))
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


def measure_all(suite: Suite, cases: Sequence[Case], out: Path | None, console: Console) -> Path:
    import torch

    from harness.kernels.front import find_kernel
    from harness.measure import measure
    from harness.state import preserved

    kernels = {name: find_kernel(name) for name in dict.fromkeys(case.kernel for case in cases)}
    threads = suite.threads or torch.get_num_threads()  # all cores, or what OMP_NUM_THREADS says
    folder = store.RunFolder.create(out, suite.name)
    store.write_config(folder.path, suite.source)
    store.write_environment(folder.path, environment.collect(threads))
    for kernel in kernels.values():
        log.info("kernel %s from %s", kernel.name, kernel.origin)
    with progress(len(cases), console) as report:
        for done, case in enumerate(cases):
            report(done, case.case_id)
            with preserved():
                torch.set_num_threads(threads)
                record = measure(
                    case,
                    kernels[case.kernel],
                    seed=suite.seed,
                    regimes=suite.regimes or REGIMES,
                    timing=suite.timing,
                )
            folder.append(record)
            log.info("%d/%d %s %s %s", done + 1, len(cases), record.case_id, record.status, record.error or "")
    return folder.path
