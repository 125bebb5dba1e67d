"""Interleaved timing, on a clock of its own: the structure is tested, never the speed of this machine."""

import gc
import itertools
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from harness import environment
from harness.cell import timing
from harness.cell.timing import (
    MOST_BLOCKS,
    MOST_WAITED,
    PATIENCE,
    ROUNDS,
    SAMPLE_S,
    SPREAD,
    Ratio,
    Samples,
    Stopwatch,
    free_threads,
    interleave,
    paired_ratio,
)  # fmt: skip
from tests.support import ROOT

WARM_UP = 3  # calls before the first sample


class World:
    """Calls that take exactly as long as they say, on a clock that only they move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.log: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def takes(self, name: str, seconds: float | Iterator[float]) -> Callable[[], None]:
        durations = itertools.repeat(seconds) if isinstance(seconds, float) else seconds

        def call() -> None:
            self.log.append(name)
            self.now += next(durations)

        return call


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(
        timing, "time", SimpleNamespace(perf_counter=world.perf_counter, process_time=time.process_time)
    )
    return world


def blocks_of(log: list[str], sides: int) -> list[tuple[str, ...]]:
    """The order of the sides in each block, if each side has one call per sample."""
    timed = log[sides * WARM_UP :]
    return [tuple(timed[at : at + sides]) for at in range(0, len(timed), sides)]


def test_every_side_gets_one_sample_per_block(world: World):
    calls = {name: world.takes(name, 0.5) for name in "abc"}
    samples = interleave(calls, budget_s=0.1, min_blocks=7, max_blocks=9, seed=0)
    assert {name: len(each.seconds) for name, each in samples.items()} == {"a": 7, "b": 7, "c": 7}
    assert all(value == 0.5 for each in samples.values() for value in each.seconds)
    for block in blocks_of(world.log, 3):
        assert sorted(block) == ["a", "b", "c"]
    assert [world.log.count(name) for name in "abc"] == [WARM_UP + 7] * 3


def test_samples_are_seconds_per_call_of_their_own_side(world: World):
    samples = interleave(
        {"slow": world.takes("slow", 2.0**-4), "fast": world.takes("fast", 2.0**-12)},
        budget_s=0.001,
        min_blocks=5,
        max_blocks=5,
        seed=0,
    )
    assert samples["slow"].seconds == [2.0**-4] * 5
    assert samples["fast"].seconds == pytest.approx([2.0**-12] * 5, rel=1e-9)
    # A call shorter than a sample is repeated until it fills one.
    repeats = math.ceil(SAMPLE_S / 2.0**-12)
    assert repeats > 1
    assert world.log.count("fast") == WARM_UP + 5 * repeats
    assert world.log.count("slow") == WARM_UP + 5


def test_a_sample_of_several_calls_may_begin_with_one_that_is_not_timed(world: World):
    short = 2.0**-12
    repeats = math.ceil(SAMPLE_S / short)
    cold = [short] * WARM_UP + [1.0, *[short] * repeats] * 5  # the first call of each sample finds foreign caches
    sides = {"short": world.takes("short", iter(cold)), "long": world.takes("long", 0.5)}
    samples = interleave(sides, budget_s=0.001, min_blocks=5, max_blocks=5, seed=0, warm_up=True)
    assert samples["short"].seconds == pytest.approx([short] * 5, rel=1e-9)
    assert world.log.count("short") == len(cold)
    assert world.log.count("long") == WARM_UP + 5


def test_a_slow_first_call_is_warm_up_and_no_sample(world: World):
    first_slow = world.takes("a", itertools.chain([50.0], itertools.repeat(0.01)))
    samples = interleave({"a": first_slow}, budget_s=0.01, min_blocks=3, max_blocks=3, seed=0)
    assert samples["a"].seconds == pytest.approx([0.01] * 3, rel=1e-9)


def test_a_call_that_takes_no_time_is_still_finite(world: World):
    samples = interleave({"a": lambda: None}, budget_s=0.01, min_blocks=0, max_blocks=0, seed=0)
    assert samples == {"a": Samples([], [])}


@pytest.mark.parametrize(
    ("budget_s", "min_blocks", "max_blocks", "expected"),
    [
        (0.001, 5, 50, 5),  # spent at once: the least
        (1e6, 5, 50, 50),  # never spent: the most
        (8.0, 3, 50, 5),  # 3 s of warm-up, then one second a block
        (1e6, 5, 5, 5),
    ],
)
def test_how_many_blocks(world: World, budget_s: float, min_blocks: int, max_blocks: int, expected: int):
    calls = {"a": world.takes("a", 0.5), "b": world.takes("b", 0.5)}
    samples = interleave(calls, budget_s=budget_s, min_blocks=min_blocks, max_blocks=max_blocks, seed=0)
    assert [len(each.seconds) for each in samples.values()] == [expected] * 2


def orders(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    world = World()
    monkeypatch.setattr(
        timing, "time", SimpleNamespace(perf_counter=world.perf_counter, process_time=time.process_time)
    )
    calls = {name: world.takes(name, 0.5) for name in "abc"}
    interleave(calls, budget_s=1e6, min_blocks=60, max_blocks=60, seed=seed)
    return blocks_of(world.log, 3)


def test_the_order_is_random_and_the_seed_decides_it(monkeypatch: pytest.MonkeyPatch):
    first = orders(1, monkeypatch)
    assert len(first) == 60
    assert set(first) == set(itertools.permutations("abc"))  # each of the six orders turns up
    assert orders(1, monkeypatch) == first
    assert orders(2, monkeypatch) != first


def test_timing_leaves_the_global_random_state_alone(world: World):
    random.seed(5)
    expected = random.Random(5).random()
    interleave({"a": world.takes("a", 0.5)}, budget_s=0.1, min_blocks=5, max_blocks=5, seed=0)
    assert random.random() == expected


# Garbage collection


def test_no_garbage_collection_while_timing(world: World):
    seen = []
    assert gc.isenabled()
    interleave({"a": lambda: seen.append(gc.isenabled())}, budget_s=0.1, min_blocks=3, max_blocks=3, seed=0)
    assert seen
    assert not any(seen)
    assert gc.isenabled()


@pytest.mark.parametrize("fails_at", [1, 3, 5])
def test_garbage_collection_comes_back_after_a_crash(world: World, fails_at: int):
    tick = world.takes("a", 0.5)

    def fails() -> None:
        tick()
        if len(world.log) == fails_at:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        interleave({"a": fails}, budget_s=0.1, min_blocks=9, max_blocks=9, seed=0)
    assert gc.isenabled()


def test_garbage_collection_that_was_off_stays_off(world: World):
    gc.disable()
    try:
        interleave({"a": world.takes("a", 0.5)}, budget_s=0.1, min_blocks=3, max_blocks=3, seed=0)
        assert not gc.isenabled()
    finally:
        gc.enable()


# Others


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that our threads have waited for a processor so far, set by hand."""
    waits = [0.0]
    monkeypatch.setattr(timing, "waited", lambda pids: waits[0])
    return waits


def test_every_sample_knows_how_long_it_waited(world: World, line: list[float]):
    tick = world.takes("a", 0.5)

    def call() -> None:
        tick()
        if len(world.log) > WARM_UP and len(world.log) % 2:
            line[0] += 0.1

    samples = interleave({"a": call}, budget_s=0.1, min_blocks=4, max_blocks=4, seed=0)
    assert samples["a"].waited == pytest.approx([0.0, 0.2, 0.0, 0.2], abs=1e-9)


@pytest.mark.parametrize(("waits", "blocks"), [(0.0, 4), (0.4, 4 * PATIENCE)])
def test_disturbed_blocks_are_made_up_for_while_patience_lasts(
    world: World, line: list[float], waits: float, blocks: int
):
    tick = world.takes("a", 0.5)

    def call() -> None:
        tick()
        line[0] += waits

    warm_up = 0.5 * WARM_UP
    samples = interleave({"a": call}, budget_s=2.0, min_blocks=4, max_blocks=99, seed=0)
    assert len(samples["a"].seconds) == pytest.approx(blocks, abs=warm_up / 0.5)


def test_waiting_in_line_is_seen():
    """Two busy threads of one process on one processor: one waits while the other works."""
    script = """
import os, threading, time
from harness.environment import waited
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
before, end = waited([os.getpid()]), time.monotonic() + 0.5
child = os.fork()
while time.monotonic() < end: pass
if child == 0: os._exit(0)
print(waited([os.getpid()]) - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(done.stdout) > 0.1  # about half of it


def test_processes_that_are_gone_have_waited_for_nothing():
    assert environment.waited([2**22 + 1]) == 0.0


@pytest.mark.parametrize(("others", "expected"), [(0.0, 4), (0.4, 4), (0.6, 3), (2.2, 2), (3.9, 1), (9.0, 1)])
def test_no_more_threads_than_free_cores(monkeypatch: pytest.MonkeyPatch, others: float, expected: int):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert free_threads(4, others) == expected
    assert free_threads(1, others) == 1


# Ratios


def ratio(candidate: list[float], reference: list[float], *, seed: int = 0) -> Ratio:
    """Of samples that nobody disturbed."""
    return paired_ratio(*(Samples(each, [0.0] * len(each)) for each in (candidate, reference)), seed=seed)


def test_a_constant_ratio_is_exact():
    reference = [0.001 * (1 + n) for n in range(21)]
    found = ratio([1.5 * value for value in reference], reference)
    assert found.value == pytest.approx(1.5, rel=1e-12)
    # What two builds of the same code differ by is not in the rounds, and always allowed for.
    assert 1 + SPREAD < found.value / found.lo < 1 + 3 * SPREAD
    assert 1 + SPREAD < found.hi / found.value < 1 + 3 * SPREAD
    assert (found.rounds, found.disturbed) == (21, False)


def test_a_slow_block_slows_both_sides_and_cancels():
    noise = random.Random(0)
    weather = [10 ** noise.uniform(-1, 1) for _ in range(11)]
    found = ratio([0.75 * w for w in weather], weather, seed=3)
    assert found.value == pytest.approx(0.75, rel=1e-12)
    assert found.hi < 0.76


def test_the_fastest_sample_of_each_side_of_a_round_counts():
    blocks = MOST_BLOCKS * ROUNDS
    slow = [9.0 if at % MOST_BLOCKS else 1.0 for at in range(blocks)]  # one sample of each round is not hit
    found = ratio([2.0 * value for value in slow], slow[1:] + slow[:1])
    assert found.value == pytest.approx(2.0, rel=1e-12)
    assert found.rounds == ROUNDS
    assert not found.disturbed


def test_samples_that_waited_do_not_count():
    fast = [0.5 if at % 3 == 0 else 1.0 for at in range(36)]  # too fast to be true: not whole
    whole = Samples(fast, [2 * MOST_WAITED if at % 3 == 0 else 0.0 for at in range(36)])
    found = paired_ratio(whole, Samples([1.0] * 36, [0.0] * 36), seed=0)
    assert found.value == pytest.approx(1.0, rel=1e-12)
    assert whole.typical == 1.0
    assert not found.disturbed


@pytest.mark.parametrize(("hit", "disturbed"), [(5, False), (6, True), (11, True)])
def test_too_few_whole_rounds_are_no_measurement(hit: int, disturbed: bool):
    samples = Samples([1.0] * 11, [1.0] * hit + [0.0] * (11 - hit))
    found = paired_ratio(samples, Samples([1.0] * 11, [0.0] * 11), seed=0)
    assert found.disturbed is disturbed
    assert found.value == 1.0  # what there was is still told
    assert found.rounds == (11 if disturbed else 11 - hit)


def test_rounds_that_disagree_are_no_measurement():
    noise = random.Random(1)
    reference = [math.exp(noise.gauss(0, 0.3)) for _ in range(11)]
    assert ratio([1.0] * 11, reference).disturbed
    assert not ratio([1.0] * 11, [value**0.1 for value in reference]).disturbed


def test_one_wild_sample_does_not_move_it():
    found = ratio([1.0] * 20 + [1000.0], [1.0] * 21)
    assert found.value == 1.0
    assert found.hi < 1.01


def noisy(seed: int, truth: float, blocks: int = 11) -> Ratio:
    noise = random.Random(seed)
    reference = [math.exp(noise.gauss(0, 0.3)) for _ in range(blocks)]
    return ratio([truth * value * math.exp(noise.gauss(0, 0.1)) for value in reference], reference, seed=seed)


def test_the_interval_holds_the_value_and_nearly_always_the_truth():
    found = [noisy(seed, 1.2) for seed in range(200)]
    assert all(one.lo < one.value < one.hi for one in found)
    covered = sum(one.lo <= 1.2 <= one.hi for one in found)
    assert 180 <= covered < 200  # nominally 190; the seeds are fixed, so nothing here is left to chance


def test_more_rounds_narrow_the_interval():
    narrow, wide = noisy(0, 1.0, blocks=23), noisy(0, 1.0, blocks=5)
    assert narrow.hi / narrow.lo < wide.hi / wide.lo


def test_swapping_the_sides_inverts_the_ratio():
    a, b = [1.0, 2.0, 4.0, 3.0, 2.5], [2.0, 2.0, 1.0, 3.5, 1.5]
    assert ratio(a, b).value * ratio(b, a).value == pytest.approx(1.0, rel=1e-12)


def test_the_seed_decides_the_interval():
    assert noisy(4, 1.1) == noisy(4, 1.1)


# The stopwatch


def test_the_stopwatch_adds_up_also_through_a_crash(world: World):
    stopwatch = Stopwatch()
    assert stopwatch.seconds == 0.0
    with stopwatch.running():
        world.now += 2.0
    world.now += 100.0

    def breaks() -> None:
        with stopwatch.running():
            world.now += 0.5
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        breaks()
    assert stopwatch.seconds == 2.5
