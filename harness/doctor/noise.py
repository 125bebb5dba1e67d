"""An A/A study: the same attention call as both sides, timed as the harness times. Whatever differs is the machine.

Beside it the same number of samples one side after the other, which is what a plain benchmark does.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from harness.suite.schema import Timing

MINUTE_S, QUICK_S = 50.0, 4.0
LENGTHS = (64, 256, 512)  # microseconds to milliseconds a call
MIN_ROUNDS = 3
# An A/A ratio stays within 1.96 sigma 95 times in 100. To see a real effect 95 times in 100 as well, it must be
# 1.645 sigma larger than that.
POWER = (1.96 + 1.645) / 1.96

Call = Callable[[], object]


@dataclass(frozen=True)
class Trial:
    """One cell, timed once each way: how far from 1 the ratio of two equal sides came out."""

    size: str
    paired: float
    covered: bool  # whether the interval of the paired ratio holds 1
    sequential: float


@dataclass(frozen=True)
class NoiseStudy:
    trials: tuple[Trial, ...]

    @property
    def sizes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(trial.size for trial in self.trials))

    def paired(self, size: str | None = None) -> float:
        """95 % of A/A ratios are within 1 ± this."""
        return spread([trial.paired for trial in self.trials if size in (None, trial.size)])

    def sequential(self, size: str | None = None) -> float:
        return spread([trial.sequential for trial in self.trials if size in (None, trial.size)])

    @property
    def smallest_effect(self) -> float:
        return max(self.paired(size) for size in self.sizes) * POWER

    @property
    def coverage(self) -> float:
        return sum(trial.covered for trial in self.trials) / len(self.trials)

    def to_json(self) -> dict[str, Any]:
        by_size = {size: {"paired": self.paired(size), "sequential": self.sequential(size)} for size in self.sizes}
        return {
            "paired": self.paired(),
            "sequential": self.sequential(),
            "smallest_effect": self.smallest_effect,
            "coverage": self.coverage,
            "sizes": by_size,
            "trials": [asdict(trial) for trial in self.trials],
        }


def spread(ratios: Sequence[float]) -> float:
    """The larger of the observed and the normal 95 % bound: a dozen trials rarely hold their own worst twentieth."""
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    observed = float(np.quantile(np.abs(logs), 0.95))
    normal = 1.96 * float(np.sqrt(np.mean(logs**2)))
    return math.expm1(max(observed, normal))


def study(
    calls: Sequence[tuple[str, Call]],
    *,
    seconds: float,
    timing: Timing | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> NoiseStudy:
    """Rounds over all sizes until the time is up, but never fewer than MIN_ROUNDS."""
    timing = timing or Timing()  # as a run without `timing` in its config
    deadline, trials, number = clock() + seconds, list[Trial](), 0
    while number < MIN_ROUNDS or clock() < deadline:
        trials += [_trial(size, call, timing, seed=number) for size, call in calls]
        number += 1
    return NoiseStudy(tuple(trials))


def _trial(size: str, call: Call, timing: Timing, *, seed: int) -> Trial:
    from harness.cell.timing import interleave, paired_ratio

    bounds: dict[str, Any] = {"min_blocks": timing.min_blocks, "max_blocks": timing.max_blocks, "seed": seed}
    pairs = interleave({"a": call, "b": call}, budget_s=timing.budget_s, **bounds)
    ratio = paired_ratio(pairs["a"], pairs["b"], seed=seed)
    first, second = (interleave({"x": call}, budget_s=timing.budget_s / 2, **bounds)["x"] for _ in range(2))
    one_after_the_other = float(np.median(first.seconds) / np.median(second.seconds))
    return Trial(size, ratio.value, ratio.lo <= 1 <= ratio.hi, one_after_the_other)


def attention_calls() -> Iterator[tuple[str, Call]]:
    """torch's own attention in float32: what every ratio of a run is taken against."""
    import torch
    import torch.nn.functional as F

    for length in LENGTHS:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 8, length, 64, generator=generator) for _ in range(3))

        def call(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> object:
            with torch.no_grad():
                return F.scaled_dot_product_attention(q, k, v)

        yield f"L={length}", call
