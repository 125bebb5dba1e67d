"""Each tool's threshold swept over all values: how much is found at which price in false alarms."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.gate_study.night import SHARES

PICTURE = "roc.png"
COLUMNS = ["mode", "decision", "share", "point", "false_alarms", "detected"]  # points count from the strictest on


def points(scores: "np.ndarray[Any, Any]", changed: "np.ndarray[Any, Any]") -> list[tuple[float, float]]:
    """(share of unchanged cells flagged, share of changed cells flagged), from the strictest threshold to none at all.

    Cells with equal scores are flagged together. NaN is never flagged before all else: it counts as the lowest score.
    """
    scores = np.where(np.isnan(scores), -np.inf, scores)
    positives, negatives = int(changed.sum()), int((~changed).sum())
    if not positives or not negatives:
        return []
    found = [(0.0, 0.0)]
    for threshold in np.unique(scores)[::-1]:
        flagged = scores >= threshold
        found.append((float((flagged & ~changed).sum()) / negatives, float((flagged & changed).sum()) / positives))
    return found


def area(curve: list[tuple[float, float]]) -> float | None:
    """Under the curve: the chance that a changed cell scores above an unchanged one."""
    if not curve:
        return None
    x, y = zip(*curve, strict=True)
    return float(np.trapezoid(y, x))


def curves(frame: pd.DataFrame) -> pd.DataFrame:
    """Unchanged are the cells of nights without a change, and the untouched ones of the others."""
    rows = []
    for (mode, decision), own in frame.groupby(["mode", "decision"], sort=False):
        for share in SHARES:
            asked = own[(own["share"] == 0) | (own["share"] == share)]
            curve = points(asked["score"].to_numpy(), (asked["share"] == share).to_numpy())
            rows += [(mode, decision, share, at, x, y) for at, (x, y) in enumerate(curve)]
    return pd.DataFrame(rows, columns=COLUMNS)


def operating_points(frame: pd.DataFrame) -> pd.DataFrame:
    """Where each tool really stands, with its own threshold and all its rules."""
    rows = []
    for (mode, decision), own in frame.groupby(["mode", "decision"], sort=False):
        unchanged = own.loc[own["share"] == 0, "flagged"]
        for share in SHARES:
            changed = own.loc[own["share"] == share, "flagged"]
            if len(changed) and len(unchanged):
                rows.append((mode, decision, share, 0, float(unchanged.mean()), float(changed.mean())))
    return pd.DataFrame(rows, columns=COLUMNS)


def save(frame: pd.DataFrame, folder: Path) -> bool:
    """False: there is nothing to draw yet."""
    swept = curves(frame)
    if swept.empty:
        return False
    chart(swept, operating_points(frame)).save(str(folder / PICTURE), scale_factor=2)
    return True


def chart(swept: pd.DataFrame, standing: pd.DataFrame) -> Any:
    """A row for each mode, a column for each share; dots are where the tools stand."""
    import altair as alt

    few_alarms = alt.Scale(type="sqrt", domain=[0, 1])  # a gate lives between none and a few per cent
    ticks = alt.Axis(values=[0, 0.01, 0.05, 0.2, 0.5, 1], format="%", labelOverlap=False, labelFlush=False)
    panels = []
    for mode in swept["mode"].unique():
        row = []
        for share in SHARES:
            lines, dots = (each[(each["mode"] == mode) & (each["share"] == share)] for each in (swept, standing))
            x = alt.X("false_alarms:Q", title="false alarms", scale=few_alarms, axis=ticks)
            y = alt.Y("detected:Q", title="detected", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%"))
            color = alt.Color("decision:N", title=None, sort=None, scale=alt.Scale(scheme="tableau10"))
            curve = alt.Chart(lines).mark_line(strokeWidth=1.5).encode(
                x=x, y=y, color=color, order=alt.Order("point:Q")
            )  # fmt: skip
            dot = alt.Chart(dots).mark_point(filled=True, size=70, opacity=1).encode(x=x, y=y, color=color)
            title = f"{mode}, {share:+.0%}"
            row.append((curve + dot).properties(width=190, height=190, title=title))
        panels.append(alt.hconcat(*row))
    return alt.vconcat(*panels)
