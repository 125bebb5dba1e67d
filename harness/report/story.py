"""What every rendering tells, in the same words: the verdict, why a cell is not ok, and the per-variant columns."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.record import EQUAL_STATUSES, FAILING
from harness.report.summary import TIMED, Verdict
from harness.text import first_line, interval, is_absent, plain, ratio, small, span

LEGEND = (
    "error/N: the worst cell's error over its noise floor N, ok up to 2; max error and budget (2 N) are of that cell, "
    "in its dtype and on its harshest inputs.",
    "x ref: latency over the reference's in the same cell; geometric mean of the equal cells (smallest…largest).",
    "x MHA: figure over that of the mha cell with all other axes the same; geometric mean, mha = 1.00. Latencies of "
    "different cells are timed apart: there x MHA is a guide, x ref the measurement.",
)
Row = Mapping[Hashable, Any]


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    cells: list[str]
    left: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Columns that answer one question."""

    question: str
    columns: list[Column]


def headline(verdict: Verdict) -> str:
    if not any(
        status in EQUAL_STATUSES or status in FAILING for status in verdict.statuses
    ):  # none, or all unsupported
        return "NOTHING COMPARED"
    if verdict.missing and not any(status in FAILING for status in verdict.statuses):
        return "INCOMPLETE"
    if not verdict.passed:
        return "NOT EQUAL"
    return "WITHIN LIMITS" if verdict.approximate else "EQUAL"


def counts_line(verdict: Verdict) -> str:
    parts = ", ".join(f"{number} {status}" for status, number in verdict.statuses.items())
    cells = f"{verdict.cells} {'cell' if verdict.cells == 1 else 'cells'}"
    judged = f" ({verdict.approximate} by error metrics)" if verdict.approximate else ""
    return f"{cells}: {parts}{judged}" if parts else cells


def worst_line(verdict: Verdict) -> str | None:
    """The case id is not in it: each rendering sets ids in its own way."""
    if verdict.worst_err_ratio is None:
        return None
    note = f" ({verdict.unjudged} failed without an error to compare)" if verdict.unjudged else ""
    return f"worst error {ratio(verdict.worst_err_ratio)} N, ok up to 2 N{note}"


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


def names(summary: pd.DataFrame) -> list[Column]:
    """The kernel is named only where there are several."""
    columns = [Column("variant", [plain(name) for name in summary["variant"]], left=True)]
    if summary["kernel"].nunique() != 1:
        columns.append(Column("kernel", [plain(name) for name in summary["kernel"]], left=True))
    return columns


def groups(summary: pd.DataFrame, *, ranges: bool) -> list[Group]:
    """Without the naming columns; a column nobody has a number for is left out."""
    rows = summary.to_dict("records")

    def column(title: str, cells: list[str], needs: str) -> list[Column]:
        return [Column(title, cells)] if summary[needs].notna().any() else []

    same = [
        Column("ok", [f"{row['ok']}/{row['cells']}" for row in rows]),
        *(
            Column(name, [str(row[name]) for row in rows])
            for name in ("degraded", "failed", "unsupported")
            if summary[name].any()
        ),
        *column("error/N", [ratio(row["worst_err_ratio"]) for row in rows], "worst_err_ratio"),
        *column("max error", [small(row["worst_max_abs_err"]) for row in rows], "worst_max_abs_err"),
        *column("budget", [small(row["worst_err_budget"]) for row in rows], "worst_err_budget"),
    ]
    weight: list[Column] = []
    for title, name in (("params", "params"), ("KV B/token", "kv_bytes_per_token")):
        low, high, versus = f"{name}_min", f"{name}_max", f"{name}_vs_mha"
        weight += column(title, [span(row[low], row[high]) for row in rows], low)
        weight += column("x MHA", [ratio(row[versus]) for row in rows], versus)
    speed: list[Column] = []
    for phase in TIMED:
        name, versus = f"{phase}_ratio", f"{phase}_latency_vs_mha"
        speed += column(f"{phase} x ref", [_mean(row, name, ranges) for row in rows], name)
        speed += column("x MHA", [ratio(row[versus]) for row in rows], versus)
    told = (Group("Is it the same?", same), Group("What does it weigh?", weight), Group("How fast is it?", speed))
    return [group for group in told if group.columns]


def _mean(row: Row, name: str, ranges: bool) -> str:
    low, high = row[f"{name}_min"], row[f"{name}_max"]
    wanted = ranges and not is_absent(low) and low != high
    return f"{ratio(row[name])} ({interval(low, high)})" if wanted else ratio(row[name])
