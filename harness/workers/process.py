"""The parent's side of one worker process: what it is asked and answers; and how much memory each may take."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from harness.candidate.channel import Inbox, send
from harness.candidate.child import Child, read_some
from harness.suite.schema import Limits

SHARE = 0.8
CGROUP = Path("/sys/fs/cgroup/memory.max")


def allowed_bytes(limits: Limits, workers: int) -> int:
    """For one worker process."""
    if limits.max_memory is not None:
        return limits.max_memory
    total = psutil.virtual_memory().total
    if CGROUP.exists() and (text := CGROUP.read_text().strip()).isdigit():  # a container's own limit; else "max"
        total = min(total, int(text))
    return int(SHARE * total / workers)


def show_bytes(size: float) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"


class Worker(Child):
    """`messages` and `output` are handles to wait on; whoever waits calls `read_messages` and `read_output`."""

    kind = "the worker"

    def __init__(self, allowed: int) -> None:
        jobs, self._jobs = os.pipe()
        self.messages, answers = os.pipe()
        super().__init__("harness.workers.worker", (jobs, answers))
        os.set_blocking(self.messages, False)
        self._inbox = Inbox()
        self.asked = self.started
        self.served = 0  # how much it has been asked for since its start: an answer gives back this number
        with contextlib.suppress(BrokenPipeError):  # already dead: whoever reads its messages will see
            send(self._jobs, {"path": sys.path, "python_path": self.python_path, "allowed": allowed})

    def ask(self, message: dict[str, Any]) -> bool:
        """False: it is dead, and has not begun."""
        self.begin()
        if not self.is_alive:
            return False
        try:
            send(self._jobs, {**message, "question": self.served + 1})
        except BrokenPipeError:
            return False
        self.asked = time.monotonic()
        self.served += 1
        return True

    def read_messages(self) -> Iterator[dict[str, Any]] | None:
        """What has arrived, possibly nothing yet; None at the end. Going through it may raise BrokenMessage."""
        data = read_some(self.messages)  # all that a pipe holds; one that is written to without end shall not hold us
        return None if data == b"" else self._inbox.feed(data or b"")

    def kill(self) -> None:
        super().kill()
        if self._jobs >= 0:
            os.close(self._jobs)
            os.close(self.messages)
            self._jobs = -1
