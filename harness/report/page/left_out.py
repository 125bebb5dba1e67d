"""What approximate kernels left out, as the page embeds it: a row for each structure of the input of each cell."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from harness.report import sparsity
from harness.report.format import plain
from harness.report.page.run import Run
from harness.report.page.words import Column, Row, Table

NUMBERS = ("sparsity", "rel_l1", "cosine", "rmse", "max_abs", "skipped_blocks", "dense_ratio", "dense_ratio_lo",
           "dense_ratio_hi")  # fmt: skip


def left_out_rows(runs: Sequence[Run], frame: pd.DataFrame) -> list[dict[str, Any]]:
    """`row` is the cell's place in the table of all runs, so that the page's filters reach these too."""
    places = {key: at for at, key in enumerate(zip(frame["run"], frame["case_id"], strict=True))}
    return [
        {
            "row": places[run.label, record.case_id],
            "kernel": record.kernel,
            "inputs": entry["regime"],
            "seq_len": record.seq_len,
            **{name: _finite(entry[name]) for name in NUMBERS},
        }
        for run in runs
        for record, entry in sparsity.entries(run.approximate)
    ]


def left_out_tables(runs: Sequence[Run]) -> list[Table]:
    """One for each run that has any."""
    tables = []
    for run in runs:
        if columns := sparsity.columns(run.approximate):
            rows = tuple(Row(cells) for cells in zip(*(column.cells for column in columns), strict=True))
            heads = tuple(Column(column.title, column.left) for column in columns)
            caption = f"Sparsity, error and latency of the approximate cells of {plain(run.label)}"
            tables.append(Table(plain(run.label) if len(runs) > 1 else "", caption, heads, rows))
    return tables


def _finite(value: float | None) -> float | None:
    """None is not drawn, and the caption counts it: JSON has no NaN and a scale no infinity."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None
