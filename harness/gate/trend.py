"""The history of each cell on each machine, and the nights at which it changed, with the commits between."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import pandas as pd

from harness.gate.change_points import LEVEL, SMALLEST, fewest_to_tell, find_steps
from harness.gate.findings import CellRow
from harness.gate.nights import SOFTWARE, HistoryError

# Times scatter from night to night; the rest is computed from fixed seeds, so that any change is one.
NOISY = ("latency_ratio", "latency_ms", "ref_latency_ms")
COMPUTED = ("err_ratio", "peak_bytes", "params", "kv_cache_bytes", "kv_bytes_per_token", "flops")
TREND_METRICS = (*NOISY, *COMPUTED)


@dataclass(frozen=True, slots=True)
class Change:
    """`good` and `bad` are the commits of the last night before and of the first night after; None: not known."""

    before: float
    after: float
    p_value: float | None  # None: an exact number changed, which chance does not
    last: pd.Timestamp
    first: pd.Timestamp
    good: str | None
    bad: str | None
    dirty: bool  # in one of these nights the tree had changes that were not committed
    also: tuple[str, ...]  # software that changed between these two nights

    @property
    def kind(self) -> str:
        """Every metric is a cost: more is worse."""
        return "worse" if self.after > self.before else "better"

    @property
    def relative(self) -> float:
        return self.after / self.before - 1 if self.before else math.inf


@dataclass(frozen=True, slots=True)
class Trend:
    """One cell on one machine; `values` has one number a night, NaN where the cell gave none."""

    case_id: str
    machine: str
    values: tuple[float, ...]
    changes: tuple[Change, ...]

    @property
    def known(self) -> int:
        """Nights that gave a number."""
        return sum(math.isfinite(value) for value in self.values)


def fewest_nights(metric: str, series: int) -> int:
    """With fewer, none of so many series can show a change that is alone, whatever happened."""
    return fewest_to_tell(LEVEL / max(1, series)) if metric in NOISY else 2


def trends(history: pd.DataFrame, *, metric: str = "latency_ratio", cells: str = "*") -> tuple[Trend, ...]:
    """Steps hold at 5 % false discoveries over all cells together (Benjamini & Hochberg)."""
    if metric not in TREND_METRICS:
        raise HistoryError(f"metric {metric!r}: known are {', '.join(TREND_METRICS)}")
    wanted = history[[fnmatchcase(case_id, cells) for case_id in history["case_id"]]]
    if wanted.empty:
        raise HistoryError(f"no cell of the history is like {cells!r}")
    series = [
        (str(case_id), _machine(nights), nights.to_dict("records"))
        for (case_id, _), nights in wanted.groupby(["case_id", "machine"], sort=True)
    ]
    found = [_trend(*one, metric) for one in series]
    kept = _hold_together(found)
    # Among many series, even the smallest p-value of the usual permutations is not small enough for a step that stands
    # alone. Few can be in this place: if one series in 250 were, all would hold.
    if hidden := [at for at, (a, b) in enumerate(zip(found, kept, strict=True)) if _smallest(a) > _smallest(b)]:
        finest = math.ceil(4 * sum(max(1, len(one.changes)) for one in found) / LEVEL)
        for at in hidden:
            found[at] = _trend(*series[at], metric, finest=finest)
        kept = _hold_together(found)
    return tuple(kept)


def _smallest(trend: Trend) -> int:
    return sum(each.p_value is not None and each.p_value <= SMALLEST for each in trend.changes)


def _machine(nights: pd.DataFrame) -> str:
    one = nights.iloc[0]
    return f"{one['cpu']}, {one['cores']} cores, {one['threads']} threads"


def _trend(case_id: str, machine: str, nights: Sequence[CellRow], metric: str, *, finest: int = 0) -> Trend:
    values: list[float] = [math.nan if pd.isna(night[metric]) else float(night[metric]) for night in nights]
    # A time of 0 or infinity is no time; the cell has failed, and its status tells.
    known = [at for at, value in enumerate(values) if math.isfinite(value) and (metric in COMPUTED or value > 0)]
    changes = []
    if metric in NOISY:
        for step in find_steps([math.log(values[at]) for at in known], finest=finest):
            pair = (nights[known[step.at - 1]], nights[known[step.at]])
            changes.append(_change(*pair, math.exp(step.before), math.exp(step.after), step.p_value))
    else:
        for a, b in itertools.pairwise(known):
            if values[a] != values[b]:
                changes.append(_change(nights[a], nights[b], values[a], values[b], None))
    return Trend(case_id, machine, tuple(values), tuple(changes))


def _change(last: CellRow, first: CellRow, before: float, after: float, p_value: float | None) -> Change:
    also = tuple(
        f"{name} {last[name]} -> {first[name]}" for name in SOFTWARE if _text(last, name) != _text(first, name)
    )
    good, bad = (_text(night, "commit") for night in (last, first))
    dirty = any(not pd.isna(night["dirty"]) and bool(night["dirty"]) for night in (last, first))
    return Change(before, after, p_value, last["time"], first["time"], good, bad, dirty, also)


def _text(night: CellRow, name: str) -> str | None:
    return None if pd.isna(night[name]) else str(night[name])


def _hold_together(found: Sequence[Trend]) -> list[Trend]:
    """The trends, each with those of its changes alone that hold among all cells (Benjamini & Hochberg)."""
    from scipy.stats import false_discovery_control

    # A series without a step counts as one that chance explains, or the level would be that of the lucky alone.
    p_values = [change.p_value for trend in found for change in trend.changes if change.p_value is not None]
    quiet = sum(not trend.changes for trend in found)
    if not p_values:
        return list(found)
    q_values = iter(false_discovery_control(np.array([*p_values, *[1.0] * quiet])))
    return [
        replace(trend, changes=tuple(each for each in trend.changes if each.p_value is None or next(q_values) <= LEVEL))
        for trend in found
    ]
