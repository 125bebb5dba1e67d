"""A row of numbers as a row of blocks, for a terminal."""

import itertools
import math
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40


def sparkline(values: Sequence[float], *, low: float | None = None, high: float | None = None) -> str:
    """Between `low` and `high`, by default their own range; beyond it they touch its ends, and what is not a number is
    a gap."""
    known = [value for value in values if math.isfinite(value)]
    bottom = min(known, default=0.0) if low is None else low
    top = max(known, default=0.0) if high is None else high
    return "".join(_block(value, bottom, top) for value in values)


def _block(value: float, bottom: float, top: float) -> str:
    if math.isnan(value):
        return " "
    if value >= top:  # also infinity, and a range of one number
        return BLOCKS[-1] if top > bottom else BLOCKS[0]
    # Halved first, or the range of two huge numbers would overflow; rounding may end at the top block's upper edge.
    share = max(0.0, (value / 2 - bottom / 2) / (top / 2 - bottom / 2))
    return BLOCKS[min(int(share * len(BLOCKS)), len(BLOCKS) - 1)]


def condense(values: Sequence[float], width: int = WIDTH) -> list[float]:
    """At most `width` numbers: the largest of each stretch, so that no peak is lost; a stretch without one is NaN."""
    if len(values) <= width:
        return list(values)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    stretches = (values[start:end] for start, end in itertools.pairwise(edges))
    return [max((value for value in part if not math.isnan(value)), default=math.nan) for part in stretches]
