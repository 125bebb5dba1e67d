"""The gate's verdict as text: gate.md for a CI job's page, failures first, and the timing part on a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from harness.gate.findings import Finding, GateOutcome, TimingSettings, TimingVerdict
from harness.report.markdown import folded
from harness.report.table import Code, Column, Table, escaped
from harness.report.terminal import say
from harness.text import ABSENT, milliseconds, number, plain, plural, signed_percent

MOST_ROWS = 50  # a job's summary may have 1 MiB; the rest is in gate.xml and gate.json
SHOWN = 15  # of each verdict on the terminal
# The verdicts on a cell's time, the worst first, and how each and the whole are coloured.
STYLES = {"regression": "red", "inconclusive": "yellow", "improvement": "cyan", "pass": "green"}
WORDS = {"FAIL": "bold red", "INCONCLUSIVE": "bold yellow", "PASS": "bold green"}
FINDING = [
    Column("cell", lambda one: Code(one.case_id) if one.case_id else "the whole run", left=True),
    Column("what", lambda one: one.kind, left=True),
    Column("why", lambda one: one.message, left=True),
]
TIMING = [
    Column("verdict", lambda one: one.verdict, left=True),
    Column("cell", lambda one: Code(one.case_id), left=True),
    Column("change", lambda one: signed_percent(one.change)),
    Column("interval", lambda one: f"{signed_percent(one.lo)} … {signed_percent(one.hi)}"),
    Column("smallest seen", lambda one: signed_percent(one.smallest)),
    Column("base ms", lambda one: milliseconds(one.base_ms)),
    Column("head ms", lambda one: milliseconds(one.head_ms)),
    Column("why", lambda one: one.reason, left=True),
]


def gate_markdown(outcome: GateOutcome) -> str:
    parts = [f"# Gate {escaped(outcome.suite)}: {outcome.word}", "  \n".join(_counts(outcome))]
    if outcome.failing:
        parts += ["## Got worse", *_table(FINDING, outcome.failing)]
    slower = [verdict for verdict in outcome.timed("regression", "inconclusive") if outcome.fails(verdict)]
    slower += [verdict for verdict in outcome.timing if outcome.fails(verdict) and verdict not in slower]
    if slower:
        parts += ["## Slower" if not outcome.strict else "## Slower, or not known", *_table(TIMING, slower)]
    unsure = [verdict for verdict in outcome.timed("inconclusive") if not outcome.fails(verdict)]
    if unsure:
        parts += [
            "## Inconclusive: not shown to be as fast as before",
            "These cells neither failed nor passed: the noise of this run hides changes up to *smallest seen*.",
            *_table(TIMING, unsure),
        ]
    if faster := outcome.timed("improvement"):
        parts += ["## Faster", *_table(TIMING, faster)]
    if outcome.notes:
        parts += ["## To note", *_table(FINDING, outcome.notes)]
    if passed := outcome.timed("pass"):
        parts.append(folded(f"As fast as before: {_cells(len(passed))}", "\n\n".join(_table(TIMING, passed))))
    return "\n\n".join(parts) + "\n"


def _counts(outcome: GateOutcome) -> list[str]:
    lines = []
    if outcome.cells or outcome.findings:
        failing, notes = len(outcome.failing), len(outcome.notes)
        lines.append(f"**exact**: {_cells(len(outcome.cells))}, {failing} failing, {notes} to note")
    if outcome.timing:
        lines.append(f"**timing**: {_verdicts(outcome)}")
        lines += [f"**left out**: {escaped(why)}" for why in outcome.left_out]
        if outcome.settings is not None:
            lines.append(f"**settings**: {_settings(outcome.settings)}")
    else:
        lines.append("**timing**: not judged")
    named = (("base", outcome.base), ("head", outcome.head))
    return lines + [f"**{name}**: {escaped(value)}" for name, value in named if value]


def _verdicts(outcome: GateOutcome) -> str:
    counts = outcome.counts
    order = (*STYLES, *sorted(counts.keys() - STYLES.keys()))
    return f"{_cells(len(outcome.timing))}: {', '.join(f'{counts[name]} {name}' for name in order if counts[name])}"


def _settings(chosen: TimingSettings) -> str:
    effects = f"min-effect {chosen.min_effect:.1%}, must-see {chosen.must_see:.1%}, level {chosen.level:.1%}"
    return f"{effects}, {chosen.seconds:g} s a cell, threads {chosen.threads}, seed {chosen.seed}"


def _table(columns: list[Column], rows: Sequence[Finding | TimingVerdict]) -> list[str]:
    more = [f"+{len(rows) - MOST_ROWS} more, see gate.xml"] if len(rows) > MOST_ROWS else []
    return [Table(columns, rows[:MOST_ROWS]).markdown(), *more]


def _cells(amount: int) -> str:
    return plural(amount, "cell", "cells")


def print_timing(outcome: GateOutcome, console: Console, *, written: bool) -> None:
    """All cells where nothing is `written` that has the others."""
    versions = f"{plain(outcome.base)} -> {plain(outcome.head)}"
    say(console, f"timing {plain(outcome.suite)}: {versions}, cell by cell in turn", whole=True)
    for name in ("regression", "inconclusive", "improvement"):
        verdicts = outcome.timed(name)
        for one in verdicts[:SHOWN] if written else verdicts:
            say(console, *_lines(one), whole=True)
        if written and len(verdicts) > SHOWN:
            console.print(Text(f"  +{len(verdicts) - SHOWN} more of {name}: see gate.md and gate.json"))
    if passed := outcome.timed("pass"):
        largest = max(one.smallest for one in passed if one.smallest is not None)
        seconds = sum(one.seconds for one in outcome.timing) / len(outcome.timing)
        seen = f"{len(passed)} pass: in each a slowdown of {largest:.1%} would have been seen; {seconds:.1f} s a cell"
        say(console, seen, style="dim", whole=True)
    say(console, *map(plain, outcome.left_out), style="dim", whole=True)
    say(console, _last_line(outcome), whole=True)


def _lines(one: TimingVerdict) -> list[Text]:
    """A name may have sixty letters: on a line of its own it can be copied, also from 80 columns."""
    lines = [Text.assemble((one.verdict, STYLES[one.verdict]), " ", plain(one.case_id))]
    if one.change is not None:
        interval = ABSENT if one.lo is None else f"{signed_percent(one.lo)} … {signed_percent(one.hi)}"
        sees = f"sees from {signed_percent(one.smallest)}"
        times = f"{number(one.base_ms, '.3g')} -> {number(one.head_ms, '.3g')} ms"
        lines.append(Text(f"  {signed_percent(one.change)} ({interval}), {sees}, {times}"))
    return [*lines, Text(f"  {plain(one.reason)}", "dim")]


def _last_line(outcome: GateOutcome) -> Text:
    """What is not known is said in the last line, where nobody misses it."""
    word = Text(outcome.timing_word, WORDS[outcome.timing_word])
    line = Text.assemble("timing: ", word, f"  {_verdicts(outcome)}")
    if unknown := outcome.counts["inconclusive"]:
        says = "which fails by --strict" if outcome.strict else "--strict would fail"
        if outcome.timing_word == "INCONCLUSIVE":
            says = "nothing was decided, which is no pass"
        line.append(f"  {unknown} of {len(outcome.timing)} NOT SHOWN TO BE AS FAST AS BEFORE ({says})", "bold yellow")
    return line
