"""What this machine does, measured: how fast it reads, the pace of each shape of product, what a call costs.

A decode step multiplies a few rows by much data, and the peak of a square matrix product says nothing about that. So
each shape is measured twice: on data that is in the processor's cache, where arithmetic is the limit, and on data that
comes from memory, where reading may be. How much of a working set comes from memory is read off plain reading speeds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.advise.disturbance import Disturbance, watch
from harness.advise.figure import Figure, between
from harness.advise.work import Part, Shape

MIB = 2**20
CACHED, BEYOND = 4 * MIB, 96 * MIB
READ_SIZES = (CACHED, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, BEYOND)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds per byte of a shape."""

    cached: Figure
    beyond: Figure


@dataclass(frozen=True, slots=True)
class Roofline:
    """`overhead` is that of a whole step with next to nothing to do, for latent layers (True) and the others."""

    reading: dict[int, Figure]  # seconds per byte, by the size of what is read over and over
    paces: dict[Shape, Pace]
    overhead: dict[bool, Figure]
    threads: int
    disturbance: Disturbance | None = None  # None: not watched

    def seconds(self, parts: Sequence[Part], *, working_set: int) -> Figure:
        """`working_set`: all bytes that are read between two uses of the same one."""
        share = self.from_memory(working_set)
        total = self.overhead[any(part.shape.latent for part in parts)]
        for part in parts:
            pace = self.paces[part.shape]
            total += between(pace.cached, pace.beyond, share).times(part.bytes)
        return total

    def from_memory(self, working_set: int) -> float:
        """The share that the cache cannot hold: 0 as fast as a small set is read, 1 as slow as a large one."""
        near, far = self.reading[CACHED].value, self.reading[BEYOND].value
        if not far > near:  # a cache that holds it all, or noise: then size alone decides
            return float(working_set >= BEYOND)
        return min(1.0, max(0.0, (self._per_byte(working_set) - near) / (far - near)))

    def _per_byte(self, size: int) -> float:
        """Between measured sizes by interpolation in log size; outside them the nearest."""
        known = sorted(self.reading)
        below = max((one for one in known if one <= size), default=known[0])
        above = min((one for one in known if one >= size), default=known[-1])
        if below == above:
            return self.reading[below].value
        share = math.log(size / below) / math.log(above / below)
        return between(self.reading[below], self.reading[above], share).value

    @property
    def bytes_per_s(self) -> float:
        """From memory, by the plainest of products."""
        return 1 / self.reading[BEYOND].value


def measure(shapes: Sequence[Shape], dtype: str, *, told: Callable[[str], None] = lambda _: None) -> Roofline:
    """A few seconds; `told` hears what is being measured."""
    import torch

    from harness.advise import probes

    reading, paces = {}, {}
    finish = watch()
    with torch.inference_mode():
        for size in READ_SIZES:
            told(f"measuring this machine: reading {size // MIB} MiB")
            reading[size] = probes.reading(size)
        told("measuring this machine: overhead of a call")
        overhead = {latent: probes.overhead(dtype, latent=latent) for latent in (False, True)}
        for shape in dict.fromkeys(shapes):
            told(f"measuring this machine: {shape.kind} with {shape.rows} rows")
            paces[shape] = Pace(probes.pace(shape, dtype, CACHED), probes.pace(shape, dtype, BEYOND))
    return Roofline(reading, paces, overhead, torch.get_num_threads(), finish())
