"""Where jobs are done: `here` (this process), worker processes, or a cluster. All give the same records."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from harness.record import Record
    from harness.workers.job import Job

NAMES = ("local", "here", "ray")


class Executor(Protocol):
    def origins(self, kernels: Sequence[str]) -> dict[str, str]:
        """Loads each kernel where it would run, and says where it came from. BadInput if one cannot be loaded."""
        ...

    def run(self, jobs: Sequence["Job"]) -> Iterator["Record"]:
        """Every job once, in the order they are finished. Closing the iterator stops what is under way."""
        ...
