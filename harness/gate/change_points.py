"""At which nights did a noisy series step to another level, and is it more than chance?

First the whole series: in random order, does it hold a stretch as far off as its own? This permutation test is that of
circular binary segmentation (Olshen et al., Biostatistics 2004): it keeps its level whatever the noise's shape, and
sees a rise that fell again as well as one that stayed. Only then PELT (Killick, Fearnhead & Eckley, JASA 2012; in
`ruptures`, Truong, Oudre & Vayatis, Signal Processing 2020) places the steps, all at once. Each must hold by a
permutation test between its neighbours too, as in Matteson & James (JASA 2014): the weakest is dropped until all do.

Random order is a fair comparison only if nights are independent. Where a night resembles the one before, false steps
are more: docs/gate.md has the numbers.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A step is told when three nights bear it out: one or two bad nights are no new level.
FEWEST = 3
LEVEL = 0.05
# More for what looks real, so that it can also hold among hundreds of cells: (permutations, stop when p is above).
ROUNDS = ((99, 0.2), (999, 0.01), (9_999, 1.5e-4))
SMALLEST = 2 / (1 + ROUNDS[-1][0])  # p-value that these can give a step
# Drawing bad nights in makes shuffled nights look more orderly, so that by this test no step gets far below 1 %,
# however clear it is. Without it one does.
CLEAR = 0.01
PIECE = 9_999  # permutations in memory at a time
# PELT's price of a step in units of log n: a step has a height and a place, and the noise is only estimated.
PENALTY = 3.0

Series = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LevelStep:
    """`at` is the first night of the new level; levels are medians."""

    at: int
    before: float
    after: float
    p_value: float


def find_steps(values: Sequence[float] | Series, *, seed: int = 0, finest: int = 0) -> tuple[LevelStep, ...]:
    """Of finite numbers in the order of the nights. A step's p-value is the worse of its series' and its stretch's.

    `finest`: permutations for what none of the usual ones equalled, so that its p-value can be below SMALLEST.
    """
    series = np.asarray(values, dtype=np.float64)
    if not np.isfinite(series).all():
        raise ValueError("a series for change points must be finite")
    if len(series) < 2 * FEWEST or np.ptp(series) == 0:
        return ()
    generator = np.random.default_rng(seed)
    # Bad nights are tamed in the test, so that those of a shuffled series are, too: else it would lose its level.
    whole = _p_value(series, lambda rows: _farthest_stretch(_tamed(rows)), generator)
    # Two tests: twice the smaller where one is clear, else the first and what the second might have added to it.
    smaller = min(whole, _p_value(series, _farthest_stretch, generator, finest))
    whole = 2 * smaller if smaller <= CLEAR / 2 else whole + CLEAR / 2
    if not whole <= LEVEL:
        return ()
    series = _tamed(series[None, :])[0]
    found = _placed(series)
    tested: dict[tuple[int, int], float] = {}
    while found:
        edges = [0, *found, len(series)]
        stretches = [(edges[number], edges[number + 2]) for number in range(len(found))]
        for start, end in stretches:
            if (start, end) not in tested:
                tested[start, end] = _p_value(series[start:end], _clearest_step, generator, finest)
        p_values = [tested[stretch] for stretch in stretches]
        weakest = int(np.argmax(p_values))
        if p_values[weakest] <= LEVEL:
            return tuple(
                LevelStep(at, float(np.median(series[start:at])), float(np.median(series[at:end])), max(whole, p_value))
                for at, (start, end), p_value in zip(found, stretches, p_values, strict=True)
            )
        del found[weakest]
    return ()


def fewest_to_tell(level: float) -> int:
    """Nights with which a step in their middle, if it is high enough, has a p-value of this level.

    Of all orders of the nights, those that keep the nights of each level together are as far off as the true one: one
    for each turn of the ring, for a stretch may lie anywhere. Twice that for two tests, and twice for what chance adds.
    """
    return next(n for n in itertools.count(2 * FEWEST) if 4 * n / math.comb(n, n // 2) <= min(level, CLEAR))


def _tamed(rows: Series) -> Series:
    """Hampel's filter: one or two bad nights become the median of the five around them; levels stay as they are."""
    count, width = rows.shape[1], 2 * FEWEST - 1
    around = np.median(np.lib.stride_tricks.sliding_window_view(rows, width, axis=1), axis=2)
    middle = around[:, np.clip(np.arange(count) - FEWEST + 1, 0, count - width)]
    return np.where(np.abs(rows - middle) <= 3 * _noise(rows)[:, None], rows, middle)


def _placed(series: Series) -> list[int]:
    import ruptures  # costs half a second: scipy

    penalty = PENALTY * math.log(len(series)) * float(_noise(series[None, :])[0]) ** 2
    fit = ruptures.Pelt(model="l2", min_size=FEWEST, jump=1).fit(series.reshape(-1, 1))
    return [int(at) for at in fit.predict(pen=penalty)[:-1]]


def _noise(rows: Series) -> Series:
    """The spread from one night to the next: steps hardly move it. Of more than half equal nights, their mean size."""
    jumps = np.abs(np.diff(rows, axis=1))
    spread = np.median(jumps, axis=1) / (0.6745 * math.sqrt(2))
    return np.where(spread > 0, spread, jumps.mean(axis=1) / math.sqrt(2))


def _p_value(
    stretch: Series, statistic: Callable[[Series], Series], generator: np.random.Generator, finest: int = 0
) -> float:
    """How often the same nights in random order say as much as in theirs."""
    seen = float(statistic(stretch[None, :])[0]) * (1 - 1e-9)  # equal sums in another order count as equal
    p_value = math.nan
    for count, enough in (*ROUNDS, *([(finest, 0.0)] if finest > ROUNDS[-1][0] else [])):
        as_far = 0
        for start in range(0, count, PIECE):
            shape = (min(PIECE, count - start), len(stretch))
            shuffled = generator.permuted(np.broadcast_to(stretch, shape), axis=1)
            as_far += int((statistic(shuffled) >= seen).sum())
        p_value = (1 + as_far) / (1 + count)
        if p_value > enough:
            break
    return p_value


def _clearest_step(rows: Series) -> Series:
    """By how much two means fit each row better than one, at the best step that leaves FEWEST on each side."""
    count = rows.shape[1]
    sums = _sums(rows)[:, FEWEST : count - FEWEST + 1]
    left = np.arange(FEWEST, count - FEWEST + 1)
    return np.asarray((sums**2 * (count / (left * (count - left)))).max(axis=1))


def _farthest_stretch(rows: Series) -> Series:
    """The same for the best stretch anywhere, its mean against that of all other nights."""
    count = rows.shape[1]
    sums = _sums(rows)
    best: Series = np.zeros(len(rows))
    for length in range(FEWEST, count - FEWEST + 1):
        largest = np.abs(sums[:, length:] - sums[:, :-length]).max(axis=1)
        np.maximum(best, largest**2 * (count / (length * (count - length))), out=best)
    return best


def _sums(rows: Series) -> Series:
    """Of the first 0, 1, ... nights, about the row's mean."""
    sums = np.zeros((rows.shape[0], rows.shape[1] + 1))
    np.cumsum(rows - rows.mean(axis=1, keepdims=True), axis=1, out=sums[:, 1:])
    return sums
