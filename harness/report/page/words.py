"""The parts of the page that are plain text and tables, in the words that the terminal and summary.md use too."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter

from harness.environment import Environment
from harness.record import FAILING
from harness.report import sparsity, story
from harness.report.page.run import Sensitivity, StoredRun
from harness.report.summary import RunVerdict, judge, not_ok, summarise
from harness.report.table import Column, Table
from harness.text import ABSENT, first_line, plain, plural, ratio, small

SHOWN = 20  # cells that are not ok, above the table of all
# Of each headline that `story` knows, the worst first: a page is as good as its worst run.
TONES = {
    "NOT EQUAL": "bad", "INCOMPLETE": "warn", "NOTHING COMPARED": "none", story.ROUNDED_WORSE: "warn",
    "WITHIN LIMITS": "good", "EQUAL": "good",
}  # fmt: skip


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


def card(run: StoredRun) -> Card:
    verdict = judge(run.frame)
    headline = story.headline(verdict)
    equal = verdict.statuses.get("ok", 0)
    return Card(
        label=plain(run.label),
        headline=headline,
        tone=TONES[headline],
        sentence=_sentence(verdict, equal),
        statuses=tuple((status, f"{number:,}") for status, number in verdict.statuses.items()),
        worst=story.worst_line(verdict),
        worst_cell=plain(verdict.worst_case_id),
        notes=(*map(plain, run.notes), *([line] if (line := story.disturbed_line(verdict)) else [])),
        command=run.command,
        config=run.config,
    )


def _sentence(verdict: RunVerdict, equal: int) -> str:
    degraded = verdict.statuses.get("degraded", 0)
    if verdict.approximate:
        known = _approximate_sentence(verdict, equal, degraded)
    else:
        known = _equal_sentence(verdict.cells, equal, degraded)
    if not verdict.missing:
        return known
    return f"{verdict.cells:,} of {verdict.cells + verdict.missing:,} cells; {verdict.missing:,} missing. {known}"


def _approximate_sentence(verdict: RunVerdict, equal: int, degraded: int) -> str:
    within = f"{plural(verdict.approximate, 'cell is', 'cells are')} within the error metrics that the suite declares"
    rest = verdict.cells - equal - degraded
    others = f"; {equal - verdict.approximate:,} equal their reference" if equal > verdict.approximate else ""
    worse = f"; {_worse(degraded)}" if degraded else ""
    return f"{within}{others}{worse}{f'; {rest:,} do not, or were not compared' if rest else ''}."


def _worse(degraded: int) -> str:
    return f"{plural(degraded, 'cell is', 'cells are')} the same function, rounded worse than the reference"


def _equal_sentence(cells: int, equal: int, degraded: int) -> str:
    if degraded:
        differing = cells - equal - degraded
        others = f"; {differing:,} differ, or were not compared" if differing else ""
        return f"{equal:,} of {plural(cells, 'cell', 'cells')} equal their reference; {_worse(degraded)}{others}."
    if not equal:
        return "No cell was found equal to its reference." if cells else "The run has no cells."
    if equal == cells == 1:
        return "The one cell equals its reference within what rounding explains."
    if equal == cells:
        return f"All {plural(cells, 'cell', 'cells')} equal their reference within what rounding explains."
    rest = f"{cells - equal:,} do not, or were not compared"
    return f"{equal:,} of {plural(cells, 'cell', 'cells')} equal their reference; {rest}."


def not_ok_table(runs: Sequence[StoredRun]) -> Table:
    """Of each run the first few; where there are several, with the run's name."""
    rows = [(run.label, row) for run in runs for row in not_ok(run.frame).head(SHOWN).to_dict("records")]
    columns = [
        Column("status", lambda row: row[1]["status"], left=True),
        Column("run", lambda row: row[0], left=True),
        Column("cell", lambda row: row[1]["case_id"], left=True),
        Column("why", lambda row: story.explain(row[1]), left=True),
    ]
    total = sum(int((run.frame["status"] != "ok").sum()) for run in runs)
    more = f"; {total - len(rows):,} more in the table of all cells" if total > len(rows) else ""
    caption = f"Cells that are not ok, the worst kind first{more}"
    table = Table(columns, rows, caption=caption, tone=lambda row: "bad" if row[1]["status"] in FAILING else "warn")
    return table if len(runs) > 1 else table.without("run")


def variant_tables(runs: Sequence[StoredRun]) -> list[Table]:
    """The three questions of summary.md side by side, one table a run."""
    tables = []
    for run in runs:
        if len(run.frame):
            title = f"{plain(run.label)} by variant" if len(runs) > 1 else "By variant"
            caption = "Worst error, weight and speed of each variant"
            tables.append(replace(story.by_variant(summarise(run.frame)), title=title, caption=caption))
    return tables


def left_out_tables(runs: Sequence[StoredRun]) -> list[Table]:
    """What approximate kernels skipped, lost and gained: one table for each run that has any."""
    tables = []
    for run in runs:
        if (table := sparsity.sparsity_table(run.approximate)).rows:
            caption = f"Sparsity, error and latency of the approximate cells of {plain(run.label)}"
            tables.append(replace(table, title=plain(run.label) if len(runs) > 1 else "", caption=caption))
    return tables


def environment_table(runs: Sequence[StoredRun]) -> Table:
    """A row for each thing known, a column for each run; where they differ, the line says so."""

    def values(name: str) -> list[str]:
        return [_environment_value(run.environment, name) for run in runs]

    def of_run(place: int) -> Column:
        return Column(plain(runs[place].label), lambda name: values(name)[place], left=True)

    columns = [Column("", lambda name: name.replace("_", " "), left=True), *map(of_run, range(len(runs)))]
    names = [field.name for field in fields(Environment)]
    return Table(columns, names, caption="Environment", tone=lambda name: "warn" if len(set(values(name))) > 1 else "")


def _environment_value(environment: Environment | None, name: str) -> str:
    value = None if environment is None else getattr(environment, name)
    if value is None:
        return ABSENT
    if name == "memory_bytes":
        return f"{value / 2**30:.1f} GiB"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else plain(value)


def gate_tables(run: StoredRun) -> list[Table]:
    """What a gate said of the run and, beside an older commit, of its cells' times."""
    label, tables = plain(run.label), []
    if run.findings is not None:
        failing = sum(finding.fails for finding in run.findings)
        counted = f"{failing} failing, {len(run.findings) - failing} to note" if run.findings else "nothing changed"
        columns = [
            Column("", lambda finding: "fails" if finding.fails else "note", left=True),
            Column("cell", lambda finding: finding.case_id or "the whole run", left=True),
            Column("what", lambda finding: finding.kind, left=True),
            Column("change", lambda finding: first_line(finding.message), left=True),
        ]
        rows = sorted(run.findings, key=lambda finding: not finding.fails)
        title = f"{label}: {'FAIL' if failing else 'PASS'}, {counted}"
        tables.append(Table(columns, rows, title, f"Gate of {label}", lambda row: "bad" if row.fails else "warn"))
    if run.timing:
        unclear = [verdict for verdict in run.timing if verdict.verdict != "pass"]  # what is clear needs no row
        counted = f"{len(run.timing) - len(unclear):,} of {plural(len(run.timing), 'cell', 'cells')} pass"
        columns = [
            Column("verdict", lambda each: each.verdict, left=True),
            Column("cell", lambda each: each.case_id, left=True),
            Column("why", lambda each: each.reason, left=True),
        ]
        slower = sorted(unclear, key=lambda each: each.verdict != "regression")
        title = f"{label}, times: {counted}"
        tones = {"regression": "bad"}
        tables.append(Table(columns, slower, title, f"Times of {label}", lambda row: tones.get(row.verdict, "warn")))
    return tables


def sensitivity_tables(study: Sensitivity) -> list[Table]:
    from harness.mutants import result

    score = result.score_of(study.findings)
    seen = ABSENT
    if score.share is not None:
        seen = f"{score.killed:,} of {score.applicable:,} wrong runs were seen, {score.failed:,} of them as a mismatch"
    counts = result.saboteurs_frame(study.findings, list(dict.fromkeys(study.findings["saboteur"])))
    counts = counts.sort_values(result.SURVIVED, ascending=False, kind="stable")
    saboteurs = [
        Column("saboteur", itemgetter("saboteur"), left=True),
        *(_amount(name) for name in (*result.KILLED, result.SURVIVED, result.NOT_APPLICABLE)),
        Column("first seen by", lambda row: plain(row["mostly_by"]) or ABSENT, left=True),
    ]
    limits = [
        Column("dtype", itemgetter("dtype"), left=True),
        Column("phase", itemgetter("phase"), left=True),
        _amount("cells"),
        *(_limit(kind, which) for kind in ("mismatch", "seen") for which in ("median", "worst")),
    ]
    return [
        Table(
            saboteurs,
            counts.to_dict("records"),
            seen,
            "Each saboteur: the cells in which it was seen, and those in which it survived",
            lambda row: "warn" if row[result.SURVIVED] else "",
        ),
        Table(
            limits,
            result.thresholds_frame(study.cells).to_dict("records"),
            "The smallest error that is seen",
            "Smallest relative error of the scale still seen",
        ),
    ]


def _amount(name: str) -> Column:
    return Column(name, lambda row: f"{row[name]:,}")


def _limit(kind: str, which: str) -> Column:
    name = f"{kind}_{which}"
    return Column(f"{kind}, {which}", lambda row: ratio(row[name]) if row[name] == float("inf") else small(row[name]))
