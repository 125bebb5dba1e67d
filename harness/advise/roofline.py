"""What this machine does, measured: how fast it reads, how long each part of a step takes, what a step costs besides.

A decode step multiplies a few rows by much data, and the peak of a square matrix product says nothing about that. So
the very products are measured, and each as the step finds it: after as much other data has been read as the step reads
between two uses of the same byte. How much of its own the processor's cache still holds then is up to the processor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.advise.disturbance import Disturbance, watch
from harness.advise.figure import Figure
from harness.advise.work import DecodeStep, Part

MIB = 2**20
MODEL_ERROR = 0.1  # of a sum of parts beside a whole step: five of six are closer (bench/advise_accuracy.py)
CACHED, BEYOND = 4 * MIB, 96 * MIB  # below and above these the size of a working set makes no difference


@dataclass(frozen=True, slots=True)
class Roofline:
    reading: dict[int, Figure]  # seconds per byte, of CACHED and of BEYOND bytes read over and over
    parts: dict[tuple[Part, int], Figure]  # seconds within a working set, without what a call costs in itself
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

    parts: dict[tuple[Part, int], Figure] = {}
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
