"""In this very process: for a debugger. A kernel that crashes ends the run."""

from collections.abc import Iterator, Sequence

from harness.job import Job, load_kernel, perform
from harness.record import Record


class Here:
    def origins(self, kernels: Sequence[str]) -> dict[str, str]:
        return {name: load_kernel(name).origin for name in kernels}

    def run(self, jobs: Sequence[Job]) -> Iterator[Record]:
        for job in jobs:
            yield perform(job)
