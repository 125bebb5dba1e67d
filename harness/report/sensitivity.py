"""What `harness sensitivity` shows: the mutation score, each saboteur's fate, survivors, the smallest errors seen."""

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.text import Text

from harness.environment import Environment
from harness.mutants import result as table
from harness.mutants.result import KILLED, NOT_APPLICABLE, SURVIVED, Study
from harness.report import markdown
from harness.report.story import Column
from harness.report.terminal import table_of
from harness.text import ABSENT, first_line, is_absent, plain, plural, ratio

SHOWN = 20  # survivors on the terminal; sensitivity.md has all
LEGEND = (
    "mismatch, degraded: cells in which the acceptance rule saw it so; error: cells in which it broke.",
    "first seen by: the regime or check that saw it before all others, in most of its cells.",
)
THRESHOLD_LEGEND = (
    "The smallest relative error of the scale that is still seen: of all cells the median, and the worst one. "
    "Powers of ten."
)
Row = Mapping[Hashable, Any]


def print_study(study: Study, console: Console, *, folder: Path) -> None:
    findings = table.findings_frame(study.cells)
    verdict = table.judge(study)
    style = "bold green" if verdict.passed else "bold red"
    for columns in (_saboteurs(findings, study), _scores(findings), _thresholds(study)):
        console.print(table_of(columns))
        console.print()
    for line in (*LEGEND, THRESHOLD_LEGEND):
        console.print(Text(line, "dim"), highlight=False)
    alive = table.survivors(findings)
    if len(alive):
        console.print()
        console.print(Text("Survivors", "bold"))
    for row in alive.head(SHOWN).to_dict("records"):
        mark = Text(f"  {row['saboteur']}", "red" if is_absent(row["explanation"]) else "yellow")
        console.print(Text.assemble(mark, f"  {_survivor(row)}"), highlight=False, soft_wrap=True)
        console.print(Text(f"    {row['case_id']}"), highlight=False, soft_wrap=True)
    if len(alive) > SHOWN:
        console.print(Text(f"  +{len(alive) - SHOWN} more, see sensitivity.md"), highlight=False)
    for cell in study.cells:
        if cell.problem is not None:
            why = f"{plain(cell.case.case_id)}: {first_line(cell.problem)}"
            console.print(Text.assemble(("  not counted  ", "red"), why), highlight=False, soft_wrap=True)
    console.print()
    console.print(Text.assemble((headline(verdict), style), "  ", _counts(study, verdict)), highlight=False)
    console.print(Text(f"{folder}/  sensitivity.md sensitivity.csv cells.csv"), highlight=False, soft_wrap=True)


def sensitivity_markdown(study: Study, environment: Environment) -> str:
    findings = table.findings_frame(study.cells)
    verdict = table.judge(study)
    alive = table.survivors(findings)
    stands_for = Column("stands for", [plain(text) for text in study.saboteurs.values()], left=True)
    parts = [
        f"# sensitivity of {markdown.text(study.suite)}: {headline(verdict)}",
        f"**{_counts(study, verdict)}**",
        "## Mutation score",
        _markdown(_scores(findings)),
        "## The smallest error that is seen",
        THRESHOLD_LEGEND,
        _markdown(_thresholds(study)),
        f"## Survivors: {len(alive)}",
    ]
    if len(alive):
        rows = [
            (markdown.code(row["saboteur"]), markdown.code(row["case_id"]), markdown.text(_survivor(row)))
            for row in alive.to_dict("records")
        ]
        parts.append(markdown.table_of(("saboteur", "cell", "why"), rows, [True] * 3))
    if verdict.broken_cells:
        broken = [
            (markdown.code(cell.case.case_id), markdown.text(first_line(cell.problem)))
            for cell in study.cells
            if cell.problem is not None
        ]
        parts += ["## Cells that were not counted", markdown.table_of(("cell", "why"), broken, [True] * 2)]
    parts += [
        "## Saboteurs",
        _markdown([*_saboteurs(findings, study), stands_for]),
        "<br>".join(LEGEND),
        "## Environment",
        markdown.environment_table(environment),
        f"<details><summary>All {len(study.cells)} cells</summary>\n\n{_markdown(_cells(study))}\n\n</details>",
    ]
    return "\n\n".join(parts) + "\n"


def headline(verdict: table.StudyVerdict) -> str:
    if not verdict.overall.applicable:
        return "NOTHING TRIED"
    return "SEEN" if verdict.passed else "NOT ALL SEEN"


def _counts(study: Study, verdict: table.StudyVerdict) -> str:
    parts = [f"{_share(verdict.overall)} of {plural(verdict.overall.applicable, 'wrong run', 'wrong runs')}"]
    if verdict.half.applicable and verdict.full.applicable:
        parts.append(f"float32 and float64 {_share(verdict.full)}, half types {_share(verdict.half)}")
    parts.append(f"{verdict.unexplained_full} unexplained in float32 and float64")
    if verdict.broken_cells:
        parts.append(f"{plural(verdict.broken_cells, 'cell', 'cells')} not counted")
    tried = f"{plural(len(study.saboteurs), 'saboteur', 'saboteurs')} in {plural(len(study.cells), 'cell', 'cells')}"
    return ", ".join([*parts, tried, f"{study.seconds:.0f} s"])


def _share(score: table.Score) -> str:
    """Never rounded up to 100 %: one survivor shows."""
    if score.share is None:
        return ABSENT
    return "100 %" if score.killed == score.applicable else f"{min(100 * score.share, 99.99):.2f} %"


def _survivor(row: Row) -> str:
    nearest = "nothing was judged" if is_absent(row["err_ratio"]) else f"largest error {ratio(row['err_ratio'])} N"
    reason = "UNEXPLAINED" if is_absent(row["explanation"]) else first_line(row["explanation"])
    return f"{nearest}: {reason}"


def _scores(findings: pd.DataFrame) -> list[Column]:
    rows = [("all", "", table.score_of(findings))]
    rows += [(axis, value, score) for axis in table.AXES for value, score in table.scores_by(findings, axis).items()]
    return [
        Column("axis", [axis for axis, _, _ in rows], left=True),
        Column("value", [plain(value) for _, value, _ in rows], left=True),
        Column("tried", [f"{score.applicable:,}" for _, _, score in rows]),
        Column("seen", [f"{score.killed:,}" for _, _, score in rows]),
        Column("score", [_share(score) for _, _, score in rows]),
    ]


def _saboteurs(findings: pd.DataFrame, study: Study) -> list[Column]:
    frame = table.saboteurs_frame(findings, list(study.saboteurs))
    titles = {SURVIVED: "survived", NOT_APPLICABLE: "n.a."}
    return [
        Column("saboteur", [plain(name) for name in frame["saboteur"]], left=True),
        *(
            Column(titles.get(outcome, outcome), [str(number) for number in frame[outcome]])
            for outcome in (*KILLED, SURVIVED, NOT_APPLICABLE)
        ),
        Column("first seen by", [plain(by) or ABSENT for by in frame["mostly_by"]], left=True),
    ]


def _thresholds(study: Study) -> list[Column]:
    frame = table.thresholds_frame(table.cells_frame(study.cells))
    return [
        Column("dtype", [plain(value) for value in frame["dtype"]], left=True),
        Column("phase", [plain(value) for value in frame["phase"]], left=True),
        Column("cells", [str(number) for number in frame["cells"]]),
        Column("mismatch from", [_error(value) for value in frame["mismatch_median"]]),
        Column("worst", [_error(value) for value in frame["mismatch_worst"]]),
        Column("seen from", [_error(value) for value in frame["seen_median"]]),
        Column("worst", [_error(value) for value in frame["seen_worst"]]),
    ]


def _cells(study: Study) -> list[Column]:
    rows = table.cells_frame(study.cells).to_dict("records")
    return [
        Column("cell", [plain(row["case_id"]) for row in rows], left=True),
        Column("seen", [f"{row['killed']}/{row['applicable']}" for row in rows]),
        Column("regimes needed", [plain(row["regimes_needed"]) or ABSENT for row in rows], left=True),
        Column("mismatch from", [_error(row["mismatch_from"]) for row in rows]),
        Column("seen from", [_error(row["seen_from"]) for row in rows]),
        Column("s", [f"{row['seconds']:.1f}" for row in rows]),
    ]


def _error(value: Any) -> str:
    """Not even the largest error that was tried is seen: infinite in a median, absent in a cell."""
    if is_absent(value) or value == float("inf"):
        return "> 0.1"
    return f"{value:.0e}" if value < 0.01 else f"{value:g}"


def _markdown(columns: list[Column]) -> str:
    rows = zip(*([markdown.text(cell) for cell in column.cells] for column in columns), strict=True)
    return markdown.table_of([column.title for column in columns], rows, [column.left for column in columns])
