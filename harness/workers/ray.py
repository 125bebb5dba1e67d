"""On a Ray cluster: equivalence cells over all its cores, timed cells one at a time per node, lost nodes made good.

Ray places the work; what happens to one case (crash, hang, memory) is left to the same worker process as on one
machine. So a failure that Ray itself reports is the loss of a node or of Ray's own process: the case is tried again.
"""

import contextlib
import functools
import logging
import os
import platform
import re
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, TypeVar

from harness.errors import BadInput
from harness.record import Record
from harness.suite.schema import Limits
from harness.text import first_line
from harness.workers.job import Job, failed
from harness.workers.local import Local
from harness.workers.node_check import Home, describe_home, settle

log = logging.getLogger(__name__)

TIMING = "harness_timing"  # the resource of nodes that may time: ray start --resources '{"harness_timing": 1}'
QUEUED_PER_PLACE = 4  # keeps a node busy; a large grid all at once would fill the object store
LOOK_AROUND_S = 2.0  # how often the cluster's nodes are counted again
# A lost job rests 2, 4, 8, 16 s: Ray goes on giving work to a dead node until it has noticed, after some 15 s.
FIRST_REST_S = 2.0

T = TypeVar("T")
Perform = Callable[[Job], Record]


@dataclass(frozen=True)
class ClusterNode:
    id: str
    cpus: int
    timing: int = 0  # how many timed jobs its owner allows at a time


@dataclass(frozen=True)
class NodeShare:
    """What one job asks of a node."""

    cpus: int
    timing: int = 0

    def places(self, node: ClusterNode) -> int:
        by_cpus = node.cpus // self.cpus
        return min(by_cpus, node.timing // self.timing) if self.timing else by_cpus

    def options(self) -> dict[str, Any]:
        return {"num_cpus": self.cpus, "resources": {TIMING: self.timing} if self.timing else {}}


@dataclass(frozen=True)
class Attempt:
    job: Job
    number: int
    demand: NodeShare
    given: float  # when


@dataclass
class Queue:
    """Jobs that no node has yet: those to be given out next, and those that rest after a loss."""

    waiting: deque[tuple[Job, int]]  # with the number of the attempt
    resting: list[tuple[float, Job, int]] = field(default_factory=list)  # with the time to wake it

    def __len__(self) -> int:
        return len(self.waiting) + len(self.resting)

    def again(self, attempt: Attempt) -> None:
        wake = time.monotonic() + FIRST_REST_S * 2 ** (attempt.number - 1)
        self.resting.append((wake, attempt.job, attempt.number + 1))

    def wake(self) -> None:
        now = time.monotonic()
        self.waiting.extendleft((job, number) for wake, job, number in self.resting if wake <= now)
        self.resting = [rest for rest in self.resting if rest[0] > now]


def demand(job: Job, nodes: Sequence[ClusterNode]) -> NodeShare:
    """A timed job has its node to itself; any other takes as many cores as it has threads."""
    biggest = max(node.cpus for node in nodes)
    if not job.timing.enabled:
        return NodeShare(min(job.threads, biggest))
    declared = [node.cpus for node in nodes if node.timing]
    # Declared nodes of unlike size are all meant to be used. Where none is declared, only the biggest nodes have that
    # many cores: better fewer timings at once than timings beside another job.
    return NodeShare(min(declared), timing=1) if declared else NodeShare(biggest)


class Ray:
    """`address` of a running cluster, or "local" for a new one on this machine. By default RAY_ADDRESS, else a cluster
    that runs on this machine, else a new one. A new one is shut down at the end, any other is left running.

    A case is given up after `attempts` losses of the node it ran on. `patience_s` is how long the cluster may be
    without any node that has a CPU. `perform` does one job, in a process of Ray's.
    """

    def __init__(
        self,
        limits: Limits = Limits(),
        address: str | None = None,
        *,
        perform: Perform | None = None,
        attempts: int = 5,
        patience_s: float = 300.0,
    ) -> None:
        self._limits = limits
        self._address = address
        self._perform = perform or functools.partial(isolated, limits=limits)
        self._attempts = attempts
        self._patience_s = patience_s
        self._connected_here = False

    def origins(self, kernels: Sequence[str]) -> dict[str, str]:
        """Where each kernel comes from. BadInput if one cannot be loaded, or a node has other code or plugin files."""
        ray = self._connect()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        home, limits = describe_home(kernels), self._limits

        def look(names: tuple[str, ...]) -> dict[str, str]:
            return on_node(lambda: workers(limits, NodeShare(1)).origins(names), home)

        task = ray.remote(num_cpus=0, max_retries=self._attempts)(look)
        try:
            # Every node is compared with this machine, and the first of them loads the kernels.
            asked = [
                task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(names)
                for node, names in zip(some_nodes(), chain([tuple(kernels)], repeat(())), strict=False)
            ]
            answers: list[dict[str, str]] = ray.get(asked)
        except BaseException as failure:
            self._disconnect()
            if isinstance(failure, ray.exceptions.RayError):
                raise BadInput(f"--executor ray: {reason(failure)}") from failure
            raise
        return answers[0]

    def run(self, jobs: Sequence[Job]) -> Iterator[Record]:
        self._connect()
        try:
            yield from self._stream(jobs)
        finally:
            self._disconnect()

    def _stream(self, jobs: Sequence[Job]) -> Iterator[Record]:
        import ray

        task = self._task(jobs)
        queue = Queue(deque((job, 1) for job in jobs))
        under_way: dict[Any, Attempt] = {}
        nodes, looked = some_nodes(), time.monotonic()
        last_alive = looked
        try:
            while queue or under_way:
                queue.wake()
                while queue.waiting:
                    asks = demand(queue.waiting[0][0], nodes)
                    if len(under_way) >= QUEUED_PER_PLACE * sum(map(asks.places, nodes)):
                        break
                    job, number = queue.waiting.popleft()
                    under_way[task.options(**asks.options()).remote(job)] = Attempt(job, number, asks, time.monotonic())
                for ref in finished(under_way):
                    record = self._result(ref, under_way.pop(ref), queue)
                    if record is not None:
                        yield record
                if (now := time.monotonic()) - looked > LOOK_AROUND_S:
                    looked, alive = now, living_nodes()
                    if alive:
                        nodes, last_alive = alive, now
                    elif now - last_alive > self._patience_s:
                        left = f"{len(queue) + len(under_way)} cells are left"
                        raise BadInput(f"--executor ray: no node with a CPU for {self._patience_s:g} s; {left}")
                    for ref in [ref for ref, a in under_way.items() if not any(map(a.demand.places, nodes))]:
                        # No node that is left is big enough: asked again, for what there is now.
                        ray.cancel(ref, force=True)
                        withdrawn = under_way.pop(ref)
                        queue.waiting.appendleft((withdrawn.job, withdrawn.number))
        finally:
            for ref in under_way:
                ray.cancel(ref, force=True)

    def _task(self, jobs: Sequence[Job]) -> Any:
        import ray

        home, perform = describe_home(job.case.kernel for job in jobs), self._perform

        def work(job: Job) -> Record:
            return on_node(lambda: perform(job), home)

        # Ray's own retries are off: they would be endless for memory, and could not be told from the first attempt.
        return ray.remote(max_retries=0)(work)

    def _result(self, ref: Any, attempt: Attempt, queue: Queue) -> Record | None:
        """The record; or None, and the job waits again."""
        import ray

        try:
            record: Record = ray.get(ref)
            return record
        except ray.exceptions.RayTaskError as failure:
            if isinstance(failure.cause, BadInput):  # a node that is unlike this machine would spoil case after case
                raise BadInput(f"--executor ray: {failure.cause}") from failure
            return failed(attempt.job, "error", reason(failure), time.monotonic() - attempt.given)
        except ray.exceptions.RayError as failure:
            name = attempt.job.case.case_id
            if attempt.number < self._attempts:
                log.warning("%s: lost on the cluster, tried again: %s", name, reason(failure))
                queue.again(attempt)
                return None
            status = "oom" if isinstance(failure, ray.exceptions.OutOfMemoryError) else "error"
            error = f"lost on the cluster {attempt.number} times: {reason(failure)}"
            return failed(attempt.job, status, error, time.monotonic() - attempt.given)

    def _connect(self) -> Any:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise BadInput("--executor ray needs the extra: pip install 'attention-harness[ray]'") from error
        if ray.is_initialized():  # by the calling program, whose connection it stays
            return ray
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        with tempfile.TemporaryFile() as said:
            try:
                with _standard_error_to(said.fileno()):  # a line of Ray's own each second that it tries again
                    ray.init(self._address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
                where = self._address or os.environ.get("RAY_ADDRESS") or "this machine"
                said.seek(0)
                raise BadInput(f"--executor ray: {_why_not(where, error, said.read())}") from error
        self._connected_here = True
        return ray

    def _disconnect(self) -> None:
        """Ends a cluster that was started here and leaves any other running."""
        if self._connected_here:
            import ray

            ray.shutdown()
            self._connected_here = False


@contextlib.contextmanager
def _standard_error_to(handle: int) -> Iterator[None]:
    """Of all in this process, C code included."""
    sys.stderr.flush()
    kept = os.dup(2)
    os.dup2(handle, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _why_not(where: str, error: Exception, said: bytes) -> str:
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    if any(word in text for word in ("AuthToken", "AuthenticationError") for text in (*lines, type(error).__name__)):
        remedy = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or ~/.ray/auth_token to what its head has"
        return f"the cluster at {where} does not take this machine's token (wrong, or none): {remedy}"
    last = re.sub(r"^\[.*?\] ", "", lines[-1]) if lines else ""
    more = f" ({len(lines)} lines like: {last})" if last else ""
    return f"no cluster at {where}: {first_line(error)}{more}"


def living_nodes() -> list[ClusterNode]:
    import ray

    totals = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    nodes = [ClusterNode(name, int(has.get("CPU", 0)), int(has.get(TIMING, 0))) for name, has in totals.items()]
    return [node for node in nodes if node.cpus]


def some_nodes() -> list[ClusterNode]:
    nodes = living_nodes()
    if not nodes:
        raise BadInput("--executor ray: the cluster has no node with a CPU")
    return nodes


def finished(under_way: Iterable[Any]) -> list[Any]:
    """All that is finished by now; waits a while for the first."""
    import ray

    refs = list(under_way)
    if not refs:  # no node is left to give work to
        time.sleep(LOOK_AROUND_S)
        return []
    first, rest = ray.wait(refs, num_returns=1, timeout=LOOK_AROUND_S)
    return [*first, *ray.wait(rest, num_returns=len(rest), timeout=0)[0]] if first and rest else first


def reason(failure: Any) -> str:
    cause = getattr(failure, "cause", None) or failure
    return f"{type(cause).__name__}: {cause}"


def on_node(work: Callable[[], T], home: Home) -> T:
    """In a process of Ray's."""
    import ray

    try:
        settle(home)
        return work()
    except BadInput as refusal:
        node = ray.get_runtime_context().get_node_id()
        raise BadInput(f"node {platform.node()} ({node[:8]}): {refusal}") from refusal


def isolated(job: Job, limits: Limits) -> Record:
    import ray

    given = ray.get_runtime_context().get_assigned_resources()
    (record,) = workers(limits, NodeShare(int(given["CPU"]), int(given.get(TIMING, 0)))).run([job])
    return record


@functools.cache  # kept as long as Ray's process, so that torch is imported once
def workers(limits: Limits, asks: NodeShare) -> Local:
    import ray

    (here,) = (node for node in living_nodes() if node.id == ray.get_runtime_context().get_node_id())
    # Only one of them will ever work for this process; but as many share the node's memory.
    return Local(max(1, asks.places(here)), limits)
