"""How busy others keep the machine while we measure: another user's job, a browser, a neighbour on the same host."""

import os
import time
from collections.abc import Sequence

import psutil


class Others:
    """Cores' worth of time of all work on the machine but ours: this process, its finished children, and `own`.

    Time that the host gave to other machines (steal) is others' work, too.
    """

    def __init__(self, own: Sequence[int] = ()) -> None:
        self._own = [psutil.Process(pid) for pid in own]
        self._wall, self._busy, self._before = time.perf_counter(), _busy(), self._used()

    def stop(self) -> tuple[float, float]:
        """The seconds since the start, and the cores."""
        seconds = time.perf_counter() - self._wall
        others = (_busy() - self._busy - (self._used() - self._before)) / seconds
        return seconds, max(0.0, others)

    def _used(self) -> float:
        mine = os.times()
        theirs = sum(sum(process.cpu_times()[:2]) for process in self._own)
        return mine.user + mine.system + mine.children_user + mine.children_system + theirs


def _busy() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
