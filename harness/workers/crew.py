"""Worker processes at work: one loop that sleeps until one of them answers, dies, or exceeds its limits."""

import logging
import selectors
import time
from dataclasses import dataclass, field, replace
from typing import Any

from harness import store
from harness.candidate.channel import BrokenMessage
from harness.errors import BadInput
from harness.suite.schema import Limits
from harness.workers.process import Worker, allowed_bytes, show_bytes

LOOK_S = 0.1  # between two looks at the workers' memory; the parent sleeps in between
START_S = 120.0
MOST_FAILED_STARTS = 3

log = logging.getLogger(__name__)


class CannotStart(BadInput):
    """No worker can be had: nothing of what is asked for can be at fault."""


@dataclass(frozen=True, eq=False)
class Task:
    subject: Any
    message: dict[str, Any]
    is_again: bool = False  # it failed in a worker that had worked for others before, who may have broken it


@dataclass(frozen=True)
class Outcome:
    """An answer, or how the worker failed."""

    task: Task
    was_fresh: bool  # the worker had done nothing else
    seconds: float
    answer: dict[str, Any] = field(default_factory=dict)
    status: str = ""
    reason: str = ""


class Crew:
    def __init__(self, size: int, limits: Limits) -> None:
        self.size = size
        self.timeout_s = limits.timeout_s
        self.allowed = allowed_bytes(limits, size)
        self.starting: set[Worker] = set()
        self.idle: list[Worker] = []
        self.busy: dict[Worker, Task] = {}
        self._late: dict[Worker, float] = {}  # when a busy one's time is up
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._looked = 0.0
        self._code = ""  # of harness, when the first worker imported it: each later one must import the same

    def workers(self) -> list[Worker]:
        return [*self.starting, *self.idle, *self.busy]

    def staff(self, tasks: int) -> None:
        """As many workers as there are tasks, up to the crew's size."""
        for worker in [worker for worker in self.idle if not worker.is_alive]:
            self.retire(worker)
        while len(self.workers()) < min(self.size, tasks):
            self._code = self._code or store.code_sha256()
            worker = Worker(self.allowed)
            self.starting.add(worker)
            self._selector.register(worker.messages, selectors.EVENT_READ, (worker, "messages"))
            self._selector.register(worker.output, selectors.EVENT_READ, (worker, "output"))

    def give(self, worker: Worker, task: Task) -> bool:
        """False: the worker was dead already, and the task has not begun."""
        if not worker.ask(task.message):
            self.retire(worker)
            return False
        self.idle.remove(worker)
        self.busy[worker] = task
        self._late[worker] = worker.asked + self.timeout_s
        return True

    def excuse(self, seconds: float) -> None:
        """Time in which nobody listened is not theirs."""
        for worker in self._late:
            self._late[worker] += seconds

    def wait(self) -> list[Outcome]:
        """Sleeps until something happens, for LOOK_S at the most."""
        outcomes: list[Outcome] = []
        nearest = min(self._late.values(), default=float("inf")) - time.monotonic()
        for key, _ in self._selector.select(max(0.0, min(LOOK_S, nearest))):
            worker, kind = key.data
            if worker not in self.workers():
                continue  # dismissed a moment ago
            if kind == "output":
                if not worker.read_output():
                    self._selector.unregister(worker.output)
            else:
                outcomes += self._hear(worker)
        now = time.monotonic()
        if now - self._looked >= LOOK_S / 2 or nearest <= 0:
            self._looked = now
            outcomes += self._look(now)
        return outcomes

    def kill(self, *, idle: bool) -> None:
        for worker in [*self.starting, *self.busy, *(self.idle if idle else ())]:
            self.retire(worker)

    def strike(self) -> None:
        for worker in self.workers():
            worker.strike()

    def _hear(self, worker: Worker) -> list[Outcome]:
        outcomes: list[Outcome] = []
        try:
            messages = worker.read_messages()
            if messages is None:
                return self._lose(worker)
            for message in messages:
                outcomes += self._take(worker, message)
        except BrokenMessage as broken:
            outcomes += self._fail(worker, "error", f"the worker sent a broken message: {broken}")
        return outcomes

    def _take(self, worker: Worker, message: dict[str, Any]) -> list[Outcome]:
        if worker in self.starting:
            self._welcome(worker, message)
            return []
        if worker not in self.busy:
            raise BrokenMessage("an answer to nothing")
        if message.get("begun") == worker.served:
            self._late[worker] = time.monotonic() + self.timeout_s  # the kernel's own process had to start first
            return []
        if message.get("question") != worker.served:
            raise BrokenMessage(f"an answer to {message.get('question')!r:.20} instead of {worker.served}")
        outcome = self._outcome(worker, answer=message)
        del self.busy[worker], self._late[worker]
        self.idle.append(worker)
        if left := message.get("left"):
            log.info("worker %d ends, because %s could not be put back", worker.pid, " and ".join(left))
            self.retire(worker)
        return [outcome]

    def _welcome(self, worker: Worker, message: dict[str, Any]) -> None:
        used = message.get("ready")
        if not isinstance(used, int):
            raise BrokenMessage("it did not say that it is ready")
        if used >= self.allowed:
            rule = f"torch and harness themselves take {show_bytes(used)}"
            raise BadInput(f"limits.max_memory: {show_bytes(self.allowed)}: {rule}")
        if (now := store.code_sha256()) != self._code:
            change = f"harness's own source changed during the run: {self._code[:12]} -> {now[:12]}"
            raise CannotStart(f"{change}; put it back, or start a new run (or add --even-if-changed)")
        self._failed_starts = 0
        self.starting.remove(worker)
        self.idle.append(worker)

    def _look(self, now: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for worker in self.workers():
            if not worker.is_alive:  # a child of it may still hold the pipe, so that its end cannot be heard
                outcomes += self._hear(worker) if worker in self.busy else self._lose(worker)
                if worker in self.busy:
                    outcomes += self._lose(worker)
            elif worker in self.starting and now - worker.started > START_S:
                self._fail(worker, "error", f"it was not ready after {START_S:g} s")
            elif worker in self.busy and now >= self._late[worker]:
                worker.abort()
                outcomes += self._fail(worker, "timeout", f"no result within timeout_s = {self.timeout_s:g} s")
            elif worker in self.busy and (used := worker.memory(self.allowed)) > self.allowed:
                rule = f"more than max_memory = {show_bytes(self.allowed)}"
                outcomes += self._fail(worker, "oom", f"the worker used {show_bytes(used)}, {rule}")
        return outcomes

    def _lose(self, worker: Worker) -> list[Outcome]:
        return self._fail(worker, *worker.death())

    def _fail(self, worker: Worker, status: str, reason: str) -> list[Outcome]:
        was_starting = worker in self.starting
        outcome = self._outcome(worker, status=status) if worker in self.busy else None
        self.retire(worker)
        words = worker.last_words()
        said = f"; last words: {words}" if words else ""
        if was_starting:
            self._failed_starts += 1
            log.warning("a worker could not start: %s%s", reason, said)
            if self._failed_starts >= MOST_FAILED_STARTS:
                raise CannotStart(f"no worker process can start: {reason}{said}")
        return [] if outcome is None else [replace(outcome, reason=f"{reason}{said}")]

    def _outcome(self, worker: Worker, **what: Any) -> Outcome:
        return Outcome(self.busy[worker], worker.served == 1, time.monotonic() - worker.asked, **what)

    def retire(self, worker: Worker) -> None:
        """Whatever it does: it is ended, and no longer one of the crew."""
        for handle in (worker.messages, worker.output):
            if handle in self._selector.get_map():
                self._selector.unregister(handle)
        self.starting.discard(worker)
        if worker in self.idle:
            self.idle.remove(worker)
        self.busy.pop(worker, None)
        self._late.pop(worker, None)
        worker.kill()
