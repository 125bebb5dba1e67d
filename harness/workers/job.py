"""A Job: one case and all that its result depends on. Whoever performs it, wherever, gets the same record."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.case import Case
from harness.cell import record_of
from harness.kernels.names import content_of, is_plugin
from harness.record import Record
from harness.suite.schema import REGIMES, Accuracy, Timing

if TYPE_CHECKING:
    from harness.kernels.call import Kernel
    from harness.suite.config import Suite


@dataclass(frozen=True, slots=True)
class Job:
    case: Case
    seed: int
    regimes: tuple[str, ...]
    timing: Timing
    threads: int
    accuracy: Accuracy | None = None  # what approximate kernels are held to; None: judged as exact ones
    origin: str | None = None  # where the run's kernel came from; None: whatever is found

    @classmethod
    def of(cls, case: Case, suite: "Suite", *, threads: int, origin: str | None = None) -> "Job":
        """A case as its suite asks for it. Here and not in the runner, so that the code's hash covers it."""
        regimes = suite.regimes or REGIMES
        return cls(case, suite.seed, regimes, suite.timing, threads, suite.accuracy, origin)


def perform(job: Job) -> Record:
    """In this process; global state is put back afterwards."""
    import torch

    from harness.cell.measure import measure
    from harness.cell.state import preserved

    started = time.perf_counter()
    kernel = load_kernel(job.case.kernel)
    if job.origin is not None and content_of(kernel.origin) != content_of(job.origin):
        file, _, found = kernel.origin.rpartition(" ")
        change = f"{file or job.case.kernel} changed during the run: {job.origin.rpartition(' ')[2]} -> {found}"
        remedy = "start a new run, or --resume --even-if-changed --retry"
        return failed(job, "error", f"{change}; {remedy}", time.perf_counter() - started)
    with preserved():
        torch.set_num_threads(job.threads)
        return measure(job.case, kernel, seed=job.seed, regimes=job.regimes, timing=job.timing, accuracy=job.accuracy)


def load_kernel(name: str) -> "Kernel":
    """What importing a user's file changes globally is put back too: only its first case would see it."""
    from harness.cell.state import IMPORTS, preserved
    from harness.kernels.front import find_kernel

    if not is_plugin(name):
        return find_kernel(name)
    with preserved(keep=IMPORTS):
        return find_kernel(name)


def failed(job: Job, status: str, error: str, seconds: float) -> Record:
    """The record of a case that could not tell its own result: what is known without running it, and why."""
    return record_of(job.case, status=status, error=error, seconds=seconds)


def decode_job(data: dict[str, Any]) -> Job:
    """The job of which `asdict`, a part of a message, made this plain data."""
    parts = {"case": Case(**data["case"]), "regimes": tuple(data["regimes"]), "timing": Timing(**data["timing"])}
    accuracy = None if data["accuracy"] is None else Accuracy(**data["accuracy"])
    return Job(**{**data, **parts, "accuracy": accuracy})


class Here:
    """The executor that works in this very process, for a debugger: a kernel that crashes ends the run."""

    def origins(self, kernels: Sequence[str]) -> dict[str, str]:
        return {name: load_kernel(name).origin for name in kernels}

    def run(self, jobs: Sequence[Job]) -> Iterator[Record]:
        for job in jobs:
            yield perform(job)
