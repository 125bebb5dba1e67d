"""A run as a story on the terminal, for reading it again.

Its summary is what the run printed when it ended: verdict, variants, cells that are not ok. Added here is what takes
looking: how latency grows with the sequence, where the errors lie, which variant wins on cache against time, the
slowest and the worst cells, and where and how the run was made.
"""

import math
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.errors import EQUAL, NOT_EQUAL
from harness.record import EQUAL_STATUSES
from harness.report.page import Run, write_own_page
from harness.report.page.rows import combine
from harness.report.page.words import environment_table
from harness.report.sparsity import is_approximate, print_sparsity
from harness.report.story import Column
from harness.report.summary import judge
from harness.report.terminal import print_summary, table_of
from harness.text import ABSENT, condense, count, interval, milliseconds, plain, ratio, sparkline, terminal

SHOWN, CURVES = 5, 12
OK_UP_TO = 2.0  # in noise floors N


def print_run(run: Run, console: Console, *, measured_share: float | None = None, elapsed: float | None = None) -> None:
    print_summary(run.frame, console, folder=None, measured_share=measured_share, elapsed=elapsed)
    frame = combine([run]).astype({"err_ratio": "float64", "latency_ms": "float64"})
    setting, cells = largest_choice(frame)
    for title, table, note in (
        ("Latency over sequence length", curves(frame), "longer to the right; each row from its lowest to its highest"),
        ("Error/N over cells", errors(frame), "in the run's order, from 0 to the full height at 2 N: the limit of ok"),
        (f"KV cache against decode latency, {setting}", tradeoffs(cells), "*: none has a smaller cache and is faster"),
        ("Slowest beside the reference", slowest(frame), ""),
        ("Largest errors", worst(frame), ""),
    ):
        if table is not None:
            _print_section(console, title, table, note)
    console.print()
    _print_origin(run, console)


def curves(frame: pd.DataFrame) -> Table | None:
    """The steepest first: one row for each variant, phase and family of cells that differ in length alone."""
    timed = frame[frame["status"].isin(EQUAL_STATUSES) & frame["latency_ms"].notna()]
    rows: list[tuple[float, str, str, str, str, list[float]]] = []
    for (series, phase, family), cells in timed.groupby(["series", "phase", "family"], sort=False):
        cells = cells.sort_values("seq_len")
        if cells["seq_len"].nunique() == len(cells) > 1:
            times = cells["latency_ms"].tolist()
            lengths = f"{cells['seq_len'].iloc[0]:,}…{cells['seq_len'].iloc[-1]:,}"
            rows.append((times[-1] / times[0], str(series), str(phase), str(family), lengths, times))
    if not rows:
        return None
    rows.sort(key=lambda row: -row[0])
    shown = rows[:CURVES]
    more = f" (+{len(rows) - CURVES})" if len(rows) > CURVES else ""
    return table_of(
        [
            Column("variant" + more, [plain(row[1]) for row in shown], left=True),
            Column("phase", [row[2] for row in shown], left=True),
            Column("cells", [plain(row[3]) for row in shown], left=True),
            Column("length", [row[4] for row in shown]),
            Column("", [sparkline(row[5]) for row in shown], left=True),
            Column("ms", [f"{milliseconds(row[5][0])}…{milliseconds(row[5][-1])}" for row in shown]),
        ]
    )


def errors(frame: pd.DataFrame) -> Table | None:
    judged = frame[frame["err_ratio"].notna()]
    if judged.empty:
        return None
    groups = [(str(name), cells["err_ratio"].tolist()) for name, cells in judged.groupby("variant", sort=False)]
    return table_of(
        [
            Column("variant", [plain(name) for name, _ in groups], left=True),
            Column("cells", [f"{len(values):,}" for _, values in groups]),
            Column("", [sparkline(condense(values), low=0, high=OK_UP_TO) for _, values in groups], left=True),
            Column("worst", [ratio(max(values)) for _, values in groups]),
        ]
    )


def largest_choice(frame: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """The decode cells of the setting with most variants, of these the longest; and what it is called."""
    cells = frame[(frame["phase"] == "decode") & frame["status"].isin(EQUAL_STATUSES)]
    cells = cells[cells["latency_ms"].notna() & cells["kv_bytes_per_token"].notna()]
    if cells.empty:
        return "", cells
    sizes = cells.groupby("setting", sort=False).agg(variants=("series", "nunique"), length=("seq_len", "max"))
    setting = sizes.sort_values(["variants", "length"], kind="stable").index[-1]
    return plain(setting), cells[cells["setting"] == setting]


def tradeoffs(cells: pd.DataFrame) -> Table | None:
    if cells.empty:
        return None
    rows = on_front(cells).to_dict("records")
    return table_of(
        [
            Column("", ["*" if row["front"] else "" for row in rows], left=True),
            Column("variant", [plain(row["series"]) for row in rows], left=True),
            Column("KV B/token", [count(row["kv_bytes_per_token"]) for row in rows]),
            Column("params", [count(row["params"]) for row in rows]),
            Column("decode ms", [milliseconds(row["latency_ms"]) for row in rows]),
            Column("x ref", [ratio(row["latency_ratio"]) for row in rows]),
        ]
    )


def on_front(cells: pd.DataFrame) -> pd.DataFrame:
    """In order of the cache, a cell is on the front if it is faster than all before it; in column `front`."""
    ordered = cells.sort_values(["kv_bytes_per_token", "latency_ms"], kind="stable")
    before = ordered["latency_ms"].cummin().shift(fill_value=math.inf)
    return ordered.assign(front=ordered["latency_ms"] < before)


def slowest(frame: pd.DataFrame) -> Table | None:
    cells = frame[frame["latency_ratio"].notna()].nlargest(SHOWN, "latency_ratio")
    ends = zip(cells["latency_ratio_lo"], cells["latency_ratio_hi"], strict=True)
    return _cells(
        cells,
        Column("x ref", [ratio(value) for value in cells["latency_ratio"]]),
        Column("95 %", [interval(*pair) for pair in ends]),
        Column("ms", [milliseconds(value) for value in cells["latency_ms"]]),
    )


def worst(frame: pd.DataFrame) -> Table | None:
    cells = frame[frame["err_ratio"].notna()].nlargest(SHOWN, "err_ratio")
    tensors = cells["worst_tensor"].astype("string").fillna(ABSENT)
    return _cells(
        cells,
        Column("error/N", [ratio(value) for value in cells["err_ratio"]]),
        Column("status", [str(value) for value in cells["status"]], left=True),
        Column("in", [plain(value) for value in tensors], left=True),
    )


def _cells(cells: pd.DataFrame, *columns: Column) -> Table | None:
    """The id last: it may be long, and folds there."""
    if cells.empty:
        return None
    return table_of([*columns, Column("cell", [plain(value) for value in cells["case_id"]], left=True)])


def _print_section(console: Console, title: str, table: Table, note: str) -> None:
    console.print()
    console.print(Text(title, "bold"), highlight=False)
    console.print(table)
    if note:
        console.print(Text(note, "dim"), highlight=False)


def _print_origin(run: Run, console: Console) -> None:
    console.print(Text("Where and how", "bold"), highlight=False)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    if run.command is not None:
        grid.add_row("command", Text(plain(run.command)))
    if run.environment is not None:
        for row in environment_table([run]).rows:
            grid.add_row(*(Text(cell) for cell in row.cells))
    console.print(grid)


# ----------------------------------------------------------------------------------------------------------------------
# The end of a run, measured or merged: its page, its summary on the terminal, its exit code.


def finish(frame: pd.DataFrame, folder: Path, *, quiet: bool, strict: bool) -> int:
    write_own_page(folder, frame)
    if not quiet:
        share, elapsed = frame.attrs["measured_share"], frame.attrs["elapsed"]
        print_summary(frame, terminal(), folder=folder, measured_share=share, elapsed=elapsed)
        if is_approximate(frame):
            print_sparsity(folder, terminal())
    verdict = judge(frame)
    degraded = strict and verdict.statuses.get("degraded", 0)
    return EQUAL if verdict.passed and not degraded else NOT_EQUAL
