"""Interleaved paired timing that knows when it was disturbed.

In each block every side is sampled once, in random order. On a shared machine two runs of the same code timed one after
the other differ by more than 5 % half the time; pairs taken within a few milliseconds of each other do not. Blocks that
follow each other are a round. A sample is whole unless its threads stood in line for a processor that others had. The
fastest whole sample of each side of a round counts, and rounds are what the interval is over: a processor is slowed for
milliseconds to tenths of a second, so that one side of a block is often hit, a whole round hardly ever (docs/gate.md).
Where too few rounds are whole, or they disagree too much, there still are figures, and `disturbed` says what they are.
"""

import gc
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from harness.environment import waited

SAMPLE_S = 1e-3  # a sample repeats the call until it lasts about this long
MOST_WAITED = 0.1  # of a sample, summed over its threads: beyond that it is not whole
ROUNDS, MOST_BLOCKS = 12, 8  # rounds that are aimed at; blocks that a round has at most
LEAST_WHOLE, FEWEST_ROUNDS = 0.5, 3  # of the rounds, and of those with a whole sample of both sides
PATIENCE = 3  # times the budget, for as long as fewer than the least blocks are whole
WIDEST = 0.1  # an interval that reaches farther than this from its ratio tells no speed
# What two builds of the same code differ by for as long as their memory lies where it lies; rounds cannot show it.
SPREAD = 0.003
RESAMPLES = 500
CONFIDENCE = 0.95


class Sampled(Protocol):
    """A side that is not called from here, but in a process of its own."""

    @property
    def pid(self) -> int: ...

    def sample(self, repeats: int) -> float:
        """Seconds per call."""
        ...


Timed = Callable[[], object] | Sampled


@dataclass(frozen=True, slots=True)
class Samples:
    """Of one side, block by block: seconds a call, and the share of them that its threads waited for a processor."""

    seconds: list[float]
    waited: list[float]

    def by_round(self) -> tuple[np.ndarray, np.ndarray]:
        """Logs of the fastest whole sample of each round, NaN where there is none; and of the fastest of any."""
        blocks = min(MOST_BLOCKS, max(1, len(self.seconds) // ROUNDS))
        kept = len(self.seconds) // blocks * blocks
        logs = np.log(np.asarray(self.seconds[:kept])).reshape(-1, blocks)
        whole = np.asarray(self.waited[:kept]).reshape(-1, blocks) <= MOST_WAITED
        fastest = np.where(whole, logs, np.inf).min(axis=1, initial=np.inf)
        return np.where(np.isfinite(fastest), fastest, np.nan), logs.min(axis=1, initial=np.inf)

    @property
    def typical(self) -> float:
        """Seconds of a call that nobody disturbed, as far as there are any."""
        whole, fastest = self.by_round()
        known = whole[~np.isnan(whole)]
        return math.exp(float(middle(known if len(known) else fastest)))


@dataclass(frozen=True, slots=True)
class Ratio:
    """With a 95 % interval over `rounds`; `disturbed`: the figures are what was measured, and no measurement."""

    value: float
    lo: float
    hi: float
    rounds: int = 1
    disturbed: bool = False


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
) -> dict[str, Samples]:
    """One sample per side and block; stops at the budget, but not before min_blocks, nor, for as long as patience
    lasts, before so many are whole.

    With `warm_up` a sample of several calls comes after one that is not timed, which finds the caches as the side
    before left them: else a ratio would hang on which other sides there are.
    """
    order = list(calls)
    shuffle = random.Random(seed).shuffle
    samples = {name: Samples([], []) for name in calls}
    pids = {os.getpid(), *(call.pid for call in calls.values() if not callable(call))}
    whole = 0  # blocks
    deadline = time.perf_counter() + budget_s
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        repeats = {name: _repeats(call, sample_s) for name, call in calls.items()}
        for block in range(max_blocks):
            overtime = (time.perf_counter() - deadline) / max(budget_s, 1e-9)
            if block >= min_blocks and overtime >= (0 if whole >= min_blocks else PATIENCE - 1):
                break
            shuffle(order)
            for name in order:
                if warm_up and repeats[name] > 1:
                    _sample(calls[name], 1)
                before = waited(pids)
                seconds = _sample(calls[name], repeats[name])
                samples[name].seconds.append(seconds)
                samples[name].waited.append(max(0.0, waited(pids) - before) / max(seconds * repeats[name], 1e-9))
            whole += all(each.waited[-1] <= MOST_WAITED for each in samples.values())
    finally:
        if was_collecting:
            gc.enable()
    return samples


def paired_ratio(candidate: Samples, reference: Samples, *, seed: int) -> Ratio:
    """The middle of the log ratios within rounds, with the wider of Student's interval and the bootstrap's."""
    (whole, fastest), (ref_whole, ref_fastest) = candidate.by_round(), reference.by_round()
    logs = whole - ref_whole
    logs, total = logs[~np.isnan(logs)], len(logs)
    disturbed = len(logs) < max(FEWEST_ROUNDS, LEAST_WHOLE * total)
    if disturbed:
        logs = fastest - ref_fastest
    value, below, above = _interval(logs, seed=seed)
    disturbed = disturbed or not max(below, above) <= math.log1p(WIDEST)
    return Ratio(math.exp(value), math.exp(value - below), math.exp(value + above), len(logs), disturbed)


def _interval(logs: np.ndarray, *, seed: int) -> tuple[float, float, float]:
    """The middle, and how far the interval reaches below and above it."""
    from scipy.special import stdtrit  # scipy.stats has it too, and takes a second to import

    R = len(logs)
    picks = np.random.default_rng(seed).integers(R, size=(RESAMPLES, R))
    value, drawn = float(middle(logs)), middle(logs[picks])
    variance = float(drawn.var(ddof=1)) * R / max(1, R - 1)  # a bootstrap of few rounds is too narrow
    half = float(stdtrit(max(1, R - 1), (1 + CONFIDENCE) / 2)) * math.hypot(math.sqrt(variance), SPREAD)
    lowest, highest = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return value, max(half, value - float(lowest)), max(half, float(highest) - value)


def middle(values: np.ndarray) -> np.ndarray:
    """The mean of the middle half, along the last axis. As deaf to wild rounds as timing needs, and smoother than the
    median, of which a bootstrap of few rounds knows the scatter but roughly."""
    n = values.shape[-1]
    cut = (n + 1) // 4  # of three rounds, too, the wild one must not count
    return np.asarray(np.sort(values, axis=-1)[..., cut : n - cut].mean(axis=-1))


def free_threads(asked: int, others: float) -> int:
    """As many threads as there are cores that others leave free: one that waits for a core makes all others wait."""
    return max(1, min(asked, round((os.cpu_count() or 1) - others)))


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
