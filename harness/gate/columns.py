"""The gated columns, and how their values are compared and shown."""

from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd

from harness.case import CASE_FIELDS

# Counts: the same on every machine, so any change is a change of the code.
EXACT = ("params", "ref_params", "kv_cache_bytes", "kv_bytes_per_token", "flops")
PEAK = "peak_bytes"
METRICS = ("rel_l1", "cosine", "sparsity")  # of an approximate kernel, in the place of the error ratio
GATED = ("status", *EXACT, "err_ratio", *METRICS, PEAK)
BASELINE_COLUMNS = ("case_id", *CASE_FIELDS, *GATED)
Row = Mapping[Hashable, Any]


def rows(frame: pd.DataFrame) -> dict[str, Row]:
    return {row["case_id"]: row for row in frame.to_dict("records")}


def same(before: Any, after: Any) -> bool:
    if pd.isna(before) or pd.isna(after):
        return bool(pd.isna(before) and pd.isna(after))
    return bool(before == after)


def show(value: Any) -> str:
    return "empty" if pd.isna(value) else str(value)


def counted(number: int, thing: str) -> str:
    # Not report.format's `plural`: the reports import the gate.
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
