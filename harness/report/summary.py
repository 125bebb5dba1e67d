"""The run's table condensed: the verdict, and one row per variant and kernel. Floats here, text elsewhere."""

import math
from dataclasses import dataclass

import pandas as pd

from harness.record import EQUAL_STATUSES, FAILING, STATUSES

BASE = "mha"
DISTURBED = "disturbed"
# Two cells differ by their variant alone if they agree on these; kv_heads and the MLA ranks belong to the variant.
MATCHED = ["embed_dim", "heads", "head_dim", "seq_len", "batch", "mask", "dtype", "phase", "bias", "kernel"]
TIMED = ("prefill", "decode", "train")
# Severity in the list of cells that are not ok: what fails the run comes first.
ORDER = ("mismatch", "error", "oom", "timeout", "degraded", "unsupported")
SPEEDS = ("ratio", "ratio_min", "ratio_max", "latency_vs_mha")
DTYPES = {
    **dict.fromkeys(("variant", "kernel"), "string"),
    **dict.fromkeys(("cells", "ok", "degraded", "unsupported", "failed", "disturbed"), "Int64"),
    **dict.fromkeys(("worst_err_ratio", "worst_max_abs_err", "worst_err_budget"), "float64"),
    "worst_case_id": "string",
    "params_min": "Int64",
    "params_max": "Int64",
    "params_vs_mha": "float64",
    **dict.fromkeys(("kv_bytes_per_token_min", "kv_bytes_per_token_max", "kv_bytes_per_token_vs_mha"), "float64"),
    **{f"{phase}_{speed}": "float64" for phase in TIMED for speed in SPEEDS},
}


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """`worst_*` is None where no cell has an error ratio; `unjudged` failed without leaving one; `missing` cells were
    planned and are not in the table."""

    cells: int
    statuses: dict[str, int]
    worst_err_ratio: float | None
    worst_case_id: str | None
    unjudged: int
    missing: int = 0
    disturbed: int = 0  # while they were timed: their speeds are shown with a mark, and are in no mean and on no front
    approximate: int = 0  # ok by the error metrics that the suite declares, not by the equality rule

    @property
    def passed(self) -> bool:
        """Something was compared, nothing failed, and nothing is missing."""
        failed = any(status in FAILING for status in self.statuses)
        return any(status in EQUAL_STATUSES for status in self.statuses) and not failed and not self.missing


def judge(frame: pd.DataFrame) -> RunVerdict:
    present = frame["status"].value_counts()
    worst = _worst(frame)
    return RunVerdict(
        cells=len(frame),
        statuses={status: int(present[status]) for status in STATUSES if status in present},
        worst_err_ratio=None if worst is None else float(worst["err_ratio"]),
        worst_case_id=None if worst is None else str(worst["case_id"]),
        unjudged=int((frame["status"].isin(FAILING) & frame["err_ratio"].isna()).sum()),
        missing=len(frame.attrs.get("missing", ())),
        disturbed=int((frame["timing"] == DISTURBED).sum()),
        approximate=int((frame["rel_l1"].notna() & (frame["status"] == "ok")).sum()),
    )


def is_timed(frame: pd.DataFrame) -> pd.Series:
    """The cells whose speed is a measurement, and worth one: equal, and not disturbed meanwhile."""
    return frame["status"].isin(EQUAL_STATUSES) & (frame["timing"] != DISTURBED) & frame["latency_ms"].notna()


def not_ok(frame: pd.DataFrame) -> pd.DataFrame:
    """Cells that someone should look at, the worst kind first."""
    bad = frame[frame["status"] != "ok"]
    return bad.sort_values("status", key=lambda status: status.map(ORDER.index), kind="stable")


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per variant and kernel, in order of appearance. Empty where nothing was measured or nothing matches.

    Speeds are geometric means over cells found equal and timed undisturbed: how fast a wrong answer comes is nobody's
    question.
    `*_vs_mha` compares with the MHA cell that agrees on every other axis, cell by cell; in latency where both were
    timed in one contest, and nowhere else.
    """
    paired, variants = _beside_mha(frame), dict(zip(frame["case_id"], frame["variant"], strict=True))
    rows = []
    for (variant, kernel), cells in frame.groupby(["variant", "kernel"], sort=False):
        mine = paired[(paired["variant"] == variant) & (paired["kernel"] == kernel)]
        worst = _worst(cells)
        row: dict[str, object] = {"variant": variant, "kernel": kernel, "cells": len(cells)}
        row |= {status: int((cells["status"] == status).sum()) for status in ("ok", "degraded", "unsupported")}
        row["failed"] = int(cells["status"].isin(FAILING).sum())
        row["disturbed"] = int((cells["timing"] == DISTURBED).sum())
        for column in ("err_ratio", "max_abs_err", "err_budget", "case_id"):
            row[f"worst_{column}"] = None if worst is None else worst[column]
        for column in ("params", "kv_bytes_per_token"):
            known = cells[column].dropna()
            row[f"{column}_min"] = known.min() if len(known) else None
            row[f"{column}_max"] = known.max() if len(known) else None
            row[f"{column}_vs_mha"] = geometric_mean(mine[column] / mine[f"{column}_mha"])
        for phase in TIMED:
            equal = cells[(cells["phase"] == phase) & is_timed(cells)]["latency_ratio"].dropna()
            row[f"{phase}_ratio"] = geometric_mean(equal)
            row[f"{phase}_ratio_min"] = equal.min() if len(equal) else None
            row[f"{phase}_ratio_max"] = equal.max() if len(equal) else None
            held = cells[(cells["phase"] == phase) & is_timed(cells) & cells["against"].map(variants).eq(BASE)]
            row[f"{phase}_latency_vs_mha"] = geometric_mean(held["ratio_to"])
        rows.append(row)
    return pd.DataFrame(rows, columns=list(DTYPES)).astype(DTYPES)


def geometric_mean(values: pd.Series) -> float | None:
    """Of the finite positive ones: x2 and x0.5 cancel, as ratios must."""
    numbers = [float(value) for value in values.dropna()]
    logs = [math.log(number) for number in numbers if 0 < number < math.inf]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def _worst(cells: pd.DataFrame) -> pd.Series | None:
    judged = cells[cells["err_ratio"].notna()]
    return None if judged.empty else judged.iloc[int(judged["err_ratio"].argmax())]


def _beside_mha(frame: pd.DataFrame) -> pd.DataFrame:
    # Of two MHA cells with the same axes neither is the one to compare with.
    base = frame[frame["variant"] == BASE].drop_duplicates(MATCHED, keep=False)
    wanted = [*MATCHED, "params", "kv_bytes_per_token"]
    return frame.merge(base[wanted], on=MATCHED, suffixes=("", "_mha"), validate="many_to_one")
