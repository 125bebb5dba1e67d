"""In worker processes of this machine: a kernel that crashes, hangs or eats memory costs its own case and no other.

A worker stays for many cases, so that torch is imported once; after a failure the next case gets a new one.
"""

import dataclasses
import logging
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from harness.candidate.channel import BrokenMessage
from harness.errors import BadInput
from harness.record import STATUSES, Record
from harness.suite.schema import Limits
from harness.workers.crew import Crew, Outcome, Task
from harness.workers.interrupts import Interrupts, Terminated
from harness.workers.job import Job, failed

log = logging.getLogger(__name__)


class Local:
    """Workers that are idle stay for the next call; they end with this object, and at the latest with this process."""

    def __init__(self, workers: int = 1, limits: Limits = Limits()) -> None:
        if workers < 1:
            raise BadInput(f"workers = {workers}: must be at least 1")
        self._crew = Crew(workers, limits)
        weakref.finalize(self, self._crew.kill, idle=True)

    def origins(self, kernels: Sequence[str]) -> dict[str, str]:
        """Where each kernel comes from. They are loaded in a worker: importing a user's file runs the user's code."""
        crew, found = self._crew, {}
        try:
            for kernel in kernels:
                outcome = self._load(kernel)
                if "origin" not in outcome.answer:
                    raise BadInput(outcome.answer.get("refused") or f"{kernel}: importing it failed: {outcome.reason}")
                found[kernel] = str(outcome.answer["origin"])
                if patched := outcome.answer.get("patched"):
                    log.warning("%s replaces %s; that reaches nothing but itself", kernel, ", ".join(patched))
        finally:
            crew.kill(idle=False)
        return found

    def _load(self, kernel: str) -> Outcome:
        crew, task = self._crew, Task(kernel, {"load": kernel})
        outcomes: list[Outcome] = []
        while not outcomes:
            crew.staff(1)
            if crew.idle and not crew.busy:
                crew.give(crew.idle[0], task)
            outcomes = crew.wait()
        return outcomes[0]

    def run(self, jobs: Sequence[Job]) -> Iterator[Record]:
        crew, waiting = self._crew, deque(Task(job, {"job": dataclasses.asdict(job)}) for job in jobs)
        timed = any(job.timing.enabled for job in jobs)
        with Interrupts(crew.strike) as interrupts:
            try:
                while (waiting and not interrupts.no_more) or crew.busy:
                    if not interrupts.no_more:
                        _hand_out(waiting, crew)
                    outcomes = crew.wait()
                    interrupts.announce()
                    if interrupts.at_once:
                        break
                    records = [record for outcome in outcomes for record in _settle(outcome, waiting)]
                    # While a case is timed, nothing else may work; else the next one need not wait for the reader.
                    if not interrupts.no_more and not timed:
                        _hand_out(waiting, crew)
                    for record in records:
                        paused = time.monotonic()
                        yield record
                        crew.excuse(time.monotonic() - paused)
                if interrupts.no_more:
                    raise Terminated if interrupts.is_terminated else KeyboardInterrupt
            finally:
                crew.kill(idle=interrupts.no_more)

    def close(self) -> None:
        self._crew.kill(idle=True)


def _hand_out(waiting: deque[Task], crew: Crew) -> None:
    """In order; but a case that is tried again waits for a worker that has done nothing else."""
    crew.staff(len(waiting) + len(crew.busy))
    for worker in list(crew.idle):
        is_fresh = worker.served == 0
        task = next((task for task in waiting if is_fresh or not task.is_again), None)
        if task is not None and crew.give(worker, task):
            waiting.remove(task)
        elif task is None and waiting:
            crew.retire(worker)
    crew.staff(len(waiting) + len(crew.busy))


def _settle(outcome: Outcome, waiting: deque[Task]) -> list[Record]:
    """The record, or nothing and another try: a crash may be the late damage of an earlier case."""
    task, job = outcome.task, outcome.task.subject
    if outcome.answer:
        try:
            record = read_record(outcome.answer.get("record"))
            if record.case_id != job.case.case_id:
                raise BrokenMessage(f"a record of {record.case_id}")
        except BrokenMessage as broken:
            record = failed(job, "error", f"the worker sent a broken message: {broken}", outcome.seconds)
    else:
        record = failed(job, outcome.status, outcome.reason, outcome.seconds)
    is_doubtful = record.status == "oom" or (not outcome.answer and record.status == "error")
    if is_doubtful and not outcome.was_fresh and not task.is_again:
        waiting.appendleft(dataclasses.replace(task, is_again=True))
        return []
    return [record]


def read_record(fields: Any) -> Record:
    """What a worker says it measured; BrokenMessage for what no worker of ours would say."""
    try:
        record = Record(**fields)
    except TypeError as error:
        raise BrokenMessage(f"not a record: {error}") from None
    if record.status not in STATUSES:
        raise BrokenMessage(f"status {record.status!r:.40}")
    if record.status == "ok" and record.error:
        raise BrokenMessage(f"it claims to be ok and carries an error: {record.error:.200}")
    return record
