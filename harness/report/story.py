"""What every rendering tells, in the same words: the verdict, why a cell is not ok, and the per-variant columns."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import pandas as pd

from harness.case import BATTERY
from harness.record import EQUAL_STATUSES, FAILING, OK_FACTOR
from harness.report.summary import DISTURBED, TIMED, RunVerdict
from harness.report.table import Column, Table
from harness.text import first_line, interval, is_absent, percent, plain, plural, ratio, small, span

LEGEND = (
    f"error/N: the worst cell's error over its noise floor N, ok up to {OK_FACTOR:g}; max error and budget "
    f"({OK_FACTOR:g} N) are of that cell, in its dtype and on its harshest inputs.",
    "x ref: latency over the reference's in the same cell; geometric mean of the equal cells that were "
    "timed undisturbed (smallest…largest).",
    "x MHA: figure over that of the mha cell with all other axes the same; geometric mean, mha = 1.00. Of latencies "
    "only where both cells were timed in one contest.",
)
ROUNDED_WORSE = "ROUNDED WORSE"  # nothing fails, but some cells are degraded: the same function, and not equal
SAME = "Is it the same?"
Row = Mapping[Hashable, Any]


def headline(verdict: RunVerdict) -> str:
    if not any(status in EQUAL_STATUSES or status in FAILING for status in verdict.statuses):
        return "NOTHING COMPARED"  # no cell, or all unsupported
    if verdict.missing and not any(status in FAILING for status in verdict.statuses):
        return "INCOMPLETE"
    if not verdict.passed:
        return "NOT EQUAL"
    if verdict.statuses.get("degraded"):
        return ROUNDED_WORSE
    return "WITHIN LIMITS" if verdict.approximate else "EQUAL"


def counts_line(verdict: RunVerdict) -> str:
    parts = ", ".join(f"{number} {status}" for status, number in verdict.statuses.items())
    cells = f"{verdict.cells} {'cell' if verdict.cells == 1 else 'cells'}"
    judged = f" ({verdict.approximate} by error metrics)" if verdict.approximate else ""
    return f"{cells}: {parts}{judged}" if parts else cells


def worst_line(verdict: RunVerdict) -> str | None:
    """The case id is not in it: each rendering sets ids in its own way."""
    if verdict.worst_err_ratio is None:
        return None
    note = f" ({verdict.unjudged} failed without an error to compare)" if verdict.unjudged else ""
    return f"worst error {ratio(verdict.worst_err_ratio)} N, ok up to {OK_FACTOR:g} N{note}"


def disturbed_line(verdict: RunVerdict) -> str | None:
    if not verdict.disturbed:
        return None
    were = plural(verdict.disturbed, "cell was", "cells were")
    return f"{were} {DISTURBED} while timed: in no mean and on no front; --resume --retime times them anew"


def measured_line(frame: pd.DataFrame) -> str | None:
    """None where nothing was clocked."""
    share, elapsed = frame.attrs.get("measured_share"), frame.attrs.get("elapsed")
    return None if elapsed is None else f"{percent(share)} of {elapsed:.0f} s inside measured or compared calls"


def explain(row: Row) -> str:
    """Why a cell is not ok: its own message, else its numbers."""
    if message := first_line(row["error"]):
        return message
    if is_absent(row["err_ratio"]):
        return "no message"
    numbers = f"error {small(row['max_abs_err'])} = {ratio(row['err_ratio'])} N, budget {small(row['err_budget'])}"
    where = [f"{word} {plain(row[name])}" for word, name in (("in", "worst_tensor"), ("regime", "worst_regime"))
             if not is_absent(row[name])]  # fmt: skip
    return ", ".join([numbers, *where])


def by_variant(summary: pd.DataFrame) -> Table:
    """All that is known of each variant in one table; the questions stand above their columns."""
    names, answers = _names(summary), _answers(summary, ranges=False)
    spans = (("", len(names)), *((question, len(columns)) for question, columns in answers.items()))
    columns = [*names, *(column for columns in answers.values() for column in columns)]
    return Table(columns, summary.to_dict("records"), spans=spans)


def by_question(summary: pd.DataFrame, *, ranges: bool) -> list[Table]:
    """A table for each question; with `ranges` a mean is followed by its smallest and largest."""
    names, answers = _names(summary), _answers(summary, ranges=ranges)
    of_modules = summary[summary["variant"] != BATTERY]  # direct calls have no weight, and are not timed
    return [
        Table([*names, *columns], (summary if question == SAME else of_modules).to_dict("records"), question)
        for question, columns in answers.items()
    ]


def _names(summary: pd.DataFrame) -> list[Column]:
    """The kernel is named only where there are several."""
    names = ("variant", "kernel") if summary["kernel"].nunique() != 1 else ("variant",)
    return [_column(name, name, plain, left=True) for name in names]


def _answers(summary: pd.DataFrame, *, ranges: bool) -> dict[str, list[Column]]:
    """The columns that answer each question; what nobody has a number for is left out."""
    counted = [_column(name, name, str) for name in ("degraded", "failed", "unsupported") if summary[name].any()]
    errors = {
        "worst_err_ratio": _column("error/N", "worst_err_ratio", ratio),
        "worst_max_abs_err": _column("max error", "worst_max_abs_err", small),
        "worst_err_budget": _column("budget", "worst_err_budget", small),
    }
    weights, speeds = {}, {}
    for title, name in (("params", "params"), ("KV B/token", "kv_bytes_per_token")):
        weights[f"{name}_min"] = _sizes(title, name)
        weights[f"{name}_vs_mha"] = _column("x MHA", f"{name}_vs_mha", ratio)
    for phase in TIMED:
        speeds[f"{phase}_ratio"] = _means(f"{phase} x ref", f"{phase}_ratio", ranges=ranges)
        beside = summary[f"{phase}_ratio"].notna().any()  # a column that names the phase
        title = "x MHA" if beside else f"{phase} x MHA"
        speeds[f"{phase}_latency_vs_mha"] = _column(title, f"{phase}_latency_vs_mha", ratio)

    if summary[DISTURBED].any():
        speeds[DISTURBED] = _column(DISTURBED, DISTURBED, str)

    def known(columns: Mapping[str, Column]) -> list[Column]:
        return [column for name, column in columns.items() if summary[name].notna().any()]

    ok = Column("ok", lambda row: f"{row['ok']}/{row['cells']}")
    answers = {
        SAME: [ok, *counted, *known(errors)],
        "What does it weigh?": known(weights),
        "How fast is it?": known(speeds),
    }
    return {question: columns for question, columns in answers.items() if columns}


def _column(title: str, name: str, form: Callable[[Any], str], *, left: bool = False) -> Column:
    return Column(title, lambda row: form(row[name]), left)


def _sizes(title: str, name: str) -> Column:
    return Column(title, lambda row: span(row[f"{name}_min"], row[f"{name}_max"]))


def _means(title: str, name: str, *, ranges: bool) -> Column:
    def text(row: Row) -> str:
        low, high = row[f"{name}_min"], row[f"{name}_max"]
        wanted = ranges and not is_absent(low) and low != high
        return f"{ratio(row[name])} ({interval(low, high)})" if wanted else ratio(row[name])

    return Column(title, text)
