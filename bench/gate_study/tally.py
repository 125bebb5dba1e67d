"""Nights -> counts: false alarms per cell and per night, detection by share, what was left open, seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.gate_study.calibrate import Injection
from bench.gate_study.night import SHARES, NightResult
from bench.gate_study.tools import OURS

CONFIDENCE = 0.95
LITTLE_MORE = 1.3


@dataclass(frozen=True)
class Rate:
    """`count` of `total`, with the exact (Clopper-Pearson) interval; no rate at all of nothing."""

    count: int
    total: int

    @property
    def value(self) -> float | None:
        return self.count / self.total if self.total else None

    @property
    def interval(self) -> tuple[float, float] | None:
        if not self.total:
            return None
        from scipy.stats import binomtest

        found = binomtest(self.count, self.total).proportion_ci(CONFIDENCE, method="exact")
        return float(found.low), float(found.high)


def rate_of(flags: "pd.Series[bool]") -> Rate:
    return Rate(int(flags.sum()), len(flags))


def frame_of(results: Sequence[NightResult], injections: Mapping[str, Mapping[float, Injection]]) -> pd.DataFrame:
    """One row for each decision on each cell of each night."""
    rows: list[dict[str, Any]] = []
    for result in results:
        for cell in result.cells:
            injected = injections.get(cell.case_id, {}).get(cell.share) if cell.share else None
            common = {
                "mode": result.night.mode,
                "kind": result.night.kind,
                "night": result.night.number,
                "tool": result.tool,
                "case_id": cell.case_id,
                "share": cell.share,
                "injected": injected.measured if injected else 0.0 if not cell.share else None,
                "verdict": cell.details.get("verdict"),
                "change": cell.details.get("change"),
                "smallest": cell.details.get("smallest"),
                "seconds": result.seconds / len(result.cells),
                "others": result.others,
            }
            rows += [
                common | {"decision": each.name, "flagged": each.flagged, "score": each.score}
                for each in cell.decisions
            ]
    columns = ["mode", "kind", "night", "tool", "decision", "case_id", "share", "injected", "flagged", "score"]
    columns += ["verdict", "change", "smallest", "seconds", "others"]
    types = {"share": float, "injected": float, "score": float, "change": float, "smallest": float, "seconds": float}
    return pd.DataFrame(rows, columns=columns).astype(types | {"flagged": bool, "others": float})


@dataclass(frozen=True)
class Line:
    """One decision rule in one mode."""

    mode: str
    decision: str
    alarms: Rate  # of cells of nights without a change
    alarm_nights: Rate
    beside: Rate  # false alarms on the untouched cells of nights in which others were slowed
    detected: dict[float, Rate]  # by share
    inconclusive: Rate | None  # of all cells; None: the tool knows no such answer
    seconds: float | None  # per cell, with the start of processes

    @property
    def unchanged(self) -> Rate:
        """False alarms on all cells that did not change, whatever others of their night did."""
        return Rate(self.alarms.count + self.beside.count, self.alarms.total + self.beside.total)


def tally(frame: pd.DataFrame) -> list[Line]:
    """In the order of appearance of modes, ours first."""
    lines = []
    for (mode, decision), rows in frame.groupby(["mode", "decision"], sort=False):
        same, slowed = rows[rows["kind"] == "same"], rows[rows["kind"] == "slowed"]
        nights = same.groupby("night")["flagged"].any()
        lines.append(
            Line(
                mode=str(mode),
                decision=str(decision),
                alarms=rate_of(same["flagged"]),
                alarm_nights=rate_of(nights),
                beside=rate_of(slowed.loc[slowed["share"] == 0, "flagged"]),
                detected={share: rate_of(slowed.loc[slowed["share"] == share, "flagged"]) for share in SHARES},
                inconclusive=rate_of(rows["verdict"] == "inconclusive") if decision == OURS else None,
                seconds=float(rows["seconds"].mean()) if len(rows) else None,
            )
        )
    return sorted(lines, key=lambda line: (line.mode != "quiet", line.decision != OURS))


def smallest_borne_out(frame: pd.DataFrame, mode: str) -> Rate:
    """Of our slowed cells with just their own printed smallest effect injected, or little more: how many were found.
    Much more would be seen by a gate that promises too much, too."""
    own = frame[(frame["decision"] == OURS) & (frame["mode"] == mode) & (frame["share"] > 0)]
    return rate_of(own.loc[own["injected"].between(own["smallest"], LITTLE_MORE * own["smallest"]), "flagged"])


def false_alarms(frame: pd.DataFrame) -> pd.DataFrame:
    """Ours, one by one: who looks for a fault of the method begins here."""
    return frame[(frame["decision"] == OURS) & (frame["share"] == 0) & frame["flagged"]]
