"""The end of a run on a terminal. Foreign strings are printed as Text: never as markup, never as escape codes."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from harness.gate.findings import Finding
from harness.record import FAILING
from harness.report import story
from harness.report.summary import judge, not_ok, summarise
from harness.text import first_line, plain

SHOWN = 20
SHOWN_FILES = ("report.html", "summary.md", "results.csv", "results.parquet", "records.jsonl", "benchmark.json")


def print_summary(frame: pd.DataFrame, console: Console, *, folder: Path | None) -> None:
    verdict = judge(frame)
    title = story.headline(verdict)
    styles = {"EQUAL": "bold green", "WITHIN LIMITS": "bold green", story.ROUNDED_WORSE: "bold yellow"}
    style = styles.get(title, "bold red")
    say(console, Text.assemble((title, style), "  ", story.counts_line(verdict)))
    if worst := story.worst_line(verdict):
        say(console, worst)
        say(console, "  " + plain(verdict.worst_case_id), whole=True)
    if line := story.disturbed_line(verdict):
        say(console, line, style="yellow")
    if len(frame):
        _print_variants(summarise(frame), console)
    _print_not_ok(not_ok(frame), console)
    console.print()
    if line := story.measured_line(frame):
        say(console, line)
    say(console, *map(plain, frame.attrs.get("notes", ())), whole=True)
    if folder is not None:
        written = [name for name in SHOWN_FILES if (folder / name).exists()]
        say(console, f"{folder}/  {' '.join(written)}", whole=True)


def print_findings(findings: Sequence[Finding], console: Console, *, suite: str) -> None:
    """The gate's verdict; failing findings come first."""
    failing = sum(finding.fails for finding in findings)
    word = Text("FAIL", "bold red") if failing else Text("PASS", "bold green")
    notes = len(findings) - failing
    counted = f"{failing} failing, {notes} to note" if findings else "nothing changed"
    say(console, Text.assemble("gate ", plain(suite), ": ", word, "  ", counted))
    for finding in sorted(findings, key=lambda finding: not finding.fails):
        message = f"{finding.kind}: {first_line(finding.message)}"
        mark = ("fails", "red") if finding.fails else ("note", "yellow")
        print_entry(console, mark, finding.case_id or "the whole run", message)


def _print_variants(summary: pd.DataFrame, console: Console) -> None:
    """One table where it fits, else one for each question, else that without the ranges."""
    console.print()
    whole = story.by_variant(summary)
    if whole.fits(console):
        console.print(whole)
        console.print()
    else:
        pairs = zip(story.by_question(summary, ranges=True), story.by_question(summary, ranges=False), strict=True)
        for detailed, short in pairs:
            console.print(detailed if detailed.fits(console) else short)
            console.print()
    say(console, *story.LEGEND, style="dim")


def _print_not_ok(bad: pd.DataFrame, console: Console) -> None:
    if bad.empty:
        return
    console.print()
    say(console, "Not ok", style="bold")
    for row in bad.head(SHOWN).to_dict("records"):
        style = "red" if row["status"] in FAILING else "yellow"
        print_entry(console, (row["status"], style), row["case_id"], story.explain(row))
    if len(bad) > SHOWN:
        say(console, f"+{len(bad) - SHOWN} more, see results.csv")


def print_entry(console: Console, mark: tuple[str, str], case_id: str, message: str, *, width: int = 12) -> None:
    """A mark of at most `width` and a cell, and under them what is to say of it."""
    # The id has its own unbroken line, so that it can be copied; the message wraps under it.
    say(console, Text.assemble("  ", (f"{mark[0]:<{width}}", mark[1]), plain(case_id)), whole=True)
    console.print(Padding(Text(message, overflow="fold"), (0, 0, 0, 2 + width), expand=False), highlight=False)


def say(console: Console, *lines: str | Text, style: str = "", whole: bool = False) -> None:
    """Lines as they are: no markup, no numbers in colour. A `whole` one is not wrapped, so that it can be copied."""
    for line in lines:
        console.print(Text(line, style) if isinstance(line, str) else line, highlight=False, soft_wrap=whole)
