"""What the study shows: tables on the terminal, Markdown, CSV files and the ROC picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console

from bench.gate_study import night as nights
from bench.gate_study import roc
from bench.gate_study.calibrate import Injection
from bench.gate_study.night import SHARES, NightResult
from bench.gate_study.run import read_calibration
from bench.gate_study.tally import Line, Rate, false_alarms, frame_of, tally
from bench.gate_study.targets import REACHED, Verdict, all_reached, judge, shown
from harness import store
from harness.errors import BadInput
from harness.report.markdown import environment_table
from harness.report.table import Code, Column, Table, escaped
from harness.report.terminal import say
from harness.text import ABSENT, number, percent

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
    for table in _mode_tables(study):
        console.print(table)
        console.print()
    console.print(_injections(study.injections))
    say(console, *LEGEND, *notes(study), style="dim")
    console.print()
    console.print(_targets(study.verdicts))
    console.print()
    say(console, headline(study), style="bold green" if all_reached(study.verdicts) else "bold red", whole=True)
    written = " ".join((MARKDOWN, TABLE, TARGETS, CURVES, CELLS, roc.PICTURE))
    say(console, f"{folder}/  {written}", whole=True)


def study_markdown(study: Study, folder: Path, *, drawn: bool) -> str:
    parts = [f"# gate study: {escaped(headline(study))}"]
    for table in (_targets(study.verdicts), *_mode_tables(study)):
        parts += [f"## {table.title}", table.markdown()]
    parts += [f"![ROC]({roc.PICTURE})"] if drawn else []
    injections = _injections(study.injections)
    parts += [f"## {injections.title}", injections.markdown(), "<br>".join((*LEGEND, *notes(study)))]
    if len(alarms := false_alarms(study.frame)):
        columns = [
            Column("mode", lambda row: row["mode"], left=True),
            Column("night", lambda row: f"{row['kind']} {row['night']}", left=True),
            Column("cell", lambda row: Code(row["case_id"]), left=True),
            Column("change", lambda row: percent(row["change"], 1)),
            Column("lower end", lambda row: percent(row["score"], 1)),
        ]
        parts += ["## Our false alarms", Table(columns, alarms.to_dict("records")).markdown()]
    parts += ["## Environment", environment_table(store.read_environment(folder))]
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


def _mode_tables(study: Study) -> list[Table]:
    """False alarms, detections and areas under the curve, for quiet and for busy nights."""
    tables = []
    decision = Column("", lambda line: line.decision, left=True)
    alarms = [
        decision,
        Column("cells", lambda line: shown(line.alarms) or ABSENT, left=True),
        Column("nights", lambda line: shown(line.alarm_nights) or ABSENT, left=True),
        Column("beside", lambda line: shown(line.beside) or ABSENT, left=True),
        Column("s/cell", lambda line: number(line.seconds, ".2f")),
    ]
    unknown = Column("inconclusive", lambda line: ABSENT if line.inconclusive is None else _rate(line.inconclusive))
    detected = [decision, *map(_detected, SHARES), unknown]
    areas = [decision, *(_area(study, share) for share in SHARES)]
    for mode in dict.fromkeys(line.mode for line in study.lines):
        own = [line for line in study.lines if line.mode == mode]
        tables.append(Table(alarms, own, f"False alarms, {mode}"))
        tables.append(Table(detected, own, f"Detected, {mode}"))
        tables.append(Table(areas, own, f"Area under the curve, {mode}"))
    return tables


def _detected(share: float) -> Column:
    return Column(f"{share:+.0%}", lambda line: _rate(line.detected[share]))


def _area(study: Study, share: float) -> Column:
    return Column(f"{share:+.0%}", lambda line: number(study.areas.get((line.mode, line.decision, share)), ".3f"))


def _injections(injections: Mapping[str, Mapping[float, Injection]]) -> Table:
    """Over the cells: the median of what was measured, its range, and the median width of its intervals."""
    listed = {share: [found[share] for found in injections.values() if share in found] for share in SHARES}

    def measured(row: tuple[float, list[Injection]]) -> pd.Series:
        return pd.Series([each.measured for each in row[1]])

    def half(row: tuple[float, list[Injection]]) -> pd.Series:
        return pd.Series([(each.hi - each.lo) / 2 for each in row[1]])

    columns = [
        Column("asked", lambda row: f"{row[0]:+.0%}"),
        Column("median", lambda row: percent(measured(row).median(), 1)),
        Column("least", lambda row: percent(measured(row).min(), 1)),
        Column("most", lambda row: percent(measured(row).max(), 1)),
        Column("± of a cell", lambda row: percent(half(row).median(), 1)),
        Column("alone", lambda row: percent(pd.Series([each.alone for each in row[1]]).median(), 1)),
        Column("cells", lambda row: len(row[1])),
    ]
    return Table(columns, [row for row in listed.items() if row[1]], "Extra work: asked for and measured")


def _targets(verdicts: Sequence[Verdict]) -> Table:
    columns = [
        Column("target", lambda each: each.title, left=True),
        Column("limit", lambda each: each.limit, left=True),
        Column("found", lambda each: each.found or ABSENT, left=True),
        Column("", lambda each: each.status, left=True),
    ]
    return Table(columns, verdicts, "Targets")


def _rate(rate: Rate) -> str:
    """`83 % (30; 65-94)`: of how many, and the interval."""
    if rate.value is None or rate.interval is None:
        return ABSENT
    low, high = rate.interval
    return f"{100 * rate.value:.0f} % ({rate.total}; {100 * low:.0f}-{100 * high:.0f})"
