"""Approximate kernels: how much each left out, how close it came, and what that gained, by structure of the input."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.text import Text

from harness import store
from harness.record import Record
from harness.report.markdown import table_of as markdown_table
from harness.report.markdown import text
from harness.report.story import Column
from harness.text import interval, plain, ratio

TITLE = "What was left out?"
LEGEND = (
    "sparsity: share of the visible blocks of queries x keys that was skipped. rel L1: sum|C - G| / sum|G| over the "
    "output, and cosine of both, against the reference in float64.",
    "PV skipped: share of the kept blocks that was scored, but not multiplied with its values.",
    "x dense: latency over that of the tiled kernel in the same blocks, on the inputs of the largest error, with its "
    "95 % interval.",
)
UNTIMED = LEGEND[:2]
PARTS = ("variant", "seq_len", "mask", "phase", "dtype", "batch", "embed_dim")  # of a cell's name
DROPPED = ("interval", "cosine", "PV skipped")  # in this order where the terminal is too narrow
Entry = dict[str, Any]


def is_approximate(frame: pd.DataFrame) -> bool:
    """Whether a run has anything to tell here, seen without reading its records again."""
    return bool(frame["sparsity"].notna().any())


def entries(records: Sequence[Record]) -> list[tuple[Record, Entry]]:
    """Every regime of every approximate cell, in the order of the table."""
    return [(record, entry) for record in records for entry in record.approximation]


def columns(records: Sequence[Record], *, short: bool = False) -> list[Column]:
    """Empty where no kernel was approximate. `short`: of a cell only what sets it apart."""
    found = entries(records)
    if not found:
        return []
    names = _short_names([record for record, _ in found]) if short else [_cell(record, PARTS) for record, _ in found]
    described = [
        Column("cell", names, left=True),
        Column("kernel", [plain(record.kernel) for record, _ in found], left=True),
        Column("inputs", [plain(entry["regime"]) for _, entry in found], left=True),
        Column("sparsity", [_percent(entry["sparsity"]) for _, entry in found]),
        Column("rel L1", [_three(entry["rel_l1"]) for _, entry in found]),
        Column("cosine", [_three(entry["cosine"]) for _, entry in found]),
    ]
    if any(entry["pv_skipped_blocks"] for _, entry in found):
        share = [_percent(entry["pv_skipped_blocks"] / max(entry["kept_blocks"], 1)) for _, entry in found]
        described.append(Column("PV skipped", share))
    if any(entry["dense_ratio"] is not None for _, entry in found):
        described.append(Column("x dense", [ratio(entry["dense_ratio"]) for _, entry in found]))
        spans = [interval(entry["dense_ratio_lo"], entry["dense_ratio_hi"]) for _, entry in found]
        described.append(Column("interval", spans))
    return described


def legend(shown: Sequence[Column]) -> tuple[str, ...]:
    """Of the columns that are shown."""
    return LEGEND if any(column.title == "x dense" for column in shown) else UNTIMED


def sparsity_markdown(folder: Path) -> list[str]:
    """The section of summary.md, as its parts; none where no kernel was approximate."""
    found = columns(store.read_records(folder))
    if not found:
        return []
    rows = zip(*([text(cell) for cell in column.cells] for column in found), strict=True)
    table = markdown_table([column.title for column in found], rows, [column.left for column in found])
    return [f"## {TITLE}", table, "<br>".join(legend(found))]


def print_sparsity(folder: Path, console: Console) -> None:
    from harness.report.terminal import fits, table_of

    found = columns(store.read_records(folder), short=True)
    if not found:
        return
    table = table_of(found, title=TITLE)
    for title in DROPPED:  # summary.md has all of them
        if not fits(table, console):
            found = [column for column in found if column.title != title]
            table = table_of(found, title=TITLE)
    console.print()
    console.print(table)
    for line in legend(found):
        console.print(Text(line, "dim"), highlight=False)


def _cell(record: Record, parts: Sequence[str]) -> str:
    words = {"seq_len": f"L={record.seq_len}", "batch": f"B={record.batch}", "embed_dim": f"E={record.embed_dim}"}
    return " ".join(words.get(part) or str(getattr(record, part)) for part in PARTS if part in parts)


def _short_names(records: Sequence[Record]) -> list[str]:
    """With the length, and whatever else tells two cells of one kernel apart."""
    parts = ["seq_len"]
    for part in PARTS:
        longer = [*parts, part]
        if len({(r.kernel, _cell(r, longer)) for r in records}) > len({(r.kernel, _cell(r, parts)) for r in records}):
            parts = longer
    return [_cell(record, parts) for record in records]


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _three(value: float) -> str:
    return f"{value:.3f}"
