"""The timing part on a terminal: the counts, and the cells worth reading, worst first."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from harness.gate.findings import Finding, GateOutcome, TimingSettings, TimingVerdict
from harness.report.markdown import code, table_of, text
from harness.text import ABSENT, milliseconds, plain, plural

# ----------------------------------------------------------------------------------------------------------------------
# gate.md: the verdict as a CI job's summary, the failures first.


# A job's summary may have 1 MiB; the rest is in gate.xml and gate.json.
MOST_ROWS = 50
TITLES = ("verdict", "cell", "change", "interval", "smallest seen", "base ms", "head ms", "why")


def gate_markdown(outcome: GateOutcome) -> str:
    parts = [f"# Gate {text(outcome.suite)}: {outcome.word}", "  \n".join(_counts(outcome))]
    if outcome.failing:
        parts += ["## Got worse", *_findings(outcome.failing)]
    slower = [verdict for verdict in outcome.timed("regression", "inconclusive") if outcome.fails(verdict)]
    slower += [verdict for verdict in outcome.timing if outcome.fails(verdict) and verdict not in slower]
    if slower:
        parts += ["## Slower" if not outcome.strict else "## Slower, or not known", *_timing(slower)]
    unsure = [verdict for verdict in outcome.timed("inconclusive") if not outcome.fails(verdict)]
    if unsure:
        parts += [
            "## Inconclusive: not shown to be as fast as before",
            "These cells neither failed nor passed: the noise of this run hides changes up to *smallest seen*.",
            *_timing(unsure),
        ]
    if faster := outcome.timed("improvement"):
        parts += ["## Faster", *_timing(faster)]
    if outcome.notes:
        parts += ["## To note", *_findings(outcome.notes)]
    if passed := outcome.timed("pass"):
        details = "\n\n".join(_timing(passed))
        parts.append(f"<details><summary>As fast as before: {_cells(len(passed))}</summary>\n\n{details}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _counts(outcome: GateOutcome) -> list[str]:
    lines = []
    if outcome.cells or outcome.findings:
        failing, notes = len(outcome.failing), len(outcome.notes)
        lines.append(f"**exact**: {_cells(len(outcome.cells))}, {failing} failing, {notes} to note")
    if outcome.timing:
        order = ("regression", "inconclusive", "improvement", "pass")
        counts = outcome.counts
        named = [f"{counts[name]} {name}" for name in (*order, *sorted(counts.keys() - set(order))) if counts[name]]
        lines.append(f"**timing**: {_cells(len(outcome.timing))}: {', '.join(named)}")
        lines += [f"**left out**: {text(told)}" for told in outcome.left_out]
        if outcome.settings is not None:
            lines.append(f"**settings**: {_settings(outcome.settings)}")
    else:
        lines.append("**timing**: not judged")
    lines += [f"**{name}**: {text(value)}" for name, value in (("base", outcome.base), ("head", outcome.head)) if value]
    return lines


def _settings(chosen: TimingSettings) -> str:
    effects = f"min-effect {chosen.min_effect:.1%}, must-see {chosen.must_see:.1%}, level {chosen.level:.1%}"
    return f"{effects}, {chosen.seconds:g} s a cell, threads {chosen.threads}, seed {chosen.seed}"


def _findings(findings: Sequence[Finding]) -> list[str]:
    rows = [(code(one.case_id) or "the whole run", text(one.kind), text(one.message)) for one in findings[:MOST_ROWS]]
    return [table_of(("cell", "what", "why"), rows, [True] * 3), *_more(len(findings))]


def _timing(verdicts: Sequence[TimingVerdict]) -> list[str]:
    rows = [
        (
            text(one.verdict),
            code(one.case_id),
            _percent(one.change),
            f"{_percent(one.lo)} … {_percent(one.hi)}",
            _percent(one.smallest),
            milliseconds(one.base_ms),
            milliseconds(one.head_ms),
            text(one.reason),
        )
        for one in verdicts[:MOST_ROWS]
    ]
    return [table_of(TITLES, rows, [title in ("verdict", "cell", "why") for title in TITLES]), *_more(len(verdicts))]


def _more(total: int) -> list[str]:
    return [f"+{total - MOST_ROWS} more, see gate.xml"] if total > MOST_ROWS else []


def _cells(number: int) -> str:
    return plural(number, "cell", "cells")


def _percent(change: float | None) -> str:
    return ABSENT if change is None else f"{100 * change:+.1f} %"


# ----------------------------------------------------------------------------------------------------------------------


SHOWN = 15  # of each verdict
STYLES = {"regression": "red", "inconclusive": "yellow", "improvement": "cyan", "pass": "green"}
WORDS = {"FAIL": "bold red", "INCONCLUSIVE": "bold yellow", "PASS": "bold green"}


def print_timing(outcome: GateOutcome, console: Console, *, written: bool) -> None:
    """All cells where nothing is `written` that has the others."""
    interesting = outcome.timed("regression", "improvement", "inconclusive")
    versions = f"{plain(outcome.base)} -> {plain(outcome.head)}"
    title = Text(f"timing {plain(outcome.suite)}: {versions}, cell by cell in turn")
    console.print(title, highlight=False, soft_wrap=True)
    for name in STYLES:
        if name != "pass" and (found := [one for one in interesting if one.verdict == name]):
            for one in found[:SHOWN] if written else found:
                for line in _lines(one):
                    console.print(line, highlight=False, soft_wrap=True)
            if written and len(found) > SHOWN:
                console.print(Text(f"  +{len(found) - SHOWN} more of {name}: see gate.md and gate.json"))
    passed = outcome.timed("pass")
    if passed:
        largest = max(one.smallest for one in passed if one.smallest is not None)
        seconds = sum(one.seconds for one in outcome.timing) / len(outcome.timing)
        seen = f"{len(passed)} pass: in each a slowdown of {largest:.1%} would have been seen; {seconds:.1f} s a cell"
        console.print(Text(seen, "dim"), highlight=False, soft_wrap=True)
    for told in outcome.left_out:
        console.print(Text(plain(told), "dim"), highlight=False, soft_wrap=True)
    console.print(_last_line(outcome), highlight=False, soft_wrap=True)


def _lines(one: TimingVerdict) -> list[Text]:
    """A name may have sixty letters: on a line of its own it can be copied, also from 80 columns."""
    interval = ABSENT if one.lo is None else f"{_percent(one.lo)} … {_percent(one.hi)}"
    base, head = (ABSENT if each is None else f"{each:.3g}" for each in (one.base_ms, one.head_ms))
    numbers = f"{_percent(one.change)} ({interval}), sees from {_percent(one.smallest)}, {base} -> {head} ms"
    measured = [] if one.change is None else [Text(f"  {numbers}")]
    return [
        Text.assemble((one.verdict, STYLES[one.verdict]), " ", plain(one.case_id)),
        *measured,
        Text(f"  {plain(one.reason)}", "dim"),
    ]


def _last_line(outcome: GateOutcome) -> Text:
    """What is not known is said in the last line, where nobody misses it."""
    counts = outcome.counts
    told = ", ".join(f"{counts[name]} {name}" for name in STYLES if counts[name])
    word = Text(outcome.timing_word, WORDS[outcome.timing_word])
    line = Text.assemble("timing: ", word, f"  {plural(len(outcome.timing), 'cell', 'cells')}: {told}")
    if unknown := counts["inconclusive"]:
        says = "which fails by --strict" if outcome.strict else "--strict would fail"
        if outcome.timing_word == "INCONCLUSIVE":
            says = "nothing was decided, which is no pass"
        line.append(f"  {unknown} of {len(outcome.timing)} NOT SHOWN TO BE AS FAST AS BEFORE ({says})", "bold yellow")
    return line
