"""A Job: one case and all that its result depends on. Whoever performs it, wherever, gets the same record."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.case import Case
from harness.cell import record_of
from harness.kernels.names import content_of
from harness.record import FAILING, Record
from harness.suite.schema import REGIMES, Accuracy, Timing

if TYPE_CHECKING:
    from harness.kernels.call import Kernel
    from harness.suite.config import Suite

WITHIN_LIMIT = 0.8  # of a case's time limit: what a battery may take, so that it ends by itself


@dataclass(frozen=True, slots=True)
class Job:
    case: Case
    seed: int
    regimes: tuple[str, ...]
    timing: Timing
    threads: int
    accuracy: Accuracy | None = None  # what approximate kernels are held to; None: judged as exact ones
    origin: str | None = None  # where the run's kernel came from; None: whatever is found
    minutes: float = 1.0  # of a battery
    retime: bool = False  # a case that is judged already: its speed alone
    rivals: tuple[Case, ...] = ()  # not a case to judge, but a contest that the case and these hold
    judge_len: int | None = None  # a longer case is judged at this length

    @classmethod
    def of(cls, case: Case, suite: "Suite", *, threads: int, origin: str | None = None) -> "Job":
        """A case as its suite asks for it. Here and not in the runner, so that the code's hash covers it."""
        regimes = suite.regimes or REGIMES
        minutes = min(suite.battery.minutes, WITHIN_LIMIT * suite.limits.timeout_s / 60)
        # In a contest all cells are timed together, and only there.
        timing = suite.timing if suite.contest is None else replace(suite.timing, enabled=False)
        return cls(
            case, suite.seed, regimes, timing, threads, suite.accuracy, origin, minutes, judge_len=suite.judge_len
        )


def perform(job: Job, allowed: int | None = None, begun: Callable[[], None] = lambda: None) -> Record:
    """In this process, but for a user's kernel, which has one of its own and may take `allowed` bytes.

    `begun` is told when that one is there: its start is no part of the case. Global state is put back afterwards.
    """
    import torch

    from harness.candidate.isolated import judged_kernel
    from harness.candidate.state import preserved

    started = time.perf_counter()
    kernel = judged_kernel(job.case.kernel, allowed=allowed)
    begun()
    if job.origin is not None and content_of(kernel.origin) != content_of(job.origin):
        file, _, found = kernel.origin.rpartition(" ")
        change = f"{file or job.case.kernel} changed during the run: {job.origin.rpartition(' ')[2]} -> {found}"
        remedy = "start a new run, or --resume --even-if-changed --retry"
        return failed(job, "error", f"{change}; {remedy}", time.perf_counter() - started)
    was_fresh = kernel.process is None or kernel.process.is_fresh
    with preserved():
        torch.set_num_threads(job.threads)
        if kernel.process is not None:
            kernel.process.begin(job.threads)
        record = _measured(job, kernel)
    if kernel.process is not None and kernel.process.is_dead and not was_fresh:
        # A crash may be the late damage of an earlier case: once more, in a process that has done nothing else.
        return perform(job, allowed, begun)
    if kernel.process is not None and record.status in FAILING and (patched := kernel.process.patched()):
        record = replace(record, error=f"{record.error}; the kernel's code replaces {', '.join(patched)}")
    return record


def _measured(job: Job, kernel: "Kernel") -> Record:
    if job.case.is_battery:
        from harness.diagnosis.row import ask_all

        return ask_all(job.case, kernel, seed=job.seed, minutes=job.minutes)
    if job.rivals:
        from harness.cell.contest import compete

        return compete((job.case, *job.rivals), seed=job.seed, timing=job.timing)
    from harness.cell.measure import measure, measure_by_smaller

    if job.judge_len is not None and job.case.seq_len > job.judge_len:
        return measure_by_smaller(
            job.case, kernel, seed=job.seed, regimes=job.regimes, judge_len=job.judge_len, accuracy=job.accuracy
        )
    return measure(job.case, kernel, seed=job.seed, regimes=job.regimes, timing=job.timing, accuracy=job.accuracy,
                   retime=job.retime)  # fmt: skip


def failed(job: Job, status: str, error: str, seconds: float) -> Record:
    """The record of a case that could not tell its own result: what is known without running it, and why."""
    return record_of(job.case, status=status, error=error, seconds=seconds)


def decode_job(data: dict[str, Any]) -> Job:
    """The job of which `asdict`, a part of a message, made this plain data."""
    parts = {"case": Case(**data["case"]), "regimes": tuple(data["regimes"]), "timing": Timing(**data["timing"])}
    parts["rivals"] = tuple(Case(**rival) for rival in data["rivals"])
    accuracy = None if data["accuracy"] is None else Accuracy(**data["accuracy"])
    return Job(**{**data, **parts, "accuracy": accuracy})


class Here:
    """The executor that works in this very process, for a debugger: a kernel that crashes ends the run."""

    def origins(self, kernels: Sequence[str]) -> dict[str, str]:
        from harness.candidate.isolated import judged_kernel

        return {name: judged_kernel(name).origin for name in kernels}

    def run(self, jobs: Sequence[Job]) -> Iterator[Record]:
        for job in jobs:
            yield perform(job)
