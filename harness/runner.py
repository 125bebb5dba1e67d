"""The loop: load, measure each case that is not yet finished, store it at once, derive the tables."""

import logging
import os
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from harness import environment, store
from harness.case import Case
from harness.environment import Others
from harness.errors import INTERRUPTED, TERMINATED, BadInput
from harness.kernels.sources import SourceFile, sources_of
from harness.record import RETRIED, Record
from harness.report import rebuild
from harness.suite.config import Suite, load_suite, threads_of
from harness.suite.schema import Limits
from harness.text import progress
from harness.workers import NAMES, Executor
from harness.workers.interrupts import Terminated
from harness.workers.job import Here, Job
from harness.workers.local import Local

if TYPE_CHECKING:
    import pandas as pd

RESULTS = Path("results")
BUSY_SHARE = 0.25  # of the machine's cores: kept busy by others, they make timings less sure than their intervals say

log = logging.getLogger(__name__)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, after all that was finished has been written; the message says how to go on."""

    def __init__(self, message: str, cause: KeyboardInterrupt) -> None:
        super().__init__(message)
        self.exit_code = TERMINATED if isinstance(cause, Terminated) else INTERRUPTED


def run(
    config: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    kernels: Sequence[str] = (),
    shard: tuple[int, int] | None = None,
    resume: bool = False,
    retry: bool = False,
    even_if_changed: bool = False,
    executor: str | Executor = "local",
    jobs: int = 1,
    quiet: bool = True,
    started: float | None = None,
    command: Sequence[str] | None = None,
) -> "pd.DataFrame":
    """Measure every case of a config and give the table; `frame.attrs` holds the run's folder, wall time and
    the share of it spent inside measured or compared calls.

    `out` is the folder to write (default: a new one under results/), `kernels` take the place of the config's own,
    `shard` (i, n) takes every n-th case from the i-th on. A case that fails is a row, never an exception.

    `resume` goes on with the run in `out` (default: results/latest): finished cases are skipped, with `retry` those
    that failed by an error, a timeout or for want of memory are repeated. Refused if the config, the code, a kernel or
    the environment is another by now, unless `even_if_changed`.

    `executor` says where cases are measured: "local" in `jobs` worker processes, "here" in this process, "ray" on a
    cluster, or an Executor. `started` is the time.time() from which the wall time counts; `command` is the command line
    to go on with, if there is one.
    """
    started = time.time() if started is None else started
    if (retry or even_if_changed) and not resume:
        raise BadInput("--retry and --even-if-changed are about a run that is gone on with: add --resume")
    suite = load_suite(config, kernels=kernels)
    cases = store.take_shard(suite.cases, shard)
    chosen = _executor(executor, jobs, suite)
    # Before the folder is made: a kernel that cannot be loaded is bad input, not a row.
    try:
        origins = chosen.origins(tuple(dict.fromkeys(case.kernel for case in suite.cases)))
    except KeyboardInterrupt as stop:
        raise Interrupted("interrupted before the first case; nothing was written", stop) from None
    for name, origin in origins.items():
        log.info("kernel %s from %s", name, origin)
    threads = threads_of(suite)
    sources = {name: sources_of(name) for name in origins}
    about = _about(suite, shard, origins, sources, threads, command)
    with _open(None if out is None else Path(out), about, resume=resume, even_if_changed=even_if_changed) as folder:
        if command is not None and out is not None:
            _follow(folder.path)
        store.write_sources(folder.path, chain.from_iterable(sources.values()))
        pending = left_to_do(cases, folder.finished, retry=retry)
        todo = [
            Job.of(case, suite, threads=threads, origin=origins[case.kernel])
            for case in cases
            if case.case_id in pending
        ]

        def go_on() -> str:
            hint = about.manifest.resume_command(folder.path, retry=retry)
            return f"after {len(cases) - len(pending)} of {len(cases)} cells; go on with: {hint}"

        others = Others()
        try:
            measure_all(todo, pending, folder, Console(stderr=True, quiet=quiet), chosen)
            if todo and suite.timing.enabled and executor in ("local", "here"):
                _tell_if_busy(*others.stop())
            # The time of earlier sessions is known case by case only.
            elapsed = None if folder.finished else time.time() - started
            frame = rebuild(folder.path, suite=suite.name, elapsed=elapsed)
        except KeyboardInterrupt as stop:
            rebuild(folder.path, suite=suite.name)
            raise Interrupted(f"interrupted {go_on()}", stop) from None
        except (BadInput, OSError) as error:  # a full disk, no worker to be had, a node that is unlike this machine
            raise store.StoreError(f"{error}\nstopped {go_on()}") from error
    frame.attrs["folder"] = str(folder.path)
    return frame


def left_to_do(cases: Sequence[Case], finished: Iterable[Record], *, retry: bool) -> dict[str, int]:
    """The cases that are still to be measured, and which attempt each will be."""
    pending = {case.case_id: 1 for case in cases}
    for before in finished:
        if retry and before.status in RETRIED:
            pending[before.case_id] = before.attempt + 1
        else:
            del pending[before.case_id]
    return pending


def measure_all(
    todo: Sequence[Job], pending: dict[str, int], folder: store.RunFolder, console: Console, executor: Executor
) -> None:
    """Appends a record for each job, and strikes it off `pending`, which holds the number of its attempt."""
    if folder.finished:
        log.info("%d cells are finished, %d are to do", len(folder.finished), len(todo))
    records = executor.run(todo)
    try:
        with progress(len(todo), console) as report:
            for done, record in enumerate(records, start=1):
                attempt = pending[record.case_id]  # each once: a second record would spoil the file
                folder.append(replace(record, attempt=attempt))
                del pending[record.case_id]
                report(done, record.case_id)
                log.info("%d/%d %s %s %s", done, len(todo), record.case_id, record.status, record.error or "")
    finally:
        if isinstance(records, Generator):
            records.close()  # stops what is under way
    if pending:
        raise store.StoreError(f"no record came back for {store.some(tuple(pending))}")


def _tell_if_busy(seconds: float, others: float) -> None:
    cores = os.cpu_count() or 1
    if others > BUSY_SHARE * cores:
        log.warning(
            "other programs kept %.1f of %d cores busy in these %.0f s: verdicts hold, speeds are less sure than their "
            "intervals say; see `harness doctor`", others, cores, seconds
        )  # fmt: skip


def _executor(executor: str | Executor, jobs: int, suite: Suite) -> Executor:
    if jobs < 1:
        raise BadInput(f"jobs = {jobs}: must be at least 1")
    if jobs > 1 and suite.timing.enabled:
        raise BadInput(
            f"jobs = {jobs}: timings need the machine to themselves; use one job, or `timing: {{enabled: false}}`"
        )
    return make_executor(executor, jobs, suite.limits) if isinstance(executor, str) else executor


def make_executor(name: str, jobs: int, limits: Limits) -> Executor:
    if jobs != 1 and name != "local":
        raise BadInput(f"jobs = {jobs}: only the local executor has several workers, and this is {name!r}")
    if name == "local":
        return Local(workers=jobs, limits=limits)
    if name == "here":
        return Here()
    if name == "ray":
        from harness.workers.ray import Ray

        return Ray(limits=limits)
    raise BadInput(f"unknown executor {name!r}; known: {', '.join(NAMES)}")


def _about(
    suite: Suite,
    shard: tuple[int, int] | None,
    origins: dict[str, str],
    sources: Mapping[str, Sequence[SourceFile]],
    threads: int,
    command: Sequence[str] | None,
) -> store.About:
    manifest = store.Manifest(
        suite=suite.name,
        config_sha256=store.sha256(suite.source),
        code=store.code_sha256(),
        seed=suite.seed,
        kernels=origins,
        shard=shard,
        case_ids=tuple(case.case_id for case in suite.cases),
        command=None if command is None else tuple(command),
        sources={name: tuple(each.place for each in files) for name, files in sources.items() if files},
        packages=environment.packages(),
    )
    return store.About(manifest, suite.source, environment.collect(threads))


def _follow(path: Path) -> None:
    """results/latest means the newest run of the command line in this folder, also of one that was given a place."""
    link = RESULTS / store.LATEST
    if RESULTS.is_dir() and path.resolve().is_relative_to(Path.cwd()) and (link.is_symlink() or not link.exists()):
        store.point(link, os.path.relpath(path.resolve(), RESULTS.resolve()))


def _open(out: Path | None, about: store.About, *, resume: bool, even_if_changed: bool) -> store.RunFolder:
    if resume and out is None:
        link = RESULTS / store.LATEST
        if not link.is_symlink():
            raise store.StoreError(f"there is no {link} to resume; name the run's folder with --out")
        if not link.exists():
            raise store.StoreError(
                f"{link} points to {link.readlink()}, which is gone; name the run's folder with --out"
            )
        return store.RunFolder.reopen(RESULTS / link.readlink(), about, even_if_changed=even_if_changed)
    # A folder without records has nothing to go on with: the run was killed before it began, or never started.
    if resume and out is not None and (out / store.RECORDS).exists():
        return store.RunFolder.reopen(out, about, even_if_changed=even_if_changed)
    return store.RunFolder.create(out, about.manifest.suite, RESULTS, about=about)
