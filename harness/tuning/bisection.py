"""The sparsest threshold whose error stays within a limit, by bisection over a short ladder of thresholds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Measured:
    """What one threshold does to one head."""

    error: float  # relative L1 against dense
    sparsity: float


@dataclass(frozen=True)
class Choice:
    threshold: float
    measured: Measured
    monotone: bool  # along what was tried, a sparser threshold was never the more exact one
    tried: int


def sparsest_within(limit: float, ladder: Sequence[float], measure: Callable[[float], Measured]) -> Choice:
    """`ladder` goes from the densest threshold, which must keep the limit, to the sparsest.

    Of thresholds that are equally sparse the densest is taken: on other inputs it risks the least. Where the error is
    no monotone function of the threshold a sparser one may be missed; the limit is kept all the same, for what is
    returned was measured.
    """
    found: dict[int, Measured] = {}

    def at(place: int) -> Measured:
        if place not in found:
            found[place] = measure(ladder[place])
        return found[place]

    if not at(0).error <= limit:  # so that a NaN never passes
        raise ArithmeticError(f"relative L1 {at(0).error:.3g} at the densest threshold {ladder[0]:g}: limit {limit:g}")
    low, high = 0, len(ladder)  # the ladder at `low` is within the limit, at `high` beyond it or at its end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle).error <= limit else (low, middle)
    best, first, last = low, 0, low
    while first < last:
        middle = (first + last) // 2
        if at(middle).sparsity >= at(low).sparsity:
            last = middle
        else:
            first = middle + 1
        if at(middle).sparsity == at(low).sparsity and at(middle).error <= limit:
            best = min(best, middle)
    tried = [found[place] for place in sorted(found)]
    monotone = all(a.error <= b.error and a.sparsity <= b.sparsity for a, b in pairwise(tried))
    return Choice(ladder[best], found[best], monotone, len(found))
