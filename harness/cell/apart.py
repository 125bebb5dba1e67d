"""Timing of a kernel in a process of its own, by the judge's clock, on inputs that it has never seen.

The reference runs in such a process too, in which nobody's code was ever loaded: both sides pay the same way there and
back. A sample ends when every element of every result lies in the judge's memory. Of the results some are chosen at
random afterwards, to be judged: a kernel that does less while it is timed is wrong.
"""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.candidate.client import Process
from harness.cell.side import Subject

SAMPLE_S = 4e-3  # a sample lasts about this long: beside it the way there and back, some 0.1 ms, is little
JUDGED = 2  # timed calls of a cell that are judged
chance = random.SystemRandom()  # the kernel may know every seed of ours


@dataclass(frozen=True)
class TimedResult:
    """One timed call: its input, and what came of it, by name."""

    x: Tensor
    tensors: dict[str, Tensor]


@dataclass
class Apart:
    """A side as `interleave` samples it."""

    process: Process
    subject: Subject
    kept: list[TimedResult] = field(default_factory=list)
    samples: int = 0

    def __post_init__(self) -> None:
        self.process.install(self.subject)
        self._size = self.subject.example.numel()
        self._pool = torch.randn(2 * self._size).to(self.subject.example.dtype)

    def sample(self, repeats: int) -> float:
        """Seconds per call, each on numbers of its own."""
        xs = [self.fresh() for _ in range(repeats)]
        seconds, results = self.process.go(xs)
        self._keep(xs, results)
        return seconds / repeats

    def fresh(self) -> Tensor:
        """A random stretch of random numbers: a draw of as many would take longer than the call."""
        start = chance.randrange(self._size + 1)
        return self._pool[start : start + self._size].view(self.subject.example.shape)

    def _keep(self, xs: list[Tensor], results: dict[str, Tensor]) -> None:
        """Each sample has the same chance to be among the JUDGED, and each call in it."""
        self.samples += 1
        place = len(self.kept) if len(self.kept) < JUDGED else chance.randrange(self.samples)
        if place >= JUDGED:
            return
        chosen = chance.randrange(len(xs))
        mark = f"{chosen} "
        tensors = {name.removeprefix(mark): t for name, t in results.items() if name.startswith(mark)}
        self.kept[place : place + 1] = [TimedResult(xs[chosen], tensors)]
