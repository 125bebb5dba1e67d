"""What `harness sensitivity` shows: the mutation score, each saboteur's fate, survivors, the smallest errors seen."""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.text import Text

from harness.environment import Environment
from harness.mutants import result
from harness.mutants.result import KILLED, NOT_APPLICABLE, SURVIVED, Study
from harness.report import markdown
from harness.report.table import Code, Column, Table, escaped
from harness.report.terminal import say
from harness.text import ABSENT, first_line, is_absent, percent, plain, plural, ratio

SHOWN = 20  # survivors on the terminal; sensitivity.md has all
LEGEND = (
    "mismatch, degraded: cells in which the acceptance rule saw it so; error: cells in which it broke.",
    "seen: not ok, degraded counts; mismatch: seen as what fails a run, an error counts.",
    "first seen by: the regime or check that saw it before all others, in most of its cells.",
)
THRESHOLD_LEGEND = (
    "The smallest relative error of the scale that is still seen: of all cells the median, and the worst one. "
    "Powers of ten."
)
Row = Mapping[Hashable, Any]


def print_study(study: Study, console: Console, *, folder: Path) -> None:
    findings = result.findings_frame(study.cells)
    verdict = result.judge(study)
    for table in (_saboteurs(findings, study), _scores(findings), _thresholds(study)):
        console.print(table)
        console.print()
    say(console, *LEGEND, THRESHOLD_LEGEND, style="dim")
    alive = result.survivors(findings)
    if len(alive):
        console.print()
        say(console, "Survivors", style="bold")
    for row in alive.head(SHOWN).to_dict("records"):
        mark = Text(f"  {row['saboteur']}", "red" if is_absent(row["explanation"]) else "yellow")
        say(console, Text.assemble(mark, f"  {_survivor(row)}"), f"    {row['case_id']}", whole=True)
    if len(alive) > SHOWN:
        say(console, f"  +{len(alive) - SHOWN} more, see sensitivity.md")
    for cell in _broken(study):
        why = f"{plain(cell.case.case_id)}: {first_line(cell.problem)}"
        say(console, Text.assemble(("  not counted  ", "red"), why), whole=True)
    console.print()
    style = "bold green" if verdict.passed else "bold red"
    say(console, Text.assemble((headline(verdict), style), "  ", _counts(study, verdict)))
    say(console, f"{folder}/  sensitivity.md sensitivity.csv cells.csv", whole=True)


def sensitivity_markdown(study: Study, environment: Environment) -> str:
    findings = result.findings_frame(study.cells)
    verdict = result.judge(study)
    alive = result.survivors(findings)
    parts = [
        f"# sensitivity of {escaped(study.suite)}: {headline(verdict)}",
        f"**{_counts(study, verdict)}**",
        "## Mutation score",
        _scores(findings).markdown(),
        "## The smallest error that is seen",
        THRESHOLD_LEGEND,
        _thresholds(study).markdown(),
        f"## Survivors: {len(alive)}",
    ]
    if len(alive):
        columns = [
            Column("saboteur", lambda row: Code(row["saboteur"]), left=True),
            Column("cell", lambda row: Code(row["case_id"]), left=True),
            Column("why", _survivor, left=True),
        ]
        parts.append(Table(columns, alive.to_dict("records")).markdown())
    if broken := _broken(study):
        columns = [
            Column("cell", lambda cell: Code(cell.case.case_id), left=True),
            Column("why", lambda cell: first_line(cell.problem), left=True),
        ]
        parts += ["## Cells that were not counted", Table(columns, broken).markdown()]
    saboteurs = _saboteurs(findings, study)
    stands_for = Column("stands for", lambda row: study.saboteurs[row["saboteur"]], left=True)
    parts += [
        "## Saboteurs",
        replace(saboteurs, columns=[*saboteurs.columns, stands_for]).markdown(),
        "<br>".join(LEGEND),
        "## Environment",
        markdown.environment_table(environment),
        markdown.folded(f"All {len(study.cells)} cells", _cells(study).markdown()),
    ]
    return "\n\n".join(parts) + "\n"


def _broken(study: Study) -> list[result.CellResult]:
    return [cell for cell in study.cells if cell.problem is not None]


def headline(verdict: result.StudyVerdict) -> str:
    if not verdict.overall.applicable:
        return "NOTHING TRIED"
    return "SEEN" if verdict.passed else "NOT ALL SEEN"


def _counts(study: Study, verdict: result.StudyVerdict) -> str:
    parts = [f"{_share(verdict.overall)} of {plural(verdict.overall.applicable, 'wrong run', 'wrong runs')}"]
    parts.append(f"{_failed_share(verdict.overall)} as a mismatch")
    if verdict.half.applicable and verdict.full.applicable:
        parts.append(f"float32 and float64 {_share(verdict.full)}, half types {_share(verdict.half)}")
    parts.append(f"{verdict.unexplained_full} unexplained in float32 and float64")
    if verdict.broken_cells:
        parts.append(f"{plural(verdict.broken_cells, 'cell', 'cells')} not counted")
    tried = f"{plural(len(study.saboteurs), 'saboteur', 'saboteurs')} in {plural(len(study.cells), 'cell', 'cells')}"
    return ", ".join([*parts, tried, f"{study.seconds:.0f} s"])


def _share(score: result.Score) -> str:
    """Never rounded up to 100 %: one survivor shows."""
    if score.share is None:
        return ABSENT
    return "100 %" if score.killed == score.applicable else percent(min(score.share, 0.9999), 2)


def _failed_share(score: result.Score) -> str:
    if score.failed_share is None:
        return ABSENT
    return "100 %" if score.failed == score.applicable else percent(min(score.failed_share, 0.9999), 2)


def _survivor(row: Row) -> str:
    nearest = "nothing was judged" if is_absent(row["err_ratio"]) else f"largest error {ratio(row['err_ratio'])} N"
    reason = "UNEXPLAINED" if is_absent(row["explanation"]) else first_line(row["explanation"])
    return f"{nearest}: {reason}"


def _scores(findings: pd.DataFrame) -> Table:
    rows = [("all", "", result.score_of(findings))]
    rows += [(axis, value, score) for axis in result.AXES for value, score in result.scores_by(findings, axis).items()]
    columns = [
        Column("axis", lambda row: row[0], left=True),
        Column("value", lambda row: row[1], left=True),
        Column("tried", lambda row: f"{row[2].applicable:,}"),
        Column("seen", lambda row: f"{row[2].killed:,}"),
        Column("score", lambda row: _share(row[2])),
        Column("mismatch", lambda row: f"{row[2].failed:,}"),
        Column("score", lambda row: _failed_share(row[2])),
    ]
    return Table(columns, rows)


def _saboteurs(findings: pd.DataFrame, study: Study) -> Table:
    titles = {name: name for name in KILLED} | {SURVIVED: "survived", NOT_APPLICABLE: "n.a."}
    columns = [
        Column("saboteur", itemgetter("saboteur"), left=True),
        *(Column(title, itemgetter(name)) for name, title in titles.items()),
        Column("first seen by", lambda row: plain(row["mostly_by"]) or ABSENT, left=True),
    ]
    return Table(columns, result.saboteurs_frame(findings, list(study.saboteurs)).to_dict("records"))


def _thresholds(study: Study) -> Table:
    columns = [
        Column("dtype", itemgetter("dtype"), left=True),
        Column("phase", itemgetter("phase"), left=True),
        Column("cells", itemgetter("cells")),
        Column("mismatch from", lambda row: _error(row["mismatch_median"])),
        Column("worst", lambda row: _error(row["mismatch_worst"])),
        Column("seen from", lambda row: _error(row["seen_median"])),
        Column("worst", lambda row: _error(row["seen_worst"])),
    ]
    return Table(columns, result.thresholds_frame(result.cells_frame(study.cells)).to_dict("records"))


def _cells(study: Study) -> Table:
    columns = [
        Column("cell", itemgetter("case_id"), left=True),
        Column("seen", lambda row: f"{row['killed']}/{row['applicable']}"),
        Column("regimes needed", lambda row: plain(row["regimes_needed"]) or ABSENT, left=True),
        Column("mismatch from", lambda row: _error(row["mismatch_from"])),
        Column("seen from", lambda row: _error(row["seen_from"])),
        Column("s", lambda row: f"{row['seconds']:.1f}"),
    ]
    return Table(columns, result.cells_frame(study.cells).to_dict("records"))


def _error(value: Any) -> str:
    """Not even the largest error that was tried is seen: infinite in a median, absent in a cell."""
    if is_absent(value) or value == float("inf"):
        return "> 0.1"
    return f"{value:.0e}" if value < 0.01 else f"{value:g}"
