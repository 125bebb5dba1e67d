"""A measured number and what its samples spread over."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    value: float
    lo: float
    hi: float

    def __add__(self, other: "Figure") -> "Figure":
        """Errors add up instead of averaging out: what slows one part of a call slows the others too."""
        return Figure(self.value + other.value, self.lo + other.lo, self.hi + other.hi)

    def times(self, factor: float) -> "Figure":
        return Figure(self.value * factor, self.lo * factor, self.hi * factor)

    def wider(self, share: float) -> "Figure":
        """By so much of the value on either side."""
        return Figure(self.value, max(0.0, self.lo - share * self.value), self.hi + share * self.value)

    @property
    def error(self) -> float:
        """The longer side of the bar, as a share of the value."""
        return max(self.hi - self.value, self.value - self.lo) / self.value


def figure(seconds: Sequence[float]) -> Figure:
    """The lower quartile, between the fastest sample and the median: others on the machine only ever add time."""
    quartile, median, _ = statistics.quantiles(seconds, n=4, method="inclusive")
    return Figure(quartile, min(seconds), median)
