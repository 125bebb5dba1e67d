"""Approximate kernels: how much each left out, how close it came, and what that gained, by structure of the input."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from harness import store
from harness.record import Record
from harness.report.table import Column, Table
from harness.report.terminal import say
from harness.text import interval, percent, ratio

TITLE = "What was left out?"
LEGEND = (
    "sparsity: share of the visible blocks of queries x keys that was skipped. rel L1: sum|C - G| / sum|G| over the "
    "output, and cosine of both, against the reference in float64.",
    "PV skipped: share of the kept blocks that was scored, but not multiplied with its values.",
    "x dense: latency over that of the tiled kernel in the same blocks, on the inputs of the largest error, with its "
    "95 % interval.",
)
PARTS = ("variant", "seq_len", "mask", "phase", "dtype", "batch", "embed_dim")  # of a cell's name
DROPPED = ("interval", "cosine", "PV skipped")  # in this order where the terminal is too narrow; summary.md has all


def is_approximate(frame: pd.DataFrame) -> bool:
    """Whether a run has anything to tell here, seen without reading its records again."""
    return bool(frame["sparsity"].notna().any())


def entries(records: Sequence[Record]) -> list[tuple[Record, dict[str, Any]]]:
    """Every regime of every approximate cell, in the order of the table."""
    return [(record, entry) for record in records for entry in record.approximation]


def sparsity_table(records: Sequence[Record], *, short: bool = False) -> Table:
    """Without rows where no kernel was approximate. `short`: of a cell only what sets it apart."""
    rows = entries(records)
    parts = _telling_parts([record for record, _ in rows]) if short else PARTS
    columns = [
        Column("cell", lambda row: _cell(row[0], parts), left=True),
        Column("kernel", lambda row: row[0].kernel, left=True),
        Column("inputs", lambda row: row[1]["regime"], left=True),
        Column("sparsity", lambda row: percent(row[1]["sparsity"])),
        Column("rel L1", lambda row: f"{row[1]['rel_l1']:.3f}"),
        Column("cosine", lambda row: f"{row[1]['cosine']:.3f}"),
    ]
    if any(entry["pv_skipped_blocks"] for _, entry in rows):
        share = Column("PV skipped", lambda row: percent(row[1]["pv_skipped_blocks"] / max(row[1]["kept_blocks"], 1)))
        columns.append(share)
    if any(entry["dense_ratio"] is not None for _, entry in rows):
        columns.append(Column("x dense", lambda row: ratio(row[1]["dense_ratio"])))
        columns.append(Column("interval", lambda row: interval(row[1]["dense_ratio_lo"], row[1]["dense_ratio_hi"])))
    return Table(columns, rows)


def legend(shown: Table) -> tuple[str, ...]:
    """Of the columns that are shown."""
    return LEGEND if any(column.title == "x dense" for column in shown.columns) else LEGEND[:2]


def sparsity_markdown(folder: Path) -> list[str]:
    """The section of summary.md, as its parts; none where no kernel was approximate."""
    table = sparsity_table(store.read_records(folder))
    return [f"## {TITLE}", table.markdown(), "<br>".join(legend(table))] if table.rows else []


def print_sparsity(folder: Path, console: Console) -> None:
    table = sparsity_table(store.read_records(folder), short=True)
    if not table.rows:
        return
    table = replace(table, title=TITLE).fitted(console, DROPPED)
    console.print()
    console.print(table)
    say(console, *legend(table), style="dim")


def _cell(record: Record, parts: Sequence[str]) -> str:
    words = {"seq_len": f"L={record.seq_len}", "batch": f"B={record.batch}", "embed_dim": f"E={record.embed_dim}"}
    return " ".join(words.get(part) or str(getattr(record, part)) for part in PARTS if part in parts)


def _telling_parts(records: Sequence[Record]) -> Sequence[str]:
    """The length, and whatever else tells two cells of one kernel apart."""
    parts = ["seq_len"]
    for part in PARTS:
        longer = [*parts, part]
        if len({(r.kernel, _cell(r, longer)) for r in records}) > len({(r.kernel, _cell(r, parts)) for r in records}):
            parts = longer
    return parts
