"""What the kernels must reach, as data, and whether a study reached it. Frames only: no torch here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

REACHED, MISSED, NOT_MEASURED = "reached", "missed", "not measured"
SIZES = ("study", "batch", "heads", "kv_heads", "queries", "keys", "head_dim", "dtype", "causal", "note")
COLUMNS = ("target", "limit", "worst", "where", "status", "points")


@dataclass(frozen=True)
class Target:
    """Every selected row's `column` must be at most `limit`; all are in float32.

    `rows` is asked of kernels.csv's frame, or of the exponents' where the column is theirs.
    """

    title: str
    study: str
    column: str
    limit: float
    rows: Callable[[pd.DataFrame], Any]


@dataclass(frozen=True)
class Verdict:
    target: Target
    status: str
    worst: float | None
    where: str
    points: int


def _prefill(frame: pd.DataFrame, shortest: int) -> Any:
    return (frame["side"] == "tiled") & (frame["queries"] >= shortest)


def _decode(frame: pd.DataFrame, heads: int, kv_heads: int) -> Any:
    asked = (frame["heads"] == heads) & (frame["kv_heads"] == kv_heads)
    return (frame["side"] == "grouped") & (frame["keys"] >= 2048) & asked


def _drop_in(frame: pd.DataFrame, *, short: bool) -> Any:
    """A call of unknown length must keep both limits."""
    ours = frame["side"].isin(["split", "packed"])
    return ours & (~(frame["baseline_ms"] >= 1.0) if short else ~(frame["baseline_ms"] < 1.0))


TARGETS = (
    Target("tiled / SDPA, no mask, L >= 512", "prefill", "x_sdpa", 1.3, lambda f: _prefill(f, 512) & ~f["causal"]),
    Target("tiled / SDPA is_causal, L >= 512", "prefill", "x_sdpa", 1.3, lambda f: _prefill(f, 512) & f["causal"]),
    Target("tiled / textbook, L > 256", "prefill", "x_textbook", 1.0, lambda f: _prefill(f, 257)),
    Target("tiled / textbook, peak memory at L = 4096", "prefill", "peak_x_textbook", 1 / 20,
           lambda f: _prefill(f, 4096) & (f["queries"] == 4096)),
    Target("tiled prefill: growth exponent over L", "prefill", "exponent", 2.1, lambda f: f["side"] == "tiled"),
    Target("grouped / SDPA enable_gqa, 32/8, S >= 2048", "decode", "x_sdpa", 0.8, lambda f: _decode(f, 32, 8)),
    Target("grouped / SDPA enable_gqa, 32/1, S >= 2048", "decode", "x_sdpa", 0.5, lambda f: _decode(f, 32, 1)),
    Target("grouped decode: growth exponent over S", "decode", "exponent", 1.1, lambda f: f["side"] == "grouped"),
    Target("decode step of a GQA layer: growth exponent over S", "step", "exponent", 1.1,
           lambda f: f["side"].isin(["eager", "grouped"])),
    Target("append to the cache: growth exponent over S", "step", "exponent", 0.1,
           lambda f: f["side"] == "cache append"),
    Target("MLA absorbed / transformers' DeepseekV3Attention, S = 4096", "mla", "x_transformers", 1 / 20,
           lambda f: (f["side"] == "absorbed") & (f["keys"] == 4096)),
    Target("MLA absorbed step: growth exponent over S", "mla", "exponent", 1.1, lambda f: f["side"] == "absorbed"),
    Target("drop-in / nn.MultiheadAttention, calls of 1 ms and more", "mha", "x_torch_mha", 1.05,
           lambda f: _drop_in(f, short=False)),
    Target("drop-in / nn.MultiheadAttention, calls below 1 ms", "mha", "x_torch_mha", 1.3,
           lambda f: _drop_in(f, short=True)),
)  # fmt: skip


def judge(frame: pd.DataFrame, growth: pd.DataFrame, studies: Sequence[str]) -> list[Verdict]:
    """The targets of these studies, in order."""
    return [_judge(target, growth if target.column == "exponent" else frame) for target in TARGETS
            if target.study in studies]  # fmt: skip


def _judge(target: Target, frame: pd.DataFrame) -> Verdict:
    own = frame[(frame["study"] == target.study) & (frame["dtype"] == "float32")]
    own = own[target.rows(own).astype(bool)]
    values = own[target.column].astype("float64")
    # Beside what is required, what was measured counts too; what was left out for want of time or memory does not.
    measured = own["status"] == "measured" if "status" in own else values.notna()
    wrong = own["status"] == "wrong" if "status" in own else ~measured & measured
    asked = own["required"].astype(bool) | wrong | (measured & _has_baseline(own, frame, target.column))
    own = own[asked]
    values = values[own.index]
    if own.empty:
        return Verdict(target, NOT_MEASURED, None, "", 0)
    if values.isna().any():
        missing = own[values.isna()].iloc[0]
        return Verdict(target, NOT_MEASURED, None, place(missing), int(values.notna().sum()))
    worst = values.idxmax()
    # `<=`, so that what is no number is never reached.
    status = REACHED if bool((values <= target.limit).all()) else MISSED
    return Verdict(target, status, float(values[worst]), place(own.loc[worst]), len(own))


def _has_baseline(own: pd.DataFrame, frame: pd.DataFrame, column: str) -> Any:
    """Where the other side of a ratio was measured too; then a ratio that is no number is a failure."""
    if "status" not in frame:
        return True
    other = column.removeprefix("peak_").removeprefix("x_")
    present = frame[(frame["side"] == other) & (frame["status"] == "measured")]
    return own.set_index(list(SIZES)).index.isin(present.set_index(list(SIZES)).index)


def place(row: Any) -> str:
    """The sizes of a row in a few letters."""
    length = "" if "keys" not in row else f" S{row['keys']}" if row["queries"] == 1 else f" L{row['queries']}"
    words = [f"{row['side']} B{row['batch']} {row['heads']}/{row['kv_heads']}{length} D{row['head_dim']}"]
    words += ["causal"] * bool(row["causal"]) + ([str(row["note"])] if row["note"] else [])
    reason = str(row["reason"]) if row.get("reason") else ""
    return " ".join(words) + (f" ({reason})" if reason else "")


def targets_frame(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    rows = [(v.target.title, v.target.limit, v.worst, v.where, v.status, v.points) for v in verdicts]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"limit": "float64", "worst": "float64"})


def all_reached(verdicts: Sequence[Verdict]) -> bool:
    return bool(verdicts) and all(verdict.status == REACHED for verdict in verdicts)
