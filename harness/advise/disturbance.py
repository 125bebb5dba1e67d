"""Whether others were at work while this machine was measured. A steady load slows every sample alike, so no spread of
samples shows it; the processors' own clocks do."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

OTHERS = 0.25  # cores that others keep busy: more than a desktop at rest
LOAD = 0.5  # of the last minute, where the clocks are hidden: as `harness doctor` warns


@dataclass(frozen=True, slots=True)
class Disturbance:
    """`others`: cores' worth of time that other processes used while measuring; None where the system hides it."""

    others: float | None
    load: float | None

    @property
    def words(self) -> str | None:
        """None: nothing that could be seen disturbed."""
        if self.others is not None:
            return f"other work kept {self.others:.1f} cores busy meanwhile" if self.others >= OTHERS else None
        if self.load is not None and self.load >= LOAD:
            return f"the load of the minute before was {self.load:.1f}"
        return None


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds: of the wall, of this process, and of all work on the cores that it may use."""

    wall: float
    own: float
    busy: float


def read_clocks() -> Clocks:
    import psutil

    cores = psutil.cpu_times(percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    idle = ("idle", "iowait", "guest", "guest_nice")  # guests are counted in user time already
    busy = sum(
        seconds
        for number in usable
        if number < len(cores)
        for name, seconds in cores[number]._asdict().items()
        if name not in idle
    )
    own = os.times()
    return Clocks(time.perf_counter(), own.user + own.system, busy)


def watch(clocks: Callable[[], Clocks] = read_clocks) -> Callable[[], Disturbance]:
    """Call it before measuring, and what it returns afterwards."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    first = clocks()

    def finish() -> Disturbance:
        last = clocks()
        wall, own, busy = last.wall - first.wall, last.own - first.own, last.busy - first.busy
        # Clocks that do not even show this process are none.
        hidden = wall <= 0 or busy < own / 2
        return Disturbance(None if hidden else max(0.0, busy - own) / wall, load)

    return finish
