"""Where jobs are done: `here` (this process), worker processes, or a cluster. All give the same records."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from harness.job import Job
from harness.record import Record


class Executor(Protocol):
    def run(self, jobs: Sequence[Job]) -> Iterator[Record]:
        """Every job once, in the order they are finished. Closing the iterator stops what is under way."""
        ...
