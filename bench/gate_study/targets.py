"""What the gate must show, and whether a study showed it."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from bench.gate_study.night import MODES
from bench.gate_study.tally import LITTLE_MORE, Line, Rate, smallest_borne_out
from bench.gate_study.tools import OURS

REACHED, MISSED, NOT_MEASURED = "reached", "missed", "not measured"
ENOUGH_CELLS = 1000  # comparisons without a change, in each mode
MOST_ALARMS, MOST_ALARM_NIGHTS = 0.005, 0.02
DETECTION = {0.05: 0.80, 0.10: 0.99}
MOST_SECONDS = 6.0
SEEN = 0.80  # of effects as large as the printed smallest: that is what the word means


@dataclass(frozen=True)
class Verdict:
    title: str
    limit: str
    found: str
    status: str


def judge(lines: Sequence[Line], frame: pd.DataFrame) -> list[Verdict]:
    """False alarms and seconds in both modes; detection where it is promised, on a quiet machine."""
    verdicts = []
    for mode in MODES:
        own = next((line for line in lines if line.decision == OURS and line.mode == mode), None)
        verdicts += _alarms(own, mode)
        if mode == "quiet":
            verdicts += [
                _at_least(f"detection at {x:+.0%}, {mode}", _detected(own, x), y) for x, y in DETECTION.items()
            ]
            borne_out = smallest_borne_out(frame, mode)
            title = f"effects of 1 to {LITTLE_MORE:g} times the printed smallest are seen, {mode}"
            verdicts.append(_at_least(title, borne_out, SEEN))
        seconds = None if own is None else own.seconds
        status = NOT_MEASURED if seconds is None else REACHED if seconds <= MOST_SECONDS else MISSED
        shown = "" if seconds is None else f"{seconds:.2f} s"
        verdicts.append(Verdict(f"seconds per cell, {mode}", f"<= {MOST_SECONDS:g} s", shown, status))
    return verdicts


def _detected(line: Line | None, share: float) -> Rate:
    return Rate(0, 0) if line is None else line.detected[share]


def _alarms(line: Line | None, mode: str) -> list[Verdict]:
    cells, nights = (Rate(0, 0), Rate(0, 0)) if line is None else (line.unchanged, line.alarm_nights)
    enough = REACHED if cells.total >= ENOUGH_CELLS else NOT_MEASURED
    return [
        Verdict(f"comparisons of unchanged cells, {mode}", f">= {ENOUGH_CELLS}", str(cells.total), enough),
        _at_most(f"false alarms, cells, {mode}", cells, MOST_ALARMS),
        _at_most(f"false alarms, nights, {mode}", nights, MOST_ALARM_NIGHTS),
    ]


def _at_most(title: str, rate: Rate, limit: float) -> Verdict:
    status = NOT_MEASURED if rate.value is None else REACHED if rate.value <= limit else MISSED
    return Verdict(title, f"<= {limit:.1%}", shown(rate), status)


def _at_least(title: str, rate: Rate, limit: float) -> Verdict:
    status = NOT_MEASURED if rate.value is None else REACHED if rate.value >= limit else MISSED
    return Verdict(title, f">= {limit:.0%}", shown(rate), status)


def shown(rate: Rate) -> str:
    """`0.1 % (1 of 1,015; 0.0 to 0.5)`."""
    if rate.value is None or rate.interval is None:
        return ""
    low, high = rate.interval
    return f"{100 * rate.value:.1f} % ({rate.count:,} of {rate.total:,}; {100 * low:.1f} to {100 * high:.1f})"


def all_reached(verdicts: Sequence[Verdict]) -> bool:
    return bool(verdicts) and all(verdict.status == REACHED for verdict in verdicts)
