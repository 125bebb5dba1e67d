"""A Job: one case and all that its result depends on. Whoever performs it, wherever, gets the same record."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.case import Case
from harness.document import Timing

if TYPE_CHECKING:
    from harness.record import Record


@dataclass(frozen=True, slots=True)
class Job:
    case: Case
    seed: int
    regimes: tuple[str, ...]
    timing: Timing
    threads: int


def perform(job: Job) -> "Record":
    """In this process; global torch state is put back afterwards."""
    import torch

    from harness.kernels.front import find_kernel
    from harness.measure import measure
    from harness.state import preserved

    kernel = find_kernel(job.case.kernel)
    with preserved():
        torch.set_num_threads(job.threads)
        return measure(job.case, kernel, seed=job.seed, regimes=job.regimes, timing=job.timing)
