"""How much memory a case may take, and how much a worker has taken."""

import contextlib
import time
from pathlib import Path

import psutil

from harness.document import Limits

SHARE = 0.8
LOOK_FOR_CHILDREN_S = 1.0  # it reads every process of the machine, some ms: too much for each look
CGROUP = Path("/sys/fs/cgroup/memory.max")
VMSTAT = Path("/proc/vmstat")


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
