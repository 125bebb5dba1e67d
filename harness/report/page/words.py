"""The parts of the page that are plain text and tables, in the words that the terminal and summary.md use too."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from harness.environment import Environment
from harness.gate.findings import Finding
from harness.record import EQUAL_STATUSES, FAILING
from harness.report import story
from harness.report.page.run import Run, Sensitivity
from harness.report.summary import Verdict, judge, not_ok, summarise
from harness.text import ABSENT, first_line, plain, plural, ratio, small

SHOWN = 20  # cells that are not ok, above the table of all
# Of each headline that `story` knows, the worst first: a page is as good as its worst run.
TONES = {
    "NOT EQUAL": "bad", "INCOMPLETE": "warn", "NOTHING COMPARED": "none", "WITHIN LIMITS": "good", "EQUAL": "good",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    cells: tuple[str, ...]
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    left: bool = True


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    spans: tuple[tuple[str, int], ...] = ()  # titles above several columns each


@dataclass(frozen=True, slots=True)
class Card:
    """One run's verdict and how to repeat it."""

    label: str
    headline: str
    tone: str
    sentence: str
    statuses: tuple[tuple[str, str], ...]
    worst: str | None
    worst_cell: str
    notes: tuple[str, ...]
    command: str | None
    config: str | None


def card(run: Run) -> Card:
    verdict = judge(run.frame)
    headline = story.headline(verdict)
    equal = sum(number for status, number in verdict.statuses.items() if status in EQUAL_STATUSES)
    return Card(
        label=plain(run.label),
        headline=headline,
        tone=TONES[headline],
        sentence=_sentence(verdict, equal),
        statuses=tuple((status, f"{number:,}") for status, number in verdict.statuses.items()),
        worst=story.worst_line(verdict),
        worst_cell=plain(verdict.worst_case_id),
        notes=tuple(plain(note) for note in run.notes),
        command=run.command,
        config=run.config,
    )


def _sentence(verdict: Verdict, equal: int) -> str:
    known = _approximate_sentence(verdict, equal) if verdict.approximate else _equal_sentence(verdict.cells, equal)
    if not verdict.missing:
        return known
    return f"{verdict.cells:,} of {verdict.cells + verdict.missing:,} cells; {verdict.missing:,} missing. {known}"


def _approximate_sentence(verdict: Verdict, equal: int) -> str:
    within = f"{plural(verdict.approximate, 'cell is', 'cells are')} within the error metrics that the suite declares"
    rest = verdict.cells - equal
    others = f"; {equal - verdict.approximate:,} equal their reference" if equal > verdict.approximate else ""
    return f"{within}{others}{f'; {rest:,} do not, or were not compared' if rest else ''}."


def _equal_sentence(cells: int, equal: int) -> str:
    if not equal:
        return "No cell was found equal to its reference." if cells else "The run has no cells."
    if equal == cells == 1:
        return "The one cell equals its reference within what rounding explains."
    if equal == cells:
        return f"All {plural(cells, 'cell', 'cells')} equal their reference within what rounding explains."
    rest = f"{cells - equal:,} do not, or were not compared"
    return f"{equal:,} of {plural(cells, 'cell', 'cells')} equal their reference; {rest}."


def not_ok_table(runs: Sequence[Run]) -> Table:
    titles = ("status", "run", "cell", "why")
    rows = [
        Row((str(row["status"]), plain(run.label), plain(row["case_id"]), story.explain(row)), tone_of(row["status"]))
        for run in runs
        for row in not_ok(run.frame).head(SHOWN).to_dict("records")
    ]
    total = sum(int((run.frame["status"] != "ok").sum()) for run in runs)
    more = f"; {total - len(rows):,} more in the table of all cells" if total > len(rows) else ""
    return _without_single_run(
        Table("", f"Cells that are not ok, the worst kind first{more}", _left(titles), tuple(rows)), runs
    )


def tone_of(status: Any) -> str:
    return "bad" if status in FAILING else "warn"


def variant_tables(runs: Sequence[Run]) -> list[Table]:
    """The three questions of summary.md side by side, one table a run."""
    tables = []
    for run in runs:
        if run.frame.empty:
            continue
        summary = summarise(run.frame)
        names, groups = story.names(summary), story.groups(summary, ranges=False)
        columns = [*names, *(column for group in groups for column in group.columns)]
        rows = tuple(Row(cells) for cells in zip(*(column.cells for column in columns), strict=True))
        title = f"{plain(run.label)} by variant" if len(runs) > 1 else "By variant"
        heads = tuple(Column(column.title, column.left) for column in columns)
        spans = (("", len(names)), *((group.question, len(group.columns)) for group in groups))
        tables.append(Table(title, "Worst error, weight and speed of each variant", heads, rows, spans))
    return tables


def environment_table(runs: Sequence[Run]) -> Table:
    """A column for each run; where they differ, the line says so."""
    rows = []
    for field in fields(Environment):
        values = tuple(_environment_value(run.environment, field.name) for run in runs)
        differs = len(set(values)) > 1
        rows.append(Row((field.name.replace("_", " "), *values), "warn" if differs else ""))
    heads = ("", *(plain(run.label) for run in runs))
    return Table("", "Environment", _left(heads), tuple(rows))


def _environment_value(environment: Environment | None, name: str) -> str:
    value = None if environment is None else getattr(environment, name)
    if value is None:
        return ABSENT
    if name == "memory_bytes":
        return f"{value / 2**30:.1f} GiB"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else plain(value)


def gate_table(run: Run) -> Table | None:
    if run.findings is None:
        return None
    failing = sum(finding.fails for finding in run.findings)
    notes = len(run.findings) - failing
    counted = f"{failing} failing, {notes} to note" if run.findings else "nothing changed"
    title = f"{plain(run.label)}: {'FAIL' if failing else 'PASS'}, {counted}"
    rows = tuple(_finding(finding) for finding in sorted(run.findings, key=lambda finding: not finding.fails))
    return Table(title, f"Gate of {plain(run.label)}", _left(("", "cell", "what", "change")), rows)


def gate_timing_table(run: Run) -> Table | None:
    """What a gate beside an older commit said of the cells' times; what is clear needs no row."""
    if not run.timing:
        return None
    told = [verdict for verdict in run.timing if verdict.verdict != "pass"]
    counted = f"{len(run.timing) - len(told):,} of {plural(len(run.timing), 'cell', 'cells')} pass"
    rows = tuple(
        Row((each.verdict, plain(each.case_id), plain(each.reason)), "bad" if each.verdict == "regression" else "warn")
        for each in sorted(told, key=lambda each: each.verdict != "regression")
    )
    title = f"{plain(run.label)}, times: {counted}"
    return Table(title, f"Times of {plain(run.label)}", _left(("verdict", "cell", "why")), rows)


def _finding(finding: Finding) -> Row:
    word, tone = ("fails", "bad") if finding.fails else ("note", "warn")
    return Row(
        (word, plain(finding.case_id) or "the whole run", plain(finding.kind), first_line(finding.message)), tone
    )


def sensitivity_tables(study: Sensitivity) -> list[Table]:
    from harness.mutants import result as table
    from harness.mutants.result import KILLED, NOT_APPLICABLE, SURVIVED

    findings = study.findings
    score = table.score_of(findings)
    seen = ABSENT if score.share is None else f"{score.killed:,} of {score.applicable:,} wrong runs were seen"
    counts = table.saboteurs_frame(findings, list(dict.fromkeys(findings["saboteur"])))
    counts = counts.sort_values(SURVIVED, ascending=False, kind="stable")
    number = (*KILLED, SURVIVED, NOT_APPLICABLE)
    rows = tuple(
        Row((plain(row["saboteur"]), *(f"{row[name]:,}" for name in number), plain(row["mostly_by"]) or ABSENT),
            "warn" if row[SURVIVED] else "")
        for row in counts.to_dict("records")
    )  # fmt: skip
    columns = (Column("saboteur"), *(Column(name, left=False) for name in number), Column("first seen by"))
    limits = table.thresholds_frame(study.cells)
    names = ("mismatch_median", "mismatch_worst", "seen_median", "seen_worst")
    limit_rows = tuple(
        Row((row["dtype"], row["phase"], f"{row['cells']:,}", *(_limit(row[name]) for name in names)))
        for row in limits.to_dict("records")
    )
    heads = (Column("dtype"), Column("phase"),
             *(Column(name, left=False) for name in ("cells", "mismatch, median", "mismatch, worst", "seen, median",
                                                     "seen, worst")))  # fmt: skip
    return [
        Table(seen, "Each saboteur: the cells in which it was seen, and those in which it survived", columns, rows),
        Table("The smallest error that is seen", "Smallest relative error of the scale still seen", heads, limit_rows),
    ]


def _limit(value: float) -> str:
    return ratio(value) if value == float("inf") else small(value)


def _left(titles: Sequence[str]) -> tuple[Column, ...]:
    return tuple(Column(title) for title in titles)


def _without_single_run(table: Table, runs: Sequence[Run]) -> Table:
    if len(runs) > 1:
        return table
    rows = tuple(Row((row.cells[0], *row.cells[2:]), row.tone) for row in table.rows)
    return Table(table.title, table.caption, (table.columns[0], *table.columns[2:]), rows)


def title_of(runs: Sequence[Run]) -> str:
    return ", ".join(plain(run.label) for run in runs)


def headline_of(cards: Sequence[Card]) -> str:
    """The worst of all runs: a page is as good as its worst run."""
    found = {one.headline for one in cards}
    return next(word for word in TONES if word in found)
