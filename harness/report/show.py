"""A run as a story on the terminal: when it ends (`finish`) and for reading it again (`print_run`).

Read again, its summary is what the run printed when it ended: verdict, variants, cells that are not ok. Added is what
takes looking: how latency grows with the sequence, where the errors lie, which variant wins on cache against time, the
slowest and the worst cells, and where and how the run was made.
"""

from operator import itemgetter
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from harness.errors import EQUAL, NOT_EQUAL
from harness.record import OK_FACTOR
from harness.report.page import StoredRun, write_own_page
from harness.report.page.rows import combine, on_front, tradeoff_points
from harness.report.page.words import environment_table
from harness.report.sparsity import is_approximate, print_sparsity
from harness.report.summary import is_timed, judge
from harness.report.table import Column, Table
from harness.report.terminal import print_summary, say
from harness.text import ABSENT, condense, count, interval, milliseconds, plain, ratio, sparkline, terminal

SHOWN, CURVES = 5, 12
CELL = Column("cell", itemgetter("case_id"), left=True)  # stands last: it may be long, and folds there


def finish(frame: pd.DataFrame, folder: Path, *, quiet: bool, strict: bool) -> int:
    """The end of a run, measured or merged: writes its page, prints its summary, returns its exit code."""
    write_own_page(folder, frame)
    if not quiet:
        print_summary(frame, terminal(), folder=folder)
        if is_approximate(frame):
            print_sparsity(folder, terminal())
    verdict = judge(frame)
    degraded = strict and verdict.statuses.get("degraded", 0)
    return EQUAL if verdict.passed and not degraded else NOT_EQUAL


def print_run(run: StoredRun, console: Console) -> None:
    print_summary(run.frame, console, folder=None)
    frame = combine([run]).astype({"err_ratio": "float64", "latency_ms": "float64"})
    setting, cells = largest_choice(frame)
    height = f"in the run's order, from 0 to the full height at {OK_FACTOR:g} N: the limit of ok"
    for title, table, note in (
        ("Latency over sequence length", curves(frame), "longer to the right; each row from its lowest to its highest"),
        ("Error/N over cells", errors(frame), height),
        (f"KV cache against decode latency, {setting}", tradeoffs(cells), "*: none has a smaller cache and is faster"),
        ("Slowest beside the reference", slowest(frame), ""),
        ("Largest errors", worst(frame), ""),
    ):
        if table.rows:
            console.print()
            say(console, title, style="bold")
            console.print(table)
            say(console, *([note] if note else []), style="dim")
    console.print()
    _print_origin(run, console)


def curves(frame: pd.DataFrame) -> Table:
    """The steepest first: one row for each variant, phase and family of cells that differ in length alone."""
    timed = frame[is_timed(frame)]
    rows = []
    for names, cells in timed.groupby(["series", "phase", "family"], sort=False):
        cells = cells.sort_values("seq_len")
        if cells["seq_len"].nunique() == len(cells) > 1:
            lengths, times = cells["seq_len"].tolist(), cells["latency_ms"].tolist()
            rows.append({"names": names, "lengths": lengths, "times": times, "growth": times[-1] / times[0]})
    rows.sort(key=itemgetter("growth"), reverse=True)
    more = f" (+{len(rows) - CURVES})" if len(rows) > CURVES else ""
    columns = [
        Column("variant" + more, lambda row: row["names"][0], left=True),
        Column("phase", lambda row: row["names"][1], left=True),
        Column("cells", lambda row: row["names"][2], left=True),
        Column("length", lambda row: f"{row['lengths'][0]:,}…{row['lengths'][-1]:,}"),
        Column("", lambda row: sparkline(row["times"]), left=True),
        Column("ms", lambda row: f"{milliseconds(row['times'][0])}…{milliseconds(row['times'][-1])}"),
    ]
    return Table(columns, rows[:CURVES])


def errors(frame: pd.DataFrame) -> Table:
    judged = frame[frame["err_ratio"].notna()].groupby("variant", sort=False)["err_ratio"]
    columns = [
        Column("variant", lambda row: row[0], left=True),
        Column("cells", lambda row: f"{len(row[1]):,}"),
        Column("", lambda row: sparkline(condense(row[1]), low=0, high=OK_FACTOR), left=True),
        Column("worst", lambda row: ratio(max(row[1]))),
    ]
    return Table(columns, [(name, cells.tolist()) for name, cells in judged])


def largest_choice(frame: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """The decode cells of the setting with most variants, of these the longest; and what it is called."""
    cells = tradeoff_points(frame)
    if cells.empty:
        return "", cells
    sizes = cells.groupby("setting", sort=False).agg(variants=("series", "nunique"), length=("seq_len", "max"))
    setting = sizes.sort_values(["variants", "length"], kind="stable").index[-1]
    return plain(setting), cells[cells["setting"] == setting]


def tradeoffs(cells: pd.DataFrame) -> Table:
    columns = [
        Column("", lambda row: "*" if row["front"] else "", left=True),
        Column("variant", itemgetter("series"), left=True),
        Column("KV B/token", lambda row: count(row["kv_bytes_per_token"])),
        Column("params", lambda row: count(row["params"])),
        Column("decode ms", lambda row: milliseconds(row["latency_ms"])),
        Column("x ref", lambda row: ratio(row["latency_ratio"])),
    ]
    return Table(columns, on_front(cells).to_dict("records"))


def slowest(frame: pd.DataFrame) -> Table:
    columns = [
        Column("x ref", lambda row: ratio(row["latency_ratio"])),
        Column("95 %", lambda row: interval(row["latency_ratio_lo"], row["latency_ratio_hi"])),
        Column("ms", lambda row: milliseconds(row["latency_ms"])),
        Column("timing", itemgetter("timing"), left=True),
        CELL,
    ]
    cells = frame[frame["latency_ratio"].notna()].nlargest(SHOWN, "latency_ratio")
    return Table(columns, cells.to_dict("records"))


def worst(frame: pd.DataFrame) -> Table:
    columns = [
        Column("error/N", lambda row: ratio(row["err_ratio"])),
        Column("status", itemgetter("status"), left=True),
        Column("in", lambda row: plain(row["worst_tensor"]) or ABSENT, left=True),
        CELL,
    ]
    return Table(columns, frame[frame["err_ratio"].notna()].nlargest(SHOWN, "err_ratio").to_dict("records"))


def _print_origin(run: StoredRun, console: Console) -> None:
    say(console, "Where and how", style="bold")
    grid = Grid.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    if run.command is not None:
        grid.add_row("command", Text(plain(run.command)))
    if run.environment is not None:
        table = environment_table([run])
        for row in table.rows:
            grid.add_row(*(Text(column.cell(row)) for column in table.columns))
    console.print(grid)
