"""What this machine does, measured: how fast it reads, how long each part of a step takes, what a step costs besides.

A decode step multiplies a few rows by much data, and the peak of a square matrix product says nothing about that. So
the very products are measured, and each as the step finds it: after as much other data has been read as the step reads
between two uses of the same byte. How much of its own the processor's cache still holds then is up to the processor.

Meanwhile it is watched whether others are at work. A steady load slows every sample alike, so no spread of samples
shows it; the processors' own clocks do.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.advise.work import DecodeStep, Figure, StepPart

OTHERS = 0.25  # cores that others keep busy: more than a desktop at rest
MIB = 2**20
MODEL_ERROR = 0.1  # of a sum of parts beside a whole step: five of six are closer (bench/advise_accuracy.py)
CACHED, BEYOND = 4 * MIB, 96 * MIB  # below and above these the size of a working set makes no difference
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
    mine = [cores[number]._asdict() for number in usable if number < len(cores)]
    busy = sum(seconds for core in mine for name, seconds in core.items() if name not in idle)
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


@dataclass(frozen=True, slots=True)
class Roofline:
    reading: dict[int, Figure]  # seconds per byte, of CACHED and of BEYOND bytes read over and over
    parts: dict[tuple[StepPart, int], Figure]  # seconds within a working set, without what a call costs in itself
    threads: int
    disturbance: Disturbance | None = None  # None: not watched

    def seconds(self, step: DecodeStep) -> Figure:
        first, *others = (self.parts[part, span_of(step)] for part in step.parts)
        return sum(others, first).wider(MODEL_ERROR)


def span_of(step: DecodeStep) -> int:
    return min(BEYOND, max(CACHED, step.working_set))


def measure(steps: Sequence[DecodeStep], *, told: Callable[[str], None] = lambda _: None) -> Roofline:
    """What it takes to predict these. A few seconds; `told` hears what is being measured."""
    import torch

    from harness.advise.probes import probe_of, reading, take

    parts: dict[tuple[StepPart, int], Figure] = {}
    finish = watch()
    with torch.inference_mode():
        told("measuring this machine: reading")
        read = take({size: reading(size) for size in (CACHED, BEYOND)})
        for number, step in enumerate(steps, start=1):
            told(f"measuring this machine: step {number} of {len(steps)}")
            span = span_of(step)
            # Variants share parts where their working sets are alike: beyond the cache all are.
            parts |= take({(part, span): probe_of(part, span) for part in step.parts if (part, span) not in parts})
    return Roofline(read, parts, torch.get_num_threads(), finish())
