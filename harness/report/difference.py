"""What `harness compare` shows: runs and environments, then cell by cell what changed, as text, Markdown or CSV."""

import math
from collections.abc import Sequence

import pandas as pd
from rich.console import Console

from harness.gate.difference import WEIGHTS, Difference, other_kernel
from harness.gate.findings import METRICS, CellRow
from harness.report import story
from harness.report.page import StoredRun
from harness.report.summary import DISTURBED, judge
from harness.report.terminal import print_entry, say
from harness.store import csv_text
from harness.text import ABSENT, interval, number, plain, plural, ratio, small

SHOWN = 20
NOTE = (
    "x ref: latency over the reference's in the same run, with its 95 % interval. Milliseconds of two runs are timed "
    "apart and not compared; a change of x ref is listed where the intervals share no number."
)
STYLES = {"worse": "red", "better": "green"}
SPEED = ("latency_ratio", "latency_ratio_lo", "latency_ratio_hi")
NUMBERS = ("status", "timing", "err_ratio", "max_abs_err", *METRICS, *WEIGHTS, *SPEED)


def print_differences(
    runs: tuple[StoredRun, StoredRun], cells: Sequence[Difference], console: Console, *, everything: bool = False
) -> None:
    say(console, *_runs(runs), *environment_lines(runs), counts_line(cells))
    listed = [cell for cell in cells if cell.found or everything]
    shown = listed if everything else listed[:SHOWN]
    for cell in shown:
        mark = mark_of(cell)
        message = "\n".join(changes(cell)) or "no difference"
        print_entry(console, (mark, STYLES.get(mark, "yellow")), cell.case_id, message, width=8)
    if len(listed) > len(shown):
        say(console, f"+{len(listed) - len(shown):,} more, see --all")
    say(console, NOTE, style="dim")


def markdown(runs: tuple[StoredRun, StoredRun], cells: Sequence[Difference], *, everything: bool = False) -> str:
    lines = [*(f"- {_escaped(line)}" for line in [*_runs(runs), *environment_lines(runs)]), ""]
    lines += [counts_line(cells), "", "| | cell | change |", "|---|---|---|"]
    for cell in cells:
        if cell.found or everything:
            change = "<br>".join(_escaped(line) for line in changes(cell)) or "no difference"
            lines.append(f"| {mark_of(cell)} | {_escaped(plain(cell.case_id))} | {change} |")
    return "\n".join([*lines, "", NOTE, ""])


def csv(cells: Sequence[Difference], *, everything: bool = False) -> str:
    """One row a cell with both sides' numbers as they are stored."""
    rows = []
    for cell in cells:
        if cell.found or everything:
            row: dict[str, object] = {"case_id": cell.case_id, "change": mark_of(cell)}
            for side, values in (("a", cell.before), ("b", cell.after)):
                row |= {f"{name}_{side}": None if values is None else values[name] for name in NUMBERS}
            rows.append(row | {"err_factor": cell.factor("err_ratio"), "x_ref_factor": cell.factor("latency_ratio"),
                               "x_ref_apart": cell.speed_apart})  # fmt: skip
    columns = ["case_id", "change", *(f"{name}_{side}" for side in "ab" for name in NUMBERS),
               "err_factor", "x_ref_factor", "x_ref_apart"]  # fmt: skip
    return csv_text(pd.DataFrame(rows, columns=columns))


def mark_of(cell: Difference) -> str:
    if not cell.in_both:
        return "only A" if cell.after is None else "only B"
    if cell.worse or cell.better:
        return "worse" if cell.worse else "better"
    return "changed" if cell.found else "same"


def changes(cell: Difference) -> list[str]:
    """In words, one line each."""
    if cell.before is None or cell.after is None:
        row = cell.before if cell.after is None else cell.after
        assert row is not None
        return [f"status {row['status']}"]
    lines = []
    if pair := cell.pair("status"):
        why = "" if cell.after["status"] == "ok" else f": {story.explain(cell.after)}"
        lines.append(f"status {pair[0]} -> {pair[1]}{why}")
    if pair := cell.pair("err_ratio"):
        lines.append(f"error/N {ratio(pair[0])} -> {ratio(pair[1])}{_factor(cell.factor('err_ratio'))}")
    if pair := cell.pair("max_abs_err"):
        lines.append(f"max error {small(pair[0])} -> {small(pair[1])}")
    for name, (a, b) in cell.pairs(METRICS).items():
        factor = _factor(cell.factor("rel_l1") if name == "rel_l1" else None)
        lines.append(f"{name} {number(a, '.4g')} -> {number(b, '.4g')}{factor}")
    lines += [f"{name} {number(a, ',')} -> {number(b, ',')}" for name, (a, b) in cell.pairs(WEIGHTS).items()]
    if (speed := cell.factor("latency_ratio")) is not None:
        sides = " -> ".join(_speed(row) for row in (cell.before, cell.after))
        apart = ", intervals apart" if cell.speed_apart else ", within noise"
        lines.append(f"x ref {sides} (x{ratio(speed)}{apart})")
    return lines


def counts_line(cells: Sequence[Difference]) -> str:
    one_sided = [sum(cell.after is None for cell in cells), sum(cell.before is None for cell in cells)]
    both = len(cells) - sum(one_sided)
    parts = [f"{plural(both, 'cell', 'cells')} in both, {one_sided[0]:,} only in A, {one_sided[1]:,} only in B"]
    parts.append(f"{sum(cell.worse for cell in cells):,} worse, {sum(cell.better for cell in cells):,} better")
    other = sum(cell.in_both and cell.found and not (cell.worse or cell.better) for cell in cells)
    return "; ".join([*parts, f"{other:,} otherwise changed"])


def environment_lines(runs: tuple[StoredRun, StoredRun]) -> list[str]:
    a, b = (run.environment for run in runs)
    if a is None or b is None:
        lost = " and ".join(name for name, one in (("A", a), ("B", b)) if one is None)
        return [f"environments are not compared: {lost} has none stored"]
    found = a.differences(b)
    if not found:
        return ["same environment"]
    shown = {key: [ABSENT if value is None else plain(value) for value in pair] for key, pair in found.items()}
    return [f"{key}: {old} -> {new}" for key, (old, new) in shown.items()]


def _runs(runs: tuple[StoredRun, StoredRun]) -> list[str]:
    """Both runs, and what they were told to differ in."""
    kernels = other_kernel(*(run.frame for run in runs))
    lines = []
    for name, run in zip("AB", runs, strict=True):
        verdict = judge(run.frame)
        missing = f"; {verdict.missing:,} missing" if verdict.missing else ""
        lines.append(f"{name}  {plain(run.label)}: {story.headline(verdict)}, {story.counts_line(verdict)}{missing}")
    if kernels is not None:
        lines.append(f"kernel: {plain(kernels[0])} -> {plain(kernels[1])}, cells matched without it")
    return lines


def _factor(factor: float | None) -> str:
    """From or to nothing or infinity there is no factor to tell."""
    return f" (x{ratio(factor)})" if factor is not None and 0 < factor < math.inf else ""


def _speed(row: CellRow) -> str:
    mark = f" {DISTURBED}" if row["timing"] == DISTURBED else ""
    return f"{ratio(row['latency_ratio'])} ({interval(row['latency_ratio_lo'], row['latency_ratio_hi'])}){mark}"


def _escaped(text: str) -> str:
    """Foreign text in a Markdown table: neither a new column, nor markup, nor HTML."""
    for character in "\\`*_[]<>|#":
        text = text.replace(character, f"&#{ord(character)};")
    return text
