"""Where jobs are done: `here` (this process), worker processes, or a cluster. All give the same records."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from harness.errors import BadInput

if TYPE_CHECKING:
    from harness.record import Record
    from harness.suite.schema import Limits
    from harness.workers.job import Job

NAMES = ("local", "here", "ray")


class Executor(Protocol):
    def origins(self, kernels: Sequence[str]) -> dict[str, str]:
        """Loads each kernel where it would run, and says where it came from. BadInput if one cannot be loaded."""
        ...

    def run(self, jobs: Sequence["Job"]) -> Iterator["Record"]:
        """Every job once, in the order they are finished. Closing the iterator stops what is under way."""
        ...


def make_executor(name: str, jobs: int, limits: "Limits") -> Executor:
    if jobs != 1 and name != "local":
        raise BadInput(f"jobs = {jobs}: only the local executor has several workers, and this is {name!r}")
    if name == "local":
        from harness.workers.local import Local

        return Local(workers=jobs, limits=limits)
    if name == "ray":
        from harness.workers.ray import Ray

        return Ray(limits=limits)
    if name == "here":
        from harness.workers.job import Here

        return Here()
    raise BadInput(f"unknown executor {name!r}; known: {', '.join(NAMES)}")
