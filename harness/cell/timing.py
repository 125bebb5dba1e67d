"""Interleaved paired timing: in each block every side is called once, in random order; ratios are within blocks.

On a shared machine two runs of the same code timed one after the other differ by more than 5 % half the time; pairs
taken within a few milliseconds of each other do not.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

SAMPLE_S = 1e-3  # a sample repeats the call until it lasts about this long
RESAMPLES = 1000


class Sampled(Protocol):
    """A side that is not called from here."""

    def sample(self, repeats: int) -> float:
        """Seconds per call."""
        ...


Timed = Callable[[], object] | Sampled


@dataclass(frozen=True)
class Ratio:
    value: float
    lo: float
    hi: float


class Stopwatch:
    """Seconds spent inside measured or compared calls; and the processor's, part by part of a cell's work."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.parts: dict[str, float] = {}
        self._open: list[str] = []
        self._since = time.process_time()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What goes on inside is this part's work, but for what is a part of its own again."""
        self._book()
        self._open.append(name)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def _book(self) -> None:
        now = time.process_time()
        if self._open:
            self.parts[self._open[-1]] = self.parts.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    @contextmanager
    def running(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


def interleave(
    calls: Mapping[str, Timed],
    *,
    budget_s: float,
    min_blocks: int,
    max_blocks: int,
    seed: int,
    sample_s: float = SAMPLE_S,
    warm_up: bool = False,
) -> dict[str, list[float]]:
    """Seconds per call, one sample per side and block; stops at the budget, but not before min_blocks.

    With `warm_up` a sample of several calls comes after one that is not timed, which finds the caches as the side
    before left them: else a ratio would hang on which other sides there are.
    """
    order = list(calls)
    shuffle = random.Random(seed).shuffle
    samples: dict[str, list[float]] = {name: [] for name in calls}
    deadline = time.perf_counter() + budget_s
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        repeats = {name: _repeats(call, sample_s) for name, call in calls.items()}
        for block in range(max_blocks):
            if block >= min_blocks and time.perf_counter() >= deadline:
                break
            shuffle(order)
            for name in order:
                if warm_up and repeats[name] > 1:
                    _sample(calls[name], 1)
                samples[name].append(_sample(calls[name], repeats[name]))
    finally:
        if was_collecting:
            gc.enable()
    return samples


def paired_ratio(candidate: list[float], reference: list[float], *, seed: int) -> Ratio:
    """Median of the within-block log ratios, with a 95 % bootstrap interval over blocks."""
    logs = np.log(np.asarray(candidate) / np.asarray(reference))
    picks = np.random.default_rng(seed).integers(len(logs), size=(RESAMPLES, len(logs)))
    lo, hi = np.quantile(np.median(logs[picks], axis=1), [0.025, 0.975])
    return Ratio(math.exp(float(np.median(logs))), math.exp(float(lo)), math.exp(float(hi)))


def _repeats(call: Timed, sample_s: float) -> int:
    """Warm up (allocator, thread pool, lazy initialisation), then see how long one call lasts."""
    _sample(call, 1)
    once = min(_sample(call, 1) for _ in range(2))
    return max(1, math.ceil(sample_s / max(once, 1e-9)))


def _sample(call: Timed, repeats: int) -> float:
    if not callable(call):
        return call.sample(repeats)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
