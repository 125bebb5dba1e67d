"""The loop: load, measure each case that is not yet finished, store it at once, derive the tables."""

import logging
import math
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from harness import environment, store
from harness.case import Case
from harness.cell import contested
from harness.environment import Others
from harness.errors import INTERRUPTED, TERMINATED, BadInput
from harness.kernels.sources import SourceFile, sources_of
from harness.record import EQUAL_STATUSES, RETRIED, Record, retimed
from harness.report import rebuild
from harness.suite.config import Suite, load_suite, threads_of
from harness.suite.contest import contests
from harness.suite.schema import Limits
from harness.text import progress
from harness.workers import NAMES, Executor
from harness.workers.interrupts import Terminated
from harness.workers.job import Here, Job
from harness.workers.local import Local

if TYPE_CHECKING:
    import pandas as pd

RESULTS = Path("results")
AGAIN = 0.25  # of a run's time: at most as long cells that were disturbed are timed again
BUSY_SHARE = 0.25  # of the machine's cores: kept busy by others, they disturb timings

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
    retime: bool = False,
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
    that failed by an error, a timeout or for want of memory are repeated, with `retime` those that others disturbed
    while they were timed are timed anew. Refused if the config, the code, a kernel or
    the environment is another by now, unless `even_if_changed`.

    `executor` says where cases are measured: "local" in `jobs` worker processes, "here" in this process, "ray" on a
    cluster, or an Executor. `started` is the time.time() from which the wall time counts; `command` is the command line
    to go on with, if there is one.
    """
    started = time.time() if started is None else started
    if (retry or retime or even_if_changed) and not resume:
        raise BadInput("--retry, --retime and --even-if-changed are about a run that is gone on with: add --resume")
    suite = load_suite(config, kernels=kernels)
    if shard is not None and suite.contest is not None:
        raise BadInput("--shard parts cells that a contest times together: run a config with `contest` whole")
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

        def job_of(case: Case) -> Job:
            return Job.of(case, suite, threads=threads, origin=origins[case.kernel])

        todo = [job_of(case) for case in cases if case.case_id in pending]

        def go_on() -> str:
            hint = about.manifest.resume_command(folder.path, retry=retry)
            return f"after {len(cases) - len(pending)} of {len(cases)} cells; go on with: {hint}"

        others = Others()
        try:
            console, begun = Console(stderr=True, quiet=quiet), time.monotonic()
            records = measure_all(todo, pending, folder, console, chosen)
            seconds = math.inf if retime else AGAIN * (time.monotonic() - begun)  # that timing again may take
            if suite.contest is not None:
                known = {record.case_id: record for record in (*folder.finished, *records)}
                groups = [(job_of(base), rivals) for base, *rivals in contests(cases, suite.contest)]
                timed = [replace(job, rivals=tuple(rivals), timing=suite.timing) for job, rivals in groups]
                hold(timed, known, folder, console, chosen, timings=["none"], seconds=math.inf)
                hold(timed, known, folder, console, chosen, timings=["disturbed"], seconds=seconds)
            else:
                records += folder.finished if retime else ()
                disturbed = {record.case_id: record for record in records if record.timing == "disturbed"}
                again = [replace(job_of(case), retime=True) for case in cases if case.case_id in disturbed]
                time_again(again, disturbed, folder, console, chosen, seconds=seconds)
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
) -> list[Record]:
    """Appends a record for each job, and strikes it off `pending`, which holds the number of its attempt."""
    if folder.finished:
        log.info("%d cells are finished, %d are to do", len(folder.finished), len(todo))
    records, measured = executor.run(todo), list[Record]()
    try:
        with progress(len(todo), console) as report:
            for done, record in enumerate(records, start=1):
                attempt = pending[record.case_id]  # each once: a second record would spoil the file
                measured.append(replace(record, attempt=attempt))
                folder.append(measured[-1])
                del pending[record.case_id]
                report(done, record.case_id)
                log.info("%d/%d %s %s %s", done, len(todo), record.case_id, record.status, record.error or "")
    finally:
        if isinstance(records, Generator):
            records.close()  # stops what is under way
    if pending:
        raise store.StoreError(f"no record came back for {store.some(tuple(pending))}")
    return measured


def time_again(
    todo: Sequence[Job],
    disturbed: Mapping[str, Record],
    folder: store.RunFolder,
    console: Console,
    executor: Executor,
    *,
    seconds: float,
) -> None:
    """Cells that were disturbed, later in the run and for at most so many seconds; what is disturbed again stays so."""
    for again in _records(todo, console, executor, seconds=seconds):
        folder.append(retimed(disturbed[again.case_id], again))


def hold(
    todo: Sequence[Job],
    known: dict[str, Record],
    folder: store.RunFolder,
    console: Console,
    executor: Executor,
    *,
    timings: Sequence[str],
    seconds: float,
) -> None:
    """Contests of cells that are equal, where a cell's timing is one of these; for at most so many seconds."""
    jobs = {}
    for job in todo:
        rivals = [rival for rival in job.rivals if known[rival.case_id].status in EQUAL_STATUSES]
        records = [known[case.case_id] for case in (job.case, *rivals)]
        if rivals and records[0].status in EQUAL_STATUSES and any(record.timing in timings for record in records):
            jobs[job.case.case_id] = replace(job, rivals=tuple(rivals))
    for found in _records(list(jobs.values()), console, executor, seconds=seconds):
        if found.status not in EQUAL_STATUSES:
            log.warning("the contest of %s could not be held: %s", found.case_id, found.error)
            continue
        job = jobs[found.case_id]
        before = {case.case_id: known[case.case_id] for case in (job.case, *job.rivals)}
        for record in contested(before, found, seed=job.seed):
            folder.append(record)
            known[record.case_id] = record


def _records(todo: Sequence[Job], console: Console, executor: Executor, *, seconds: float) -> Iterator[Record]:
    """One after another, until they are done or the time is up."""
    if not todo:
        return
    deadline, records = time.monotonic() + seconds, executor.run(todo)
    try:
        with progress(len(todo), console) as report:
            for done, record in enumerate(records, start=1):
                yield record
                report(done, record.case_id)
                log.info("%d/%d %s timed", done, len(todo), record.case_id)
                if time.monotonic() > deadline:
                    break
    finally:
        if isinstance(records, Generator):
            records.close()


def _tell_if_busy(seconds: float, others: float) -> None:
    cores = os.cpu_count() or 1
    if others > BUSY_SHARE * cores:
        log.warning(
            "other programs kept %.1f of %d cores busy in these %.0f s: verdicts hold, and speeds that this disturbed "
            "are marked; see `harness doctor`", others, cores, seconds
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
