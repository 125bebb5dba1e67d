"""The end of a run on a terminal. Foreign strings are printed as Text: never as markup, never as escape codes."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.gate.findings import Finding
from harness.record import FAILING
from harness.report import story
from harness.report.summary import judge, not_ok, summarise
from harness.text import first_line, measured_line, plain

SHOWN = 20
SHOWN_FILES = ("report.html", "summary.md", "results.csv", "results.parquet", "records.jsonl", "benchmark.json")


def print_summary(
    frame: pd.DataFrame,
    console: Console,
    *,
    folder: Path | None,
    measured_share: float | None = None,
    elapsed: float | None = None,
) -> None:
    verdict = judge(frame)
    title = story.headline(verdict)
    style = {"EQUAL": "bold green", "WITHIN LIMITS": "bold green"}.get(title, "bold red")
    _print(console, Text.assemble((title, style), "  ", story.counts_line(verdict)))
    if worst := story.worst_line(verdict):
        _print(console, Text(worst))
        _print_id(console, Text("  " + plain(verdict.worst_case_id)))
    if len(frame):
        _print_variants(summarise(frame), console)
    _print_not_ok(not_ok(frame), console)
    console.print()
    if line := measured_line(measured_share, elapsed):
        _print(console, Text(line))
    for note in frame.attrs.get("notes", ()):
        _print_id(console, Text(plain(note)))
    if folder is not None:
        written = [name for name in SHOWN_FILES if (folder / name).exists()]
        _print_id(console, Text(f"{folder}/  {' '.join(written)}"))


def print_findings(findings: Sequence[Finding], console: Console, *, suite: str) -> None:
    """The gate's verdict; failing findings come first."""
    failing = sum(finding.fails for finding in findings)
    word = Text("FAIL", "bold red") if failing else Text("PASS", "bold green")
    notes = len(findings) - failing
    counted = f"{failing} failing, {notes} to note" if findings else "nothing changed"
    _print(console, Text.assemble("gate ", plain(suite), ": ", word, "  ", counted))
    for finding in sorted(findings, key=lambda finding: not finding.fails):
        message = f"{finding.kind}: {first_line(finding.message)}"
        mark = ("fails", "red") if finding.fails else ("note", "yellow")
        print_entry(console, mark, finding.case_id or "the whole run", message)


def _print_variants(summary: pd.DataFrame, console: Console) -> None:
    """One table where it fits, else one for each question, else that without the ranges."""
    names = story.names(summary)
    whole = [column for group in story.groups(summary, ranges=False) for column in group.columns]
    table = table_of([*names, *whole])
    console.print()
    if fits(table, console):
        console.print(table)
        console.print()
    else:
        pairs = zip(story.groups(summary, ranges=True), story.groups(summary, ranges=False), strict=True)
        for detailed, short in pairs:
            table = table_of([*names, *detailed.columns], title=detailed.question)
            console.print(table if fits(table, console) else table_of([*names, *short.columns], title=short.question))
            console.print()
    for line in story.LEGEND:
        _print(console, Text(line, "dim"))


def table_of(columns: list[story.Column], *, title: str | None = None) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False
    )
    table.padding = (0, 0, 0, 1)
    for column in columns:
        header = Text(column.title.replace(" x ", "\nx "))
        table.add_column(header, justify="left" if column.left else "right", overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(cell) for cell in cells))
    return table


def fits(table: Table, console: Console) -> bool:
    # Measured in a room without walls: in the console's own the answer is cut to its width.
    return console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width


def _print_not_ok(bad: pd.DataFrame, console: Console) -> None:
    if bad.empty:
        return
    console.print()
    _print(console, Text("Not ok", "bold"))
    for row in bad.head(SHOWN).to_dict("records"):
        style = "red" if row["status"] in FAILING else "yellow"
        print_entry(console, (row["status"], style), row["case_id"], story.explain(row))
    if len(bad) > SHOWN:
        _print(console, Text(f"+{len(bad) - SHOWN} more, see results.csv"))


def print_entry(console: Console, mark: tuple[str, str], case_id: str, message: str, *, width: int = 12) -> None:
    """A mark of at most `width` and a cell, and under them what is to say of it."""
    # The id has its own unbroken line, so that it can be copied; the message wraps under it.
    _print_id(console, Text.assemble(f"{'':2}", (f"{mark[0]:<{width}}", mark[1]), plain(case_id)))
    console.print(Padding(Text(message, overflow="fold"), (0, 0, 0, 2 + width), expand=False), highlight=False)


def _print(console: Console, text: Text) -> None:
    console.print(text, highlight=False)


def _print_id(console: Console, text: Text) -> None:
    console.print(text, highlight=False, soft_wrap=True)
