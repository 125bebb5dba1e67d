"""How cost grows: the slope of log time over log length, fitted where overhead no longer dominates."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from bench.kernel_study.result import Result
from bench.kernel_study.targets import SIZES

FROM = {"prefill": ("queries", 512), "decode": ("keys", 2048), "step": ("keys", 2048), "mla": ("keys", 2048)}
AT_LEAST = 3  # lengths; through two of them every curve is a straight line
RESAMPLES = 1000
COLUMNS = (*(size for size in SIZES if size not in ("queries", "keys")), "side", "required", "exponent", "lo", "hi",
           "lengths", "shortest", "longest")  # fmt: skip


def exponents(results: Sequence[Result]) -> pd.DataFrame:
    """One row for each side and all sizes but the length; empty where too few lengths were measured."""
    groups: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        if result.cell.study in FROM:
            axis, shortest = FROM[result.cell.study]
            if getattr(result.cell, axis) >= shortest:
                key = tuple(getattr(result.cell, size) for size in COLUMNS[: COLUMNS.index("side")])
                groups.setdefault((*key, result.side), []).append(result)
    rows = []
    for key, members in groups.items():
        axis, _ = FROM[members[0].cell.study]
        timed = {getattr(result.cell, axis): result.seconds for result in members if result.seconds}
        wanted = {getattr(result.cell, axis) for result in members if result.cell.required}
        # A required length that is missing leaves no exponent: the growth must not be read off the rest.
        required = len(wanted) >= AT_LEAST
        complete = len(timed) >= AT_LEAST and (not required or wanted <= set(timed))
        slope = fit(timed) if complete else (float("nan"),) * 3
        rows.append((*key, required, *slope, len(timed), min(timed, default=None), max(timed, default=None)))
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(("exponent", "lo", "hi"), "float64"))


def fit(seconds: Mapping[int, Sequence[float]]) -> tuple[float, float, float]:
    """Least squares over the medians, with a 95 % interval: the samples of each length drawn again and again."""
    lengths = np.log(np.asarray(list(seconds), dtype=float))
    random = np.random.default_rng(0)
    samples = [np.asarray(times) for times in seconds.values()]
    medians = np.log([np.median(times) for times in samples])
    again = np.stack(
        [np.log(np.median(times[random.integers(len(times), size=(RESAMPLES, len(times)))], axis=1))
         for times in samples]
    )  # fmt: skip
    # polyfit fits all resamples at once: one column each.
    lo, hi = np.quantile(np.polyfit(lengths, again, 1)[0], [0.025, 0.975])
    return float(np.polyfit(lengths, medians, 1)[0]), float(lo), float(hi)
