"""The numbers of the page. All runs in one table, embedded column by column: each repeated word once, floats to five
digits. Beside it the points of the trade-off picture, and what approximate kernels left out.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from harness.record import COLUMNS
from harness.report import sparsity
from harness.report.page.run import StoredRun
from harness.report.summary import is_timed

DIGITS = 5
REPEATED = 2  # times that a value must occur on average, to be written once
# Filters of the page, in its order; one is shown where its column has several values.
AXES = (
    "run",
    "status",
    "variant",
    "kernel",
    "phase",
    "mask",
    "dtype",
    "seq_len",
    "embed_dim",
    "heads",
    "batch",
    "timing",
)
# What the page's table shows first; the rest follows behind "all columns".
KEY_COLUMNS = ("run", "case_id", "status", "err_ratio", "max_abs_err", "err_budget", "params", "kv_bytes_per_token",
               "latency_ms", "ref_latency_ms", "latency_ratio", "latency_ratio_lo", "latency_ratio_hi",
               "ratio_to", "ratio_lo", "ratio_hi", "timing", "error")  # fmt: skip
# What tells two cells of one variant apart although their setting is the same.
OPTIONS = {"kv_heads": "kv", "q_lora_rank": "q-rank", "kv_lora_rank": "rank", "rope_head_dim": "rope",
           "v_head_dim": "v-dim"}  # fmt: skip
# For the pictures alone: which cells may share one, and what a point is called.
DERIVED = ("setting", "family", "series")
NEAR = 0.06  # of the slowest time: names of points that are closer would lie on each other
# Of each kind of input of an approximate cell.
NUMBERS = ("sparsity", "rel_l1", "cosine", "rmse", "max_abs", "skipped_blocks", "dense_ratio", "dense_ratio_lo",
           "dense_ratio_hi")  # fmt: skip


def combine(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """One row a cell of any run, with the columns the pictures need."""
    frames = [run.frame[list(COLUMNS)].assign(run=run.label) for run in runs]
    frame = pd.concat(frames, ignore_index=True)
    frame["setting"] = _setting(frame, length=True)
    frame["family"] = _setting(frame, length=False)
    frame["series"] = _series(frame)
    return frame


def embedded(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The columns as JSON values."""
    named = ["run", *COLUMNS, *DERIVED]
    return [_column(name, frame[name]) for name in named if name != "run" or frame["run"].nunique() > 1]


def _column(name: str, values: pd.Series) -> dict[str, Any]:
    """`words` and the index of each row's word where words repeat, else the values themselves."""
    plainly: Callable[[Any], Any]
    if pd.api.types.is_bool_dtype(values):
        kind, plainly = "flag", bool
    elif pd.api.types.is_numeric_dtype(values):
        kind, plainly = "number", int if pd.api.types.is_integer_dtype(values) else _rounded
    else:
        kind, plainly = "text", str
    plain = [plainly(value) if there else None for value, there in zip(values, values.notna(), strict=True)]
    column: dict[str, Any] = {"name": name, "kind": kind}
    order = {word: index for index, word in enumerate(dict.fromkeys(plain))}
    if len(order) * REPEATED > len(plain):
        return column | {"values": plain}
    if len(order) == 1:
        return column | {"constant": plain[0]}
    return column | {"words": list(order), "values": [order[word] for word in plain]}


def _rounded(value: float) -> float | int | str:
    """JSON has no infinity, yet an infinite error is a result: it travels as a word."""
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


def _setting(frame: pd.DataFrame, *, length: bool) -> pd.Series:
    """The axes that are not the variant's own, in words."""

    def sized(letter: str, column: str) -> pd.Series:
        """Empty where the row has no such size, because it has them all."""
        return (f"{letter} " + frame[column].astype("string")).fillna("")

    parts = [sized("E", "embed_dim"), sized("H", "heads")]
    odd = (frame["head_dim"] * frame["heads"] != frame["embed_dim"]).fillna(False)
    if odd.any():
        parts.append(sized("D", "head_dim").where(odd, ""))
    if length:
        parts.append(sized("S", "seq_len"))
    parts += [sized("B", "batch"), frame["dtype"].astype(str), frame["mask"].astype(str)]
    if frame["bias"].nunique() > 1:
        parts.append(frame["bias"].map({True: "bias", False: "no bias"}).astype(str))
    rows = zip(*parts, strict=True)
    return pd.Series([" · ".join(part for part in row if part) for row in rows], index=frame.index, dtype="string")


def _series(frame: pd.DataFrame) -> pd.Series:
    """A point's name: the variant, and whatever else tells it from its neighbours in the same picture."""
    name = frame["variant"].astype(str)
    if (frame.groupby("run")["kernel"].nunique() > 1).any():  # else the run's name says which
        name = name + " · " + frame["kernel"].astype(str)
    if frame["run"].nunique() > 1:
        name = name + " · " + frame["run"].astype(str)
    alike = [frame[column].astype(str) for column in ("run", "setting", "phase", "variant", "kernel")]
    for column, word in OPTIONS.items():
        written = frame[column].astype("string").fillna("none")
        several = written.groupby(alike).transform("nunique") > 1
        ambiguous = frame["variant"].isin(frame.loc[several, "variant"].unique())
        name = name.where(~ambiguous, name + f" · {word} " + written)
    return name.astype("string")


def tradeoff_points(frame: pd.DataFrame) -> pd.DataFrame:
    """The decode cells that are equal and timed undisturbed, each with what the trade-off picture draws of it.

    low_ms, high_ms  the interval of the ratio to the reference, or of the contest's, carried over to the latency
    cut_ms           where its whisker ends: one disturbed sample must not press all points to the floor
    spot             the same for cells of one cache whose times are near: their names share one place
    beaten_by        the rows of its setting that keep it off the front
    """
    cells = frame[(frame["phase"] == "decode") & is_timed(frame) & frame["kv_bytes_per_token"].notna()]
    ratios = ("latency_ratio", "latency_ratio_lo", "latency_ratio_hi", "ratio_to", "ratio_lo", "ratio_hi")
    cells = cells.astype(dict.fromkeys(("latency_ms", *ratios), "float64"))
    for end, name in (("lo", "low_ms"), ("hi", "high_ms")):
        of_reference = cells[f"latency_ratio_{end}"] / cells["latency_ratio"]
        of_contest = cells[f"ratio_{end}"] / cells["ratio_to"]
        cells[name] = cells["latency_ms"] * of_reference.fillna(of_contest)
    cells["slowest"] = cells.groupby("setting")["latency_ms"].transform("max")
    cells["cut_ms"] = cells["high_ms"].clip(upper=1.25 * cells["slowest"])
    upwards = cells.sort_values("latency_ms", kind="stable")
    column = [upwards["setting"], upwards["kv_bytes_per_token"]]
    apart = upwards["latency_ms"].groupby(column).diff() > NEAR * upwards["slowest"]
    cells["spot"] = apart.groupby(column).cumsum()
    parts = [beaten_by(group) for _, group in cells.groupby("setting", sort=False)]
    return cells.assign(beaten_by=pd.concat(parts) if parts else None)


def beaten_by(cells: pd.DataFrame) -> pd.Series:
    """For each cell those with no larger a cache that are no slower; of equal ones the first beats the others.

    On the Pareto front is what nothing beats. On the page filters take cells away, so it must know by which ones.
    """
    ordered = cells.sort_values(["kv_bytes_per_token", "latency_ms"], kind="stable")["latency_ms"]
    lists = [ordered.index[:at][ordered.iloc[:at] <= time].tolist() for at, time in enumerate(ordered)]
    return pd.Series(lists, index=ordered.index, dtype=object)


def on_front(cells: pd.DataFrame) -> pd.DataFrame:
    """In order of the cache and with a column `front`: whether no cell of these beats it."""
    front = beaten_by(cells).map(len) == 0
    return cells.loc[front.index].assign(front=front)


def tradeoff_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """`row` is the cell's place in the table of all runs."""
    return [
        {"row": row, "spot": int(point["spot"]), "beatenBy": point["beaten_by"]}
        | {name: _finite(point[name]) for name in ("low_ms", "high_ms", "cut_ms")}
        for row, point in tradeoff_points(frame).to_dict("index").items()
    ]


def left_out_rows(runs: Sequence[StoredRun], frame: pd.DataFrame) -> list[dict[str, Any]]:
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


def _finite(value: float | None) -> float | None:
    """None is not drawn, and the caption counts it: JSON has no NaN and a scale no infinity."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None
