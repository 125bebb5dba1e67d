"""Samples -> a verdict. Times are compared within a round, by the fastest sample of each side, and rounds are what is
independent: for each the cell was built anew, so that memory lies elsewhere. scipy is imported where it is used: it
takes a second.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.cell.timing import middle
from harness.gate.findings import TimingSettings, TimingWord

RESAMPLES = 500
FLAG = 1e-3
NEAR = 0.05  # a cell with a p-value below this is not clearly unchanged, however narrow its interval
# How often the smallest effect is aimed to be seen, for the word to be 0.8: in simulations of 8 to 27 rounds it was
# seen in 0.84 to 0.95 of ordinary nights, and in 0.61 to 0.83 where an eighth of the rounds was hit as a whole.
SEEN = 0.9
CONFIDENCE = 0.95  # of the interval, both sides together
LOWER = (1 - CONFIDENCE) / 2
FAR = 2.0  # times what must be seen
BEYOND_DOUBT = ((2.0, 3), (10.0, 1))  # so many times as slow as both bases, in so many rounds and all there are
FEWEST_AGAIN = 3  # rounds of a second measurement: it is asked for its side of the limit alone
MIN_ROUNDS = 6  # fewer leave a standard error that is a guess
# What processes of the same code differ by for as long as they live, and what a few of them cannot show by themselves.
PROCESS_SPREAD = 0.003
MOST_FREEDOM = 1000  # Student's t is a normal distribution long before
BASE, TWIN, HEAD = range(3)  # the sides of a block; the twin is a second process of the base


@dataclass(frozen=True, slots=True)
class Estimate:
    """In log ratios. `freedom` is 0 where there is too little to say anything."""

    change: float
    error: float  # standard error
    lo: float
    hi: float
    null: float
    null_lo: float
    null_hi: float
    typical_lo: float  # what most samples, not the fastest alone, changed by at the least
    freedom: int
    blocks: int

    @property
    def is_sound(self) -> bool:
        return self.freedom > 0

    @property
    def unexplained(self) -> float:
        """What two processes of the same code differ by and noise does not explain: no claim may be finer."""
        return max(0.0, self.null_lo, -self.null_hi)

    def p_slower(self, effect: float) -> float:
        """One-sided, against a slowdown of exactly the effect (relative)."""
        return self._p(self.change - math.log1p(effect) - self.unexplained)

    def p_faster(self, effect: float) -> float:
        return self._p(-self.change - math.log1p(effect) - self.unexplained)

    def _p(self, beyond: float) -> float:
        from scipy import stats

        return float(stats.t.sf(beyond / self.error, self.freedom)) if self.is_sound else math.nan

    def smallest(self, effect: float, level: float) -> float:
        """The smallest relative slowdown that a test at this level would have seen four times in five."""
        if not self.is_sound:
            return math.nan
        return math.expm1(math.log1p(effect) + self.unexplained + _reach(level, self.freedom) * self.error)


@functools.cache
def _reach(level: float, freedom: int) -> float:
    """How many standard errors beyond the limit an effect must lie to be seen four times in five. The error is an
    estimate itself, which scatters with the effect's: hence the noncentral t and not a sum of two quantiles."""
    from scipy import optimize, stats

    limit = float(stats.t.isf(level, freedom))
    return float(optimize.brentq(lambda beyond: stats.nct.sf(limit, freedom, beyond) - SEEN, 0.0, 3 * abs(limit) + 5))


_NAN = math.nan
NOTHING = Estimate(_NAN, _NAN, _NAN, _NAN, _NAN, _NAN, _NAN, _NAN, freedom=0, blocks=0)


def estimate(times: np.ndarray, *, seed: int) -> Estimate:
    """`times` is (rounds, blocks, 3): seconds of base, its twin and head. A block with a sample that is no time is
    left out; NOTHING if too many are."""
    logs = _whole(times)
    R = len(logs)
    if R < MIN_ROUNDS or len(times) > 2 * R:
        return NOTHING
    fastest = _fastest(logs)
    picks = np.random.default_rng(seed).integers(R, size=(RESAMPLES, R))
    change = _Resampled.of(_change(fastest), picks)
    null = _Resampled.of(fastest[:, TWIN] - fastest[:, BASE], picks)
    null_half = _half_width(math.hypot(math.sqrt(_unbiased(null.variance, R)), PROCESS_SPREAD), R - 1)
    unexplained = max(0.0, abs(null.middle) - null_half)
    error, freedom = _error(R, own=change.variance, witness=0.75 * null.variance)
    half = _half_width(error, freedom)
    lowest, highest = np.quantile(change.drawn, [LOWER, 1 - LOWER])
    typical = _Resampled.of(np.nanmedian(_change(logs), axis=1), picks)
    return Estimate(
        change=change.middle,
        error=error,
        # The wider of Student's interval and the bootstrap's own.
        lo=min(change.middle - half, float(lowest)) - unexplained,
        hi=max(change.middle + half, float(highest)) + unexplained,
        null=null.middle,
        null_lo=null.middle - null_half,
        null_hi=null.middle + null_half,
        typical_lo=float(np.quantile(typical.drawn, LOWER)),
        freedom=freedom,
        blocks=int((~np.isnan(logs[..., HEAD])).sum()),
    )


@dataclass(frozen=True, slots=True)
class _Resampled:
    """The middle of one number a round, and the middles of bootstrap draws of rounds."""

    middle: float
    drawn: np.ndarray
    variance: float

    @classmethod
    def of(cls, values: np.ndarray, picks: np.ndarray) -> "_Resampled":
        drawn = middle(values[picks])
        return cls(float(middle(values)), drawn, float(drawn.var(ddof=1)))


def _half_width(error: float, freedom: int) -> float:
    """Of Student's interval at CONFIDENCE."""
    from scipy import stats

    return float(stats.t.isf(LOWER, freedom)) * error


def _unbiased(variance: float, rounds: int) -> float:
    return rounds / (rounds - 1) * variance  # a bootstrap of few rounds is too narrow


def _error(rounds: int, *, own: float, witness: float) -> tuple[float, int]:
    """The change's standard error and its degrees of freedom, from two variances of it.

    `own` is what the change itself scattered by. `witness` is 3/4 of the null's variance, which is the change's where
    the code is equal: one side against the mean of two, not one against one. It widens the error where it saw more.
    """
    scatter = _unbiased(max(own, (own + witness) / 2), rounds)
    known = PROCESS_SPREAD**2 / scatter if scatter > 0 else math.inf
    return math.sqrt(scatter + PROCESS_SPREAD**2), _freedom(rounds, own, witness, known=known)


def _freedom(rounds: int, one: float, other: float, *, known: float) -> int:
    """Degrees of freedom of the error (Welch and Satterthwaite). Two witnesses of R - 1 each: as good as both where
    they agree, as one where one of them says it all. `known` is what of the variance is no estimate, over the rest.
    """
    squares = one**2 + other**2
    agreement = (one + other) ** 2 / squares if squares > 0 else 1.0
    return max(1, math.floor(min((rounds - 1) * agreement * (1 + known) ** 2, MOST_FREEDOM)))


def _whole(times: np.ndarray) -> np.ndarray:
    """Logs, with NaN for a block of which a side is no time; without rounds of which less than half is left."""
    logs = np.log(np.where(np.isfinite(times) & (times > 0), times, np.nan))
    logs[np.isnan(logs).any(axis=2)] = np.nan
    return np.asarray(logs[2 * (~np.isnan(logs[..., HEAD])).sum(axis=1) >= max(1, logs.shape[1])])


def _fastest(logs: np.ndarray) -> np.ndarray:
    """Each side's shortest sample of every round, (rounds, 3).

    A processor that others share is slowed for milliseconds to tenths of a second: a block is often hit on one side
    alone, a round, in which all sides have their turns all along, hardly ever (docs/gate.md).
    """
    return np.asarray(np.nanmin(logs, axis=1))


def _change(logs: np.ndarray) -> np.ndarray:
    """Of the head against both bases; sides are the last axis."""
    return np.asarray(logs[..., HEAD] - (logs[..., BASE] + logs[..., TWIN]) / 2)


def raw_change(times: np.ndarray) -> float:
    """The change by itself, without a claim how sure it is. NaN if most of it is missing."""
    logs = _whole(times)
    return float(middle(_change(_fastest(logs)))) if len(logs) and 2 * len(logs) >= len(times) else math.nan


def change_alone(times: np.ndarray) -> float:
    """The change of a second measurement, for which fewer rounds do. NaN if there is next to none."""
    return raw_change(times) if len(_whole(times)) >= FEWEST_AGAIN else math.nan


def seconds_of(times: np.ndarray) -> tuple[float, float]:
    """Of a call in the base and in the head, by the samples that are compared. NaN if there are none."""
    logs = _whole(times)
    if not len(logs):
        return math.nan, math.nan
    fastest = _fastest(logs)
    base, head = (fastest[:, BASE] + fastest[:, TWIN]) / 2, fastest[:, HEAD]
    return math.exp(float(middle(base))), math.exp(float(middle(head)))


def is_far(times: np.ndarray, settings: TimingSettings) -> bool:
    """Too few rounds to judge, but so far beyond what must be seen that more of them are worth their time."""
    return abs(raw_change(times)) > FAR * math.log1p(settings.must_see)


def is_beyond_doubt(times: np.ndarray) -> bool:
    """Too few rounds for a standard error, but the head is so much slower in all of them that none is needed."""
    logs = _whole(times)
    if not len(logs) or 2 * len(logs) < len(times):
        return False
    fastest = _fastest(logs)
    least = float((fastest[:, HEAD] - fastest[:, :HEAD].max(axis=1)).min())
    return any(len(logs) >= rounds and least >= math.log(factor) for factor, rounds in BEYOND_DOUBT)


@dataclass(frozen=True, slots=True)
class Level:
    """The error level of one test: that of the night, shared among its cells and the looks at each of them."""

    night: float
    cells: int
    looks: int

    @property
    def alone(self) -> float:
        """For a cell that is the only one to have changed; what Benjamini and Hochberg ask of the smallest p-value."""
        return self.night / (self.cells * self.looks)


def is_clearly_unchanged(found: Estimate, settings: TimingSettings, level: Level) -> bool:
    """Enough has been measured: slowdowns that must be seen would be, and are ruled out; nor is a smaller one at hand,
    which might be a regression if it is seen again."""
    if not found.is_sound or _smaller_p(found, settings) <= max(NEAR, level.night):
        return False
    sees = found.smallest(settings.min_effect, level.alone) <= settings.must_see
    ruled_out = all(math.expm1(bound) <= settings.must_see for bound in (found.hi, found.typical_lo))
    return sees and ruled_out and found.lo >= -math.log1p(settings.must_see)


def is_flagged(found: Estimate, settings: TimingSettings) -> bool:
    """Whether it looks changed so much that the rest of the time is better spent on measuring it again."""
    return _smaller_p(found, settings) <= FLAG


def _smaller_p(found: Estimate, settings: TimingSettings) -> float:
    return min(found.p_slower(settings.min_effect), found.p_faster(settings.min_effect))


def adjust(p_values: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg, over all cells of the night; one without a p-value is a test that found nothing."""
    from scipy import stats

    if not len(p_values):
        return []
    filled = [1.0 if math.isnan(p) else min(1.0, p) for p in p_values]
    return [float(q) for q in stats.false_discovery_control(filled, method="bh")]


def decide(
    found: Estimate,
    settings: TimingSettings,
    *,
    q_slower: float,
    q_faster: float,
    smallest: float,
    second: float | None,
) -> tuple[TimingWord, str]:
    """The verdict and why; `second` is the change when measured again, alone. Every comparison is written so that NaN
    ends as inconclusive."""
    if not found.is_sound:
        return "inconclusive", "too few whole samples in the time given"
    change, allowed = math.expm1(found.change), math.log1p(settings.min_effect)
    confirmed = math.nan if second is None else second
    sides: tuple[tuple[TimingWord, int, float], ...] = (("regression", 1, q_slower), ("improvement", -1, q_faster))
    for word, sign, q in sides:
        if q <= settings.level:
            told = f"{abs(change):.1%} {'slower' if sign > 0 else 'faster'}, and by more than {settings.min_effect:.1%}"
            if not sign * confirmed > allowed:
                why = "not measured again" if second is None else f"not so when measured again ({_percent(confirmed)})"
                return "inconclusive", f"{told}, but {why}"
            return word, f"{told} (q = {q:.2g})"
    if not abs(found.null) <= allowed:
        return "inconclusive", f"the base differs from itself by {_percent(found.null)}: the machine is too unsteady"
    if not smallest <= settings.must_see:
        return "inconclusive", f"too noisy: a slowdown below {smallest:.1%} might have gone unseen"
    if not math.expm1(found.hi) <= settings.must_see:
        return "inconclusive", f"may be up to {math.expm1(found.hi):.1%} slower, which is not shown and not ruled out"
    if not math.expm1(found.typical_lo) <= settings.must_see:
        typical = _percent(found.typical_lo)
        return "inconclusive", f"its fastest calls are as fast as before, but most are slower by {typical} or more"
    return "pass", f"{_percent(found.change)}; a slowdown of {smallest:.1%} would have been seen"


def _percent(log_ratio: float) -> str:
    return f"{math.expm1(log_ratio):+.1%}"
