"""What the study shows: tables on the terminal, Markdown, CSV files and the ROC picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.text import Text

from bench.gate_study import night as nights
from bench.gate_study import roc
from bench.gate_study.calibrate import Injection
from bench.gate_study.night import SHARES, NightResult
from bench.gate_study.run import read_calibration
from bench.gate_study.tally import Line, Rate, false_alarms, frame_of, tally
from bench.gate_study.targets import REACHED, Verdict, all_reached, judge, shown
from harness import store
from harness.errors import BadInput
from harness.report import markdown
from harness.report.story import Column
from harness.report.terminal import table_of
from harness.text import ABSENT, is_absent

MARKDOWN, TABLE, TARGETS, CURVES, CELLS = "gate_study.md", "gate_study.csv", "targets.csv", "roc.csv", "cells.csv"
BUSY = 0.25  # cores' worth of others' work from which on a quiet night was not quiet
LEGEND = (
    "false alarms: nights in which base and head are the same code. Detected: of the cells that really do more work, "
    "those flagged; one that is slowed and inconclusive is not detected. 95 % intervals by Clopper and Pearson.",
    "beside: false alarms on untouched cells of nights in which other cells were slowed; the targets count them too.",
    "s/cell: wall-clock time of a night over its cells, with the start of all processes.",
    "area: under the curve of detected over false alarms as the tool's threshold is swept; 0.5 is a coin.",
)


@dataclass(frozen=True)
class Study:
    frame: pd.DataFrame
    lines: list[Line]
    verdicts: list[Verdict]
    areas: dict[tuple[str, str, float], float]
    injections: dict[str, dict[float, Injection]]
    results: list[NightResult]


def study_of(folder: Path) -> Study:
    results = nights.read(folder)
    if not results:
        raise BadInput(f"{folder} holds no nights: there is no {folder / nights.NIGHTS}, or nothing in it")
    injections = read_calibration(folder)
    frame = frame_of(results, injections)
    lines = tally(frame)
    curves = roc.curves(frame)
    areas = {
        (str(mode), str(decision), float(str(share))): roc.area(
            list(zip(own["false_alarms"], own["detected"], strict=True))
        )
        for (mode, decision, share), own in curves.groupby(["mode", "decision", "share"], sort=False)
    }
    known = {key: value for key, value in areas.items() if value is not None}
    return Study(frame, lines, judge(lines, frame), known, injections, results)


def write(study: Study, folder: Path) -> None:
    files: Mapping[str, pd.DataFrame] = {
        TABLE: lines_frame(study.lines),
        TARGETS: pd.DataFrame([vars(verdict) for verdict in study.verdicts]),
        CURVES: roc.curves(study.frame),
        CELLS: study.frame,
    }
    for name, frame in files.items():
        store.write_atomically(folder / name, frame.to_csv(index=False, lineterminator="\n").encode())
    drawn = roc.save(study.frame, folder)
    store.write_atomically(folder / MARKDOWN, study_markdown(study, folder, drawn=drawn).encode())


def lines_frame(lines: Sequence[Line]) -> pd.DataFrame:
    def columns(name: str, rate: Rate | None) -> dict[str, float | int | None]:
        low, high = (None, None) if rate is None or rate.interval is None else rate.interval
        count, total, value = (None, None, None) if rate is None else (rate.count, rate.total, rate.value)
        return {name: value, f"{name}_lo": low, f"{name}_hi": high, f"{name}_count": count, f"{name}_of": total}

    rows = []
    for line in lines:
        row: dict[str, object] = {"mode": line.mode, "decision": line.decision}
        row |= columns("false_alarms", line.alarms) | columns("false_alarm_nights", line.alarm_nights)
        row |= columns("false_alarms_beside", line.beside)
        for share, rate in line.detected.items():
            row |= columns(f"detected_{100 * share:.0f}", rate)
        rows.append(row | columns("inconclusive", line.inconclusive) | {"seconds_per_cell": line.seconds})
    return pd.DataFrame(rows)


def print_study(study: Study, console: Console, *, folder: Path) -> None:
    for mode in dict.fromkeys(line.mode for line in study.lines):
        own = [line for line in study.lines if line.mode == mode]
        console.print(table_of(_alarm_columns(own), title=f"False alarms, {mode}"))
        console.print()
        console.print(table_of(_detection_columns(own), title=f"Detected, {mode}"))
        console.print()
        console.print(table_of(_area_columns(own, study), title=f"Area under the curve, {mode}"))
        console.print()
    console.print(table_of(_injection_columns(study.injections), title="Extra work: asked for and measured"))
    for line in (*LEGEND, *notes(study)):
        console.print(Text(line, "dim"), highlight=False)
    console.print()
    console.print(table_of(_target_columns(study.verdicts), title="Targets"))
    console.print()
    style = "bold green" if all_reached(study.verdicts) else "bold red"
    console.print(Text.assemble((headline(study), style)), highlight=False, soft_wrap=True)
    written = " ".join((MARKDOWN, TABLE, TARGETS, CURVES, CELLS, roc.PICTURE))
    console.print(Text(f"{folder}/  {written}"), highlight=False, soft_wrap=True)


def study_markdown(study: Study, folder: Path, *, drawn: bool) -> str:
    parts = [f"# gate study: {markdown.text(headline(study))}", "## Targets", _table(_target_columns(study.verdicts))]
    for mode in dict.fromkeys(line.mode for line in study.lines):
        own = [line for line in study.lines if line.mode == mode]
        parts += [f"## False alarms, {mode}", _table(_alarm_columns(own))]
        parts += [f"## Detected, {mode}", _table(_detection_columns(own))]
        parts += [f"## Area under the curve, {mode}", _table(_area_columns(own, study))]
    parts += [f"![ROC]({roc.PICTURE})"] if drawn else []
    parts += ["## Extra work: asked for and measured", _table(_injection_columns(study.injections))]
    parts += ["<br>".join((*LEGEND, *notes(study)))]
    if len(alarms := false_alarms(study.frame)):
        rows = [
            (
                str(r["mode"]),
                f"{r['kind']} {r['night']}",
                markdown.code(r["case_id"]),
                _percent(r["change"]),
                _percent(r["score"]),
            )
            for r in alarms.to_dict("records")
        ]
        titles = ("mode", "night", "cell", "change", "lower end")
        parts += ["## Our false alarms", markdown.table_of(titles, rows, [True, True, True, False, False])]
    parts += ["## Environment", markdown.environment_table(store.read_environment(folder))]
    return "\n\n".join(parts) + "\n"


def headline(study: Study) -> str:
    missed = [verdict for verdict in study.verdicts if verdict.status != REACHED]
    if not missed:
        return "REACHED"
    return "NOT ALL REACHED: " + "; ".join(f"{each.title} ({each.found or ABSENT}, {each.status})" for each in missed)


def notes(study: Study) -> list[str]:
    """What a reader must know of how these nights were measured."""
    quiet = [r.others for r in study.results if r.night.mode == "quiet" and r.others is not None]
    busy = sum(each > BUSY for each in quiet)
    lines = [f"others' work in quiet nights: {sum(quiet) / len(quiet):.2f} cores on average"] if quiet else []
    if busy:
        lines.append(f"{busy} of {len(quiet)} quiet nights were not quiet: others kept more than {BUSY} cores busy.")
    return lines


def _alarm_columns(lines: Sequence[Line]) -> list[Column]:
    return [
        Column("", [line.decision for line in lines], left=True),
        Column("cells", [shown(line.alarms) or ABSENT for line in lines], left=True),
        Column("nights", [shown(line.alarm_nights) or ABSENT for line in lines], left=True),
        Column("beside", [shown(line.beside) or ABSENT for line in lines], left=True),
        Column("s/cell", [ABSENT if line.seconds is None else f"{line.seconds:.2f}" for line in lines]),
    ]


def _detection_columns(lines: Sequence[Line]) -> list[Column]:
    columns = [Column("", [line.decision for line in lines], left=True)]
    for share in SHARES:
        columns.append(Column(f"{share:+.0%}", [_rate(line.detected[share]) for line in lines]))
    inconclusive = [ABSENT if line.inconclusive is None else _rate(line.inconclusive) for line in lines]
    return [*columns, Column("inconclusive", inconclusive)]


def _area_columns(lines: Sequence[Line], study: Study) -> list[Column]:
    columns = [Column("", [line.decision for line in lines], left=True)]
    for share in SHARES:
        areas = [study.areas.get((line.mode, line.decision, share)) for line in lines]
        columns.append(Column(f"{share:+.0%}", [ABSENT if area is None else f"{area:.3f}" for area in areas]))
    return columns


def _injection_columns(injections: Mapping[str, Mapping[float, Injection]]) -> list[Column]:
    """Over the cells: the median of what was measured, its range, and the median width of its intervals."""
    listed = {share: [found[share] for found in injections.values() if share in found] for share in SHARES}
    listed = {share: found for share, found in listed.items() if found}
    measured = {share: pd.Series([each.measured for each in found]) for share, found in listed.items()}
    half = {share: pd.Series([(each.hi - each.lo) / 2 for each in found]).median() for share, found in listed.items()}
    return [
        Column("asked", [f"{share:+.0%}" for share in listed]),
        Column("median", [_percent(each.median()) for each in measured.values()]),
        Column("least", [_percent(each.min()) for each in measured.values()]),
        Column("most", [_percent(each.max()) for each in measured.values()]),
        Column("± of a cell", [_percent(each) for each in half.values()]),
        Column("alone", [_percent(pd.Series([each.alone for each in found]).median()) for found in listed.values()]),
        Column("cells", [str(len(found)) for found in listed.values()]),
    ]


def _target_columns(verdicts: Sequence[Verdict]) -> list[Column]:
    return [
        Column("target", [each.title for each in verdicts], left=True),
        Column("limit", [each.limit for each in verdicts], left=True),
        Column("found", [each.found or ABSENT for each in verdicts], left=True),
        Column("", [each.status for each in verdicts], left=True),
    ]


def _rate(rate: Rate) -> str:
    """`83 % (30; 65-94)`: of how many, and the interval."""
    if rate.value is None or rate.interval is None:
        return ABSENT
    low, high = rate.interval
    return f"{100 * rate.value:.0f} % ({rate.total}; {100 * low:.0f}-{100 * high:.0f})"


def _percent(value: object) -> str:
    return ABSENT if is_absent(value) else f"{100 * float(str(value)):.1f} %"


def _table(columns: list[Column]) -> str:
    rows = zip(*([markdown.text(cell) for cell in column.cells] for column in columns), strict=True)
    return markdown.table_of([column.title for column in columns], rows, [column.left for column in columns])
