"""The gate's timing part without a clock: samples are simulated, so that what is true of them is known."""

import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.case import Case
from harness.gate import sampling, statistics, timing
from harness.gate.findings import TimingSettings, TimingVerdict
from harness.gate.process import Died, Refused
from harness.gate.sampling import CellFailed, Plan, Round, Sampler, VersionProcesses
from harness.gate.statistics import HEAD, NOTHING, TWIN, Estimate, Level, adjust, decide, estimate
from harness.gate.versions import Version
from tests.support import python

SETTINGS = TimingSettings(seed=0)
LEVEL = Level(night=0.02, cells=1, looks=1)
CASE = Case("mha", "eager", 16, 2, 2, 8, 8, 1, "none", "float32", "prefill")


def times(
    effect: float = 0.0, *, seed: int = 0, rounds: int = 8, noise: float = 0.02, layout: float = 0.01, blocks: int = 8
) -> np.ndarray:
    """Every process of a round has its own luck with memory, every sample its own delay; all else is the effect."""
    chance = np.random.default_rng(seed)
    logs = np.abs(chance.normal(0, noise, (rounds, blocks, 3))) + chance.normal(0, layout, (rounds, 1, 3))
    logs[..., HEAD] += math.log1p(effect)
    return 1e-3 * np.exp(logs)


def verdict_of(found: Estimate, *, second: Estimate | None = None, setting: TimingSettings = SETTINGS) -> str:
    slower, faster = (adjust([p])[0] for p in (found.p_slower(0.02), found.p_faster(0.02)))
    smallest = found.smallest(setting.min_effect, LEVEL.alone)
    return decide(
        found,
        setting,
        q_slower=slower,
        q_faster=faster,
        smallest=smallest,
        second=None if second is None else second.change,
    )[0]


# ---- what a sample says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [0.0, 0.01, 0.03])
def test_a_slowdown_of_the_minimum_is_called_more_no_oftener_than_the_level(layout: float) -> None:
    found = [estimate(times(0.02, seed=seed, layout=layout), seed=seed).p_slower(0.02) for seed in range(250)]
    # 250 draws at 5 %: 12.5 expected, and more than 22 in one of 200.
    assert sum(p <= 0.05 for p in found) <= 22
    assert sum(p <= 0.5 for p in found) >= 75  # and it is not merely never said


def test_without_a_change_nothing_is_called_slower() -> None:
    found = [estimate(times(seed=seed, rounds=16), seed=seed) for seed in range(250)]
    assert [each.p_slower(0.02) <= 0.001 for each in found].count(True) == 0
    inside = sum(each.lo <= 0 <= each.hi for each in found)
    assert inside >= 232  # of 250, at 95 %


@pytest.mark.parametrize("level", [0.02, 0.0005])
def test_the_smallest_effect_is_seen_four_times_in_five(level: float) -> None:
    smallest = float(np.median([estimate(times(seed=s), seed=s).smallest(0.02, level) for s in range(60)]))
    found = [estimate(times(smallest, seed=1000 + s), seed=s).p_slower(0.02) <= level for s in range(250)]
    # 80 % at least; the error is estimated on the safe side, so that it may be more.
    assert 0.76 <= np.mean(found) <= 0.97
    half = math.sqrt(1 + smallest) - 1
    assert np.mean([estimate(times(half, seed=s), seed=s).p_slower(0.02) <= level for s in range(100)]) < 0.5


def test_the_change_is_that_against_both_bases() -> None:
    sample = np.ones((6, 4, 3))
    sample[..., TWIN], sample[..., HEAD] = 1.21, 1.331
    found = estimate(sample, seed=0)
    assert math.exp(found.change) == pytest.approx(1.21)  # 1.331 / sqrt(1 * 1.21)
    assert math.exp(found.null) == pytest.approx(1.21)
    assert found.blocks == 24


def test_one_wild_round_does_not_move_the_answer() -> None:
    sample = times(rounds=10)
    wild = sample.copy()
    wild[3, :, HEAD] *= 10
    assert estimate(wild, seed=0).change == pytest.approx(estimate(sample, seed=0).change, abs=0.006)


def test_delays_that_hit_most_samples_of_a_side_do_not_move_the_answer() -> None:
    calm = times(rounds=10, noise=0.002, layout=0.002)
    delayed = calm.copy()
    delayed[:, 1:, HEAD] *= 1.3  # all but one block of each round
    assert estimate(delayed, seed=0).change == pytest.approx(estimate(calm, seed=0).change, abs=0.004)
    slower = calm.copy()
    slower[..., HEAD] *= 1.05  # a slowdown is in all of them
    assert estimate(slower, seed=0).change == pytest.approx(estimate(calm, seed=0).change + math.log(1.05), abs=1e-9)


def test_rounds_are_what_is_independent_not_blocks() -> None:
    many = estimate(times(rounds=8, blocks=200, noise=0.001, layout=0.02), seed=0)
    assert many.error > 0.5 * 0.02 * math.sqrt(1.5 / 8)  # 1,600 blocks, and still only eight draws of the layout


def test_a_null_that_scatters_widens_the_interval() -> None:
    sample = times(rounds=12, layout=0.0, noise=0.005)
    wide = sample.copy()
    wide[::2, :, TWIN] *= 1.06  # both bases move apart, the head and their mean do not
    wide[::2, :, 0] /= 1.06
    calm, shaken = estimate(sample, seed=0), estimate(wide, seed=0)
    assert shaken.change == pytest.approx(calm.change, abs=0.003)
    assert shaken.error > 2 * calm.error


def test_a_null_that_is_off_is_taken_from_every_claim() -> None:
    sample = times(0.06, rounds=16, layout=0.002, noise=0.005)
    sample[..., TWIN] *= 1.05
    sample[..., 0] /= 1.05
    found = estimate(sample, seed=0)
    assert found.unexplained > 0.05
    assert found.p_slower(0.02) > 0.5 > 1e-6 > estimate(times(0.06, rounds=16, layout=0.002), seed=0).p_slower(0.02)


# ---- what is no sample -----------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 2)), max_size=80),
    st.sampled_from([math.nan, 0.0, -1.0, math.inf, -math.inf]),
)
@settings(max_examples=40, deadline=None)
def test_what_is_no_time_never_makes_a_pass(places: list[tuple[int, int, int]], value: float) -> None:
    sample = times(rounds=8, noise=0.003, layout=0.001)
    for place in places:
        sample[place] = value
    found = estimate(sample, seed=0)
    lost = len({place[:2] for place in places})
    if found.is_sound:
        # What is left is judged as if the rest had never been.
        assert math.isfinite(found.change) and found.blocks <= 64 - lost
        assert abs(found.change) < 0.01 and verdict_of(found) in ("pass", "inconclusive")
    else:
        assert verdict_of(found) == "inconclusive"


def test_too_little_is_inconclusive() -> None:
    nothing = times()
    nothing[:] = math.nan
    for found in (estimate(nothing, seed=0), estimate(times(rounds=5), seed=0), NOTHING):
        assert not found.is_sound
        assert verdict_of(found) == "inconclusive"
        assert math.isnan(found.p_slower(0.02)) and math.isnan(found.smallest(0.02, 0.01))
    half = times(rounds=14)
    half[6:] = 0.0
    assert not estimate(half, seed=0).is_sound  # most of the rounds are gone: who knows why


def test_a_second_measurement_needs_fewer_rounds_but_some() -> None:
    assert statistics.change_alone(times(0.1, rounds=3)) == pytest.approx(math.log(1.1), abs=0.04)
    assert math.isnan(statistics.change_alone(times(0.1, rounds=2)))
    broken = times(0.1, rounds=4)
    broken[:, :5, HEAD] = 0.0
    assert math.isnan(statistics.change_alone(broken))


# ---- Benjamini and Hochberg ------------------------------------------------------------------------------------------


def test_adjusts_over_all_cells() -> None:
    # Benjamini and Hochberg (1995), their example of 15 p-values: at 5 % the four smallest are discoveries.
    p = [
        0.0001,
        0.0004,
        0.0019,
        0.0095,
        0.0201,
        0.0278,
        0.0298,
        0.0344,
        0.0459,
        0.3240,
        0.4262,
        0.5719,
        0.6528,
        0.759,
        1.0,
    ]
    q = adjust(p)
    assert [at for at, value in enumerate(q) if value <= 0.05] == [0, 1, 2, 3]
    assert q[0] == pytest.approx(15 * 0.0001)
    assert adjust([]) == []


def test_a_cell_without_a_p_value_still_counts() -> None:
    assert adjust([0.01, math.nan, math.nan, math.nan]) == pytest.approx([0.04, 1, 1, 1])
    assert adjust([5 * 0.3]) == [1.0]


def test_the_level_is_shared_among_cells_and_looks() -> None:
    assert Level(night=0.02, cells=100, looks=5).alone == pytest.approx(4e-5)


# ---- the verdict -----------------------------------------------------------------------------------------------------

QUIET = Estimate(0.0, 0.003, -0.006, 0.006, 0.0, -0.005, 0.005, -0.004, freedom=31, blocks=128)
SLOW = replace(QUIET, change=math.log(1.10), lo=0.08, hi=0.11)


def test_verdicts() -> None:
    assert verdict_of(QUIET) == "pass"
    assert verdict_of(SLOW, second=SLOW) == "regression"
    fast = replace(QUIET, change=-math.log(1.10), lo=-0.11, hi=-0.08)
    assert verdict_of(fast, second=fast) == "improvement"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (replace(QUIET, error=0.02), "too noisy"),
        (replace(QUIET, change=0.03, hi=0.06, error=0.005), "not ruled out"),
        (replace(QUIET, null=0.03, null_lo=-0.001, null_hi=0.061), "differs from itself"),
        (replace(QUIET, null=-0.03, null_lo=-0.061, null_hi=0.001), "differs from itself"),
        (replace(QUIET, null=math.nan), "differs from itself"),
        (replace(QUIET, hi=math.nan), "not ruled out"),
        (replace(QUIET, error=math.nan), "too noisy"),
    ],
)
def test_what_is_not_shown_is_inconclusive(found: Estimate, why: str) -> None:
    # Seen from a loose budget, so that the rule in question is the one that speaks.
    smallest = found.smallest(0.02, 0.02)
    verdict, reason = decide(found, SETTINGS, q_slower=1.0, q_faster=1.0, smallest=smallest, second=None)
    assert verdict == "inconclusive"
    assert why in reason


def test_a_regression_must_be_seen_again() -> None:
    for second in (None, QUIET, replace(SLOW, change=math.log(1.019)), replace(SLOW, change=math.nan)):
        assert verdict_of(SLOW, second=second) == "inconclusive"


def test_a_small_slowdown_is_no_regression_however_sure() -> None:
    sure = replace(QUIET, change=math.log(1.015), error=0.0001, lo=0.0148, hi=0.0151)
    assert verdict_of(sure, second=sure) == "pass"


# ---- the night -------------------------------------------------------------------------------------------------------


class Nobody(VersionProcesses):
    """A crew without processes: the sampler is replaced as well."""

    def muster(self) -> None:
        pass


def night(
    monkeypatch: pytest.MonkeyPatch,
    effects: list[list[float]],
    *,
    noise: float = 0.01,
    layout: float = 0.005,
    round_s: float = 0.0,
    fails: dict[int, CellFailed] | None = None,
) -> list[TimingVerdict]:
    """Judges cells whose first measurement has the first effect, and the second (in fresh processes) the other. With
    `round_s` a made-up clock goes on by so much in each round. `fails` are the starts of a cell's sampler that do."""
    cases = [replace(CASE, seq_len=at + 1) for at in range(len(effects))]
    started: dict[str, int] = {}
    now = [0.0]
    if round_s:
        clock = SimpleNamespace(perf_counter=lambda: now[0])
        monkeypatch.setattr(sampling, "time", clock)
        monkeypatch.setattr(timing, "time", clock)

    class Simulated(Sampler):
        def __init__(self, crew: VersionProcesses, case: Case, settings: TimingSettings, **how: object) -> None:
            self._settings = settings
            self.effect = effects[case.seq_len - 1][min(started.setdefault(case.case_id, 0), 1)]
            started[case.case_id] += 1
            self.start = started[case.case_id]
            self.chance = case.seq_len * 1000 + 500 * (started[case.case_id] - 1)

        def round(self) -> Round:
            self.chance += 1
            now[0] += round_s
            if fails and self.start in fails:
                raise fails[self.start]
            one = times(self.effect, seed=self.chance, rounds=1, noise=noise, layout=layout)[0]
            return Round(one, (1e-3,))

    monkeypatch.setattr(timing, "VersionProcesses", Nobody)
    monkeypatch.setattr(timing, "Sampler", Simulated)
    here = Version("here", Path("/nowhere"))
    return list(timing.judge_times(here, here, cases, SETTINGS))


def test_a_night_finds_what_is_slower_and_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    found = night(monkeypatch, [[0.0, 0.0]] * 20 + [[0.10, 0.10], [0.05, 0.05], [-0.10, -0.10]])
    assert [each.verdict for each in found] == ["pass"] * 20 + ["regression", "regression", "improvement"]
    slow = found[20]
    assert slow.remeasured and slow.change is not None and slow.q_value is not None
    assert slow.change == pytest.approx(0.10, abs=0.01) and slow.q_value <= SETTINGS.level
    assert all(each.smallest is not None and each.smallest <= 0.05 and not each.remeasured for each in found[:20])
    assert found[0].blocks == 8 * sampling.LOOKS[0]  # a clear case stops at the first look


def test_a_slowdown_that_does_not_come_again_is_no_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    found = night(monkeypatch, [[0.0, 0.0]] * 5 + [[0.10, 0.0]])
    assert found[5].verdict == "inconclusive"
    assert found[5].remeasured


def test_a_noisy_night_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    found = night(monkeypatch, [[0.0, 0.0]] * 6, noise=0.4)
    assert {each.verdict for each in found} == {"inconclusive"}
    assert all(each.smallest is not None and each.smallest > 0.05 for each in found)


def test_a_small_but_clear_slowdown_of_a_quiet_cell_is_a_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interval ends below 5 %: nothing that must be seen, and yet shown to be more than 2 %.
    found = night(monkeypatch, [[0.04, 0.04]] * 4 + [[0.0, 0.0]] * 4, noise=0.003, layout=0.003)
    assert [each.verdict for each in found] == ["regression"] * 4 + ["pass"] * 4
    assert all(each.remeasured for each in found[:4]) and not any(each.remeasured for each in found[4:])


def test_what_could_be_significant_is_not_clearly_unchanged() -> None:
    near = replace(QUIET, change=math.log(1.03), error=0.0045, hi=math.log(1.04))
    level = Level(night=0.01, cells=1, looks=1)
    assert 0.01 < near.p_slower(0.02) < statistics.NEAR
    assert not statistics.is_clearly_unchanged(near, TimingSettings(must_see=0.2), level)
    assert not statistics.is_clearly_unchanged(replace(near, change=-near.change), TimingSettings(must_see=0.2), level)
    assert statistics.is_clearly_unchanged(replace(near, change=0.0), TimingSettings(must_see=0.2), level)


def test_a_doubled_cell_is_a_regression_on_a_busy_machine_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # A round takes 1.3 s: with overtime 6 s have five, of six that it takes.
    (doubled,) = night(monkeypatch, [[1.0, 1.0]], round_s=1.3)
    assert doubled.verdict == "regression" and doubled.remeasured, doubled
    (same,) = night(monkeypatch, [[0.0, 0.0]], round_s=1.3)
    assert same.verdict == "inconclusive" and "5 of the 6 rounds" in same.reason and "--seconds" in same.reason
    assert same.change == pytest.approx(0.0, abs=0.02) and same.lo is None and same.p_value is None
    assert same.seconds == pytest.approx(6.5)
    (endless,) = night(monkeypatch, [[0.5, 0.5]], round_s=10.0)
    assert endless.verdict == "inconclusive" and endless.change == pytest.approx(0.5, abs=0.1)
    assert endless.seconds <= (1 + sampling.LONG_OVERTIME) * 3.0 + 10.0  # and the night ends


@pytest.mark.parametrize(("effect", "round_s"), [(2.0, 10.0), (30.0, 100.0)])
def test_a_cell_too_slow_to_be_judged_is_a_regression_where_there_is_no_doubt(
    monkeypatch: pytest.MonkeyPatch, effect: float, round_s: float
) -> None:
    (found,) = night(monkeypatch, [[effect, effect]], round_s=round_s)
    assert found.verdict == "regression" and found.reason.startswith(f"{1 + effect:.0f}."), found
    assert "times as slow, in every round of the" in found.reason


def test_beyond_doubt() -> None:
    assert statistics.is_beyond_doubt(times(1.5, rounds=3))
    assert not statistics.is_beyond_doubt(times(1.5, rounds=2))  # two rounds may be hit by the same trouble
    assert statistics.is_beyond_doubt(times(12.0, rounds=1))
    assert not statistics.is_beyond_doubt(times(0.8, rounds=5))
    once = times(1.5, rounds=4)
    once[2, :, HEAD] /= 2.0  # one round that is not
    assert not statistics.is_beyond_doubt(once)
    twin = times(1.5, rounds=4)
    twin[..., TWIN] *= 2.5  # a base is as slow
    assert not statistics.is_beyond_doubt(twin)
    for nothing in (times(rounds=3) * math.nan, times(1.5, rounds=4)[:0]):
        assert not statistics.is_beyond_doubt(nothing)


def test_a_head_that_refuses_is_asked_once_more_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = CellFailed("head", "MemoryError", died=False)
    (once,) = night(monkeypatch, [[0.0, 0.0]], fails={1: refused})
    assert once.verdict == "pass"
    (again,) = night(monkeypatch, [[0.0, 0.0]], fails={1: refused, 2: refused})
    assert again.verdict == "regression" and "MemoryError" in again.reason


def test_a_base_that_refuses_when_measured_again_is_not_called_new(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = CellFailed("base", "MemoryError", died=False)
    (found,) = night(monkeypatch, [[0.1, 0.1]], fails={2: refused})
    assert found.verdict == "inconclusive" and "refused it when measured again: MemoryError" in found.reason


def test_what_was_measured_is_judged_though_no_process_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Once(Nobody):
        musters = 0

        def muster(self) -> None:
            Once.musters += 1
            if Once.musters > 1:
                raise CellFailed("base", "out of memory", died=True)

    monkeypatch.setitem(globals(), "Nobody", Once)
    found = night(monkeypatch, [[0.0, 0.0], [0.1, 0.1]])
    assert [each.verdict for each in found] == ["pass", "inconclusive"]
    assert "not measured again" in found[1].reason and Once.musters == 2


def test_cells_that_hang_when_measured_again_do_not_take_the_whole_night(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = CellFailed("head", "no answer within 120 s", died=True, hung=True)
    found = night(monkeypatch, [[0.1, 0.1]] * 6, fails={2: hung})
    assert sorted(each.verdict for each in found) == ["inconclusive"] * 3 + ["regression"] * 3
    assert all("not measured again" in each.reason for each in found if each.verdict == "inconclusive")


def test_a_process_that_dies_when_measured_again_is_given_a_second_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = CellFailed("head", "killed by SIGKILL", died=True)
    (once,) = night(monkeypatch, [[0.1, 0.1]], fails={2: killed})
    assert once.verdict == "regression" and once.remeasured and "slower" in once.reason
    (again,) = night(monkeypatch, [[0.1, 0.1]], fails={2: killed, 3: killed})
    assert again.reason == "head died: killed by SIGKILL"


def test_a_head_that_hangs_does_not_take_the_whole_night(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = CellFailed("head", "no answer within 120 s", died=True, hung=True)
    found = night(monkeypatch, [[0.0, 0.0]] * 8, round_s=120.0, fails=dict.fromkeys(range(1, 9), hung))
    assert sorted(each.verdict for each in found) == ["inconclusive"] * 5 + ["regression"] * 3
    assert sum(each.seconds for each in found) == 3 * 120.0  # each once
    assert all("3 cells hung before it" in each.reason for each in found if each.verdict == "inconclusive")


def test_two_witnesses_count_as_two_where_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "PROCESS_SPREAD", 0.0)
    calm = times(rounds=12, noise=0.001, layout=0.0)
    alone = calm.copy()
    alone[..., HEAD] *= np.exp(np.random.default_rng(0).normal(0, 0.05, (12, 1)))  # the head alone scatters
    assert estimate(alone, seed=0).freedom == 11
    both = [estimate(times(rounds=12, seed=seed), seed=seed).freedom for seed in range(40)]
    assert min(both) >= 11 and max(both) <= 22 and np.median(both) >= 16


def test_what_is_no_estimate_makes_an_error_surer() -> None:
    assert statistics._freedom(8, 1.0, 1.0, known=0.0) == 14
    assert statistics._freedom(8, 1.0, 1.0, known=1.0) == 56  # half of the variance is a setting
    assert estimate(np.ones((8, 4, 3)), seed=0).freedom == statistics.MOST_FREEDOM  # all of it


def test_most_calls_slower_is_no_pass_though_the_fastest_are_not() -> None:
    sample = times(rounds=16, noise=0.002, layout=0.002)
    assert verdict_of(estimate(sample, seed=0)) == "pass"
    sample[:, 1:, HEAD] *= 1.3  # all but one block of each round
    found = estimate(sample, seed=0)
    assert abs(found.change) < 0.01 and found.typical_lo > math.log(1.2)
    assert verdict_of(found) == "inconclusive"
    assert not statistics.is_clearly_unchanged(found, SETTINGS, LEVEL)


def test_one_wild_round_of_three_does_not_confirm() -> None:
    sample = times(rounds=3, noise=0.001, layout=0.001)
    sample[1, :, HEAD] *= 2
    assert abs(statistics.change_alone(sample)) < 0.01


@pytest.mark.parametrize(
    ("failure", "verdict", "reason"),
    [
        (CellFailed("head", "killed by SIGSEGV", died=True), "regression", "head died: killed by SIGSEGV"),
        (CellFailed("head", "ValueError: no", died=False), "regression", "the base can: ValueError: no"),
        (CellFailed("base", "killed by SIGKILL", died=True), "inconclusive", "base died"),
        (CellFailed("base", "KeyError: 'mla'", died=False), "inconclusive", "the base cannot build this cell"),
        (CellFailed("both", "Unsupported", died=False), "inconclusive", "neither"),
    ],
)
def test_a_cell_that_fails_has_a_reason(failure: CellFailed, verdict: str, reason: str) -> None:
    cell = timing._CellTimes(CASE, failure=failure)
    (found,) = timing._judge([cell], SETTINGS, LEVEL, seed=0)
    assert found.verdict == verdict
    assert reason in found.reason
    assert found.change is None and found.p_value is None


# ---- sampling --------------------------------------------------------------------------------------------------------


class Clock(VersionProcesses):
    """Processes that answer at once, and note what they were asked."""

    def __init__(self, seconds: float) -> None:
        super().__init__(Version("b", Path("/b")), Version("h", Path("/h")), SETTINGS)
        self.seconds, self.asked = seconds, list[tuple[str, int, str, dict]]()

    def member(self, side: str, at: int):
        crew = self

        class Asked:
            def ask(self, do: str, timeout_s: float, **what: dict) -> dict:
                crew.asked.append((side, at, do, what))
                return {"seconds": crew.seconds, "built": True}

        return Asked()


TWINS = [("base", 0), ("base", 1), ("head", 0)]


def sampler(crew: VersionProcesses) -> Sampler:
    return Sampler(crew, CASE, SETTINGS, chance=random.Random(0))


def test_every_block_has_every_side_once_in_random_order() -> None:
    crew = Clock(1e-3)
    chosen = sampler(crew)
    first = chosen.round()
    assert first.times.shape == (sampling.BLOCKS, 3)
    timed = [(side, at) for side, at, do, what in crew.asked if do == "time" and what["sample"]["side"] == "candidate"]
    blocks = [tuple(timed[at : at + 3]) for at in range(3, len(timed), 3)]  # three samples made the plan
    assert all(len(set(block)) == 3 and sum(side == "base" for side, _ in block) == 2 for block in blocks)
    assert len(set(blocks)) > 1
    assert len(first.reference) == sampling.BLOCKS / sampling.REFERENCE_EVERY


def test_every_round_is_built_anew_elsewhere_in_memory_and_in_other_processes() -> None:
    crew = Clock(1e-3)
    chosen = sampler(crew)
    for _ in range(6):
        chosen.round()
    built = [(side, at, what["cell"]) for side, at, do, what in crew.asked if do == "build"]
    assert len(built) == 18
    assert len({cell["shift"] for _, _, cell in built}) == 18
    assert {at for side, at, _ in built if side == "head"} == set(range(sampling.PROCESSES))
    assert {at for side, at, _ in built if side == "base"} == set(range(sampling.PROCESSES))
    plans = {(what["sample"]["calls"], what["sample"]["warm"]) for _, _, do, what in crew.asked[8:] if do == "time"}
    assert len(plans) == 1  # the same for all sides


def test_no_kernel_of_a_user_can_stop_the_clock() -> None:
    stopped = Clock(0.0)  # whatever it does takes no time, by its own clock
    ours, theirs = CASE, replace(CASE, kernel="/somewhere/kernels.py:fast")
    plan = Plan(calls=2, warm=1, blocks=1)
    sampled = [Sampler(stopped, case, SETTINGS, chance=random.Random(0))._sample(TWINS[0], "candidate", plan)
               for case in (ours, theirs)]  # fmt: skip
    assert sampled[0] == 0.0 and sampled[1] > 0.0


@pytest.mark.parametrize("seconds", [2e-5, 1e-3, 5e-3, 2e-2, 0.2])
def test_the_plan_fits_the_budget(seconds: float) -> None:
    plan = sampler(Clock(seconds))._make_plan(TWINS)
    assert plan.blocks >= sampling.FEWEST_BLOCKS
    assert plan.calls * seconds >= 1e-3
    whole = sampling.LOOKS[0] * plan.blocks * 3 * (plan.calls + plan.warm) * seconds
    assert whole <= SETTINGS.seconds or plan == Plan(1, 0, sampling.FEWEST_BLOCKS)


def test_a_head_that_is_many_times_slower_is_planned_for() -> None:
    class SlowHead(Clock):
        def __init__(self, head: float) -> None:
            super().__init__(2e-3)
            self.head = head

        def member(self, side: str, at: int):
            self.seconds = self.head if side == "head" else 2e-3
            return super().member(side, at)

    plan = sampler(SlowHead(60e-3))._make_plan(TWINS)
    rounds_s = statistics.MIN_ROUNDS * plan.blocks * (plan.calls + plan.warm) * 60e-3
    assert rounds_s <= sampling.FIRST * SETTINGS.seconds
    usual = sampler(Clock(2e-3))._make_plan(TWINS)
    assert sampler(SlowHead(6e-3))._make_plan(TWINS) == usual != plan  # three times slower has rounds enough

    class ColdHead(Clock):
        def member(self, side: str, at: int):
            first = side == "head" and not any(asked[0] == "head" for asked in self.asked)
            self.seconds = 60e-3 if first else 2e-3
            return super().member(side, at)

    assert sampler(ColdHead(2e-3))._make_plan(TWINS) == usual  # one call's bad luck is no plan


def test_no_side_is_favoured_by_its_place() -> None:
    crew = Clock(1e-3)
    chosen = sampler(crew)
    built: list[list[str]] = []
    for _ in range(40):
        crew.asked.clear()
        chosen.round()
        built.append([side for side, _, do, _ in crew.asked if do == "build"])
    assert built[0] == ["base", "base", "head"]  # what the base refuses is no fault of the head's
    last = [order[-1] for order in built[1:]]
    assert 4 <= last.count("head") <= 24  # of 39, a third expected
    crew.asked.clear()
    for _ in range(40):
        chosen.round()
    asked = [side for side, _, do, what in crew.asked if do == "time" and what["sample"]["side"] == "reference"]
    assert len(asked) == 80 and 14 <= asked.count("head") <= 40


class Silent:
    """A process that is started; it may not answer the greeting."""

    def __init__(self, answers: bool) -> None:
        self.answers, self.greeted, self.killed = answers, False, False

    def greet(self) -> None:
        if not self.answers:
            raise Died("exit code 1")
        self.greeted = True

    def kill(self) -> None:
        self.killed = True


def test_a_process_that_was_not_greeted_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Silent] = []

    def start(self: VersionProcesses, side: str) -> Silent:
        started.append(Silent(len(started) != 1))  # the second does not answer
        return started[-1]

    monkeypatch.setattr(VersionProcesses, "_start", start)
    crew = VersionProcesses(Version("b", Path("/b")), Version("h", Path("/h")), SETTINGS)
    with pytest.raises(CellFailed, match="does not start: exit code 1"):
        crew.muster()
    assert [each.killed for each in started] == [False] + [True] * (2 * sampling.PROCESSES - 1)
    crew.muster()
    members = [crew.member(side, at) for side in ("base", "head") for at in range(sampling.PROCESSES)]
    assert all(isinstance(each, Silent) and each.greeted and not each.killed for each in members)


def test_a_head_that_refused_is_replaced_and_a_base_is_not() -> None:
    lost: list[tuple[str, int]] = []

    class Refusing(Clock):
        def member(self, side: str, at: int):
            class Asked:
                def ask(self, do: str, timeout_s: float, **what: dict) -> dict:
                    raise Refused("no")

            return Asked()

        def lose(self, side: str, at: int) -> None:
            lost.append((side, at))

    for side in ("base", "head"):
        with pytest.raises(CellFailed, match="no"):
            sampler(Refusing(1e-3))._ask((side, 1), "build")
    assert lost == [("head", 1)]


def test_a_users_file_is_each_versions_own_inside_the_tree(tmp_path: Path) -> None:
    head, base = tmp_path / "head", tmp_path / "base"
    crew = VersionProcesses(Version("base", base), Version("head", head), SETTINGS)
    inside, outside = head / "kernels" / "mine.py", tmp_path / "mine.py"
    assert crew.kernel(f"{inside}:fast", "base") == f"{base / 'kernels' / 'mine.py'}:fast"
    assert crew.kernel(f"{inside}:fast", "head") == f"{inside}:fast"
    assert crew.kernel(f"{outside}:fast", "base") == crew.kernel(f"{outside}:fast", "head") == f"{outside}:fast"
    assert crew.kernel("eager", "base") == "eager"
    assert crew.kernel("package.module:fast", "base") == "package.module:fast"


def test_importing_needs_no_torch() -> None:
    code = "import sys, harness.gate.timing, harness.commands.gate; sys.exit('torch' in sys.modules)"
    assert python("-c", code).code == 0


def test_looks_are_a_fixed_schedule() -> None:
    assert list(sampling.LOOKS) == sorted(sampling.LOOKS) and sampling.LOOKS[0] >= statistics.MIN_ROUNDS
