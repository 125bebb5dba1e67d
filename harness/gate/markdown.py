"""gate.md: the verdict as a CI job's summary, the failures first."""

from collections.abc import Sequence

from harness.gate.finding import Finding
from harness.gate.outcome import Outcome
from harness.gate.verdicts import TimingSettings, TimingVerdict
from harness.report.format import ABSENT, milliseconds, plural
from harness.report.markdown import code, table_of, text

# A job's summary may have 1 MiB; the rest is in gate.xml and gate.json.
SHOWN = 50
TITLES = ("verdict", "cell", "change", "interval", "smallest seen", "base ms", "head ms", "why")


def gate_markdown(outcome: Outcome) -> str:
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


def _counts(outcome: Outcome) -> list[str]:
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
    rows = [(code(one.case_id) or "the whole run", text(one.kind), text(one.message)) for one in findings[:SHOWN]]
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
        for one in verdicts[:SHOWN]
    ]
    return [table_of(TITLES, rows, [title in ("verdict", "cell", "why") for title in TITLES]), *_more(len(verdicts))]


def _more(total: int) -> list[str]:
    return [f"+{total - SHOWN} more, see gate.xml"] if total > SHOWN else []


def _cells(number: int) -> str:
    return plural(number, "cell", "cells")


def _percent(change: float | None) -> str:
    return ABSENT if change is None else f"{100 * change:+.1f} %"
