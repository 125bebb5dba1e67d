"""The parent's side of one worker process: start it, speak to it, watch it, end it, and say what became of it.

How much memory it may take, with all that it starts, is found out here too, and how much it has taken.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

import harness
from harness.suite.schema import Limits
from harness.workers.channel import Inbox, send

SHARE = 0.8
LOOK_FOR_CHILDREN_S = 1.0  # it reads every process of the machine, some ms: too much for each look
CGROUP = Path("/sys/fs/cgroup/memory.max")
VMSTAT = Path("/proc/vmstat")
CHUNK = 1 << 16
KEPT_OUTPUT = 1 << 16
LAST_WORDS = 2000
ABORT_S = 0.5  # for the traceback of a worker that hangs


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


def killed_for_memory() -> int:
    """How often the kernel has killed a process of this machine for want of memory; 0 where it does not say."""
    if not VMSTAT.exists():
        return 0
    return sum(int(line.split()[1]) for line in VMSTAT.read_text().splitlines() if line.startswith("oom_kill "))


class Gauge:
    """A process and its children: whether it lives, what they hold in memory, their end."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._children: list[psutil.Process] = []
        self._looked = time.monotonic()

    def read(self) -> int:
        if time.monotonic() - self._looked > LOOK_FOR_CHILDREN_S:
            self.look()
        return sum(map(_resident, (self._process, *self._children)))

    def look(self) -> None:
        """For children. Those once seen stay known, even when their parent is gone."""
        self._looked = time.monotonic()
        with contextlib.suppress(psutil.Error):
            found = {*self._children, *self._process.children(recursive=True)}
            self._children = [child for child in found if child.is_running()]

    def kill_children(self) -> None:
        for child in self._children:
            with contextlib.suppress(psutil.Error):
                child.kill()  # psutil's, and not by the number alone: that may be another's by now

    def is_alive(self) -> bool:
        try:
            return bool(self._process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


class Worker:
    """`messages` and `output` are handles to wait on; whoever waits calls `read_messages` and `read_output`."""

    def __init__(self, allowed: int) -> None:
        jobs, self._jobs = os.pipe()
        self.messages, answers = os.pipe()
        self.output, printed = os.pipe()
        root = str(Path(harness.__file__).resolve().parent.parent)
        python_path = os.environ.get("PYTHONPATH")
        try:
            self._process = subprocess.Popen(
                # -P: a user's folder may hold a queue.py. The module is found by PYTHONPATH, wherever harness lies.
                [sys.executable, "-P", "-m", "harness.workers.worker", str(jobs), str(answers), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=(jobs, answers),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, python_path)))},
                start_new_session=True,  # Ctrl-C in the terminal is the parent's business alone
            )
        finally:
            for handle in (jobs, answers, printed):
                os.close(handle)
        os.set_blocking(self.messages, False)
        os.set_blocking(self.output, False)
        self._inbox, self._said = Inbox(), bytearray()
        self._gauge = Gauge(self._process.pid)
        self._kills_before = 0
        self.started = self.asked = time.monotonic()
        self.served = 0  # how much it has been asked for since its start: an answer gives back this number
        with contextlib.suppress(BrokenPipeError):  # already dead: whoever reads its messages will see
            send(self._jobs, {"path": sys.path, "python_path": python_path, "allowed": allowed})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        # Not by poll(): that would reap it, and its pid and group might be another's by the time we kill them.
        return self._gauge.is_alive()

    def ask(self, message: dict[str, Any]) -> bool:
        """False: it is dead, and has not begun."""
        self._said.clear()
        self._kills_before = killed_for_memory()
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
        data = _read(self.messages)  # all that a pipe holds; one that is written to without end shall not hold us
        return None if data == b"" else self._inbox.feed(data or b"")

    def read_output(self) -> bool:
        """Keeps the end of what it prints, and only that. False when it has closed its output."""
        data = _read(self.output)
        self._said += data or b""
        del self._said[:-KEPT_OUTPUT]
        return data != b""

    def memory(self) -> int:
        return self._gauge.read()

    def abort(self) -> None:
        """For one that hangs: SIGABRT makes it write down where, even in C code. Then the end."""
        self._gauge.look()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGABRT)
        self._wait(ABORT_S)
        self.kill()

    def strike(self) -> None:
        """SIGKILL for it and all that it has started. Nothing else, so that a signal handler may call it anywhere."""
        if self._process.returncode is not None:
            return  # reaped: its pid may be another's by now
        self._gauge.look()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # also after its own end: the group lives on in what it started
        self._gauge.kill_children()  # those that made groups of their own

    def kill(self) -> None:
        """With all that it has started. Afterwards only what it said is left."""
        if self._jobs < 0:
            return
        self.strike()
        self._process.wait()
        for _ in range(KEPT_OUTPUT // CHUNK + 1):  # not for ever: a process that escaped may still write
            if not self.read_output():
                break
        for handle in (self._jobs, self.messages, self.output):
            os.close(handle)
        self._jobs = -1

    def death(self) -> tuple[str, str]:
        """Status and reason of one that ended by itself, or whose pipe did."""
        if not self._wait(ABORT_S):
            return "error", "the worker closed its pipe"
        self.strike()
        code = self._process.wait()
        if code >= 0:
            return "error", f"the worker left with exit code {code}"
        known = {number.value: number.name for number in signal.Signals}
        if -code == signal.SIGKILL and killed_for_memory() > self._kills_before:
            return "oom", "killed by SIGKILL: the machine ran out of memory"
        return "error", f"killed by {known.get(-code, f'signal {-code}')}"

    def _wait(self, seconds: float) -> bool:
        """Whether it ends within that time; it is not reaped yet."""
        deadline = time.monotonic() + seconds
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.is_alive

    def last_words(self) -> str:
        """The end of what it printed; of a crash's traceback the beginning, where the crash is."""
        text = self._said.decode(errors="replace")
        before, marker, trace = text.rpartition("Fatal Python error: ")
        if marker:
            trace = trace.partition("\nExtension modules: ")[0]
            text = before[-LAST_WORDS // 4 :] + "\n" + marker + trace[: LAST_WORDS * 3 // 4]
        lines = (re.sub(r"[^\S\n]+|[^\w\s!-~]", " ", line).strip() for line in text[-LAST_WORDS:].splitlines())
        return "; ".join(line for line in lines if line and not line.startswith('File "<frozen '))


def _read(handle: int) -> bytes | None:
    """b"" at the end, None if there is nothing now."""
    try:
        return os.read(handle, CHUNK)
    except BlockingIOError:
        return None
