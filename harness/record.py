"""What one finished case leaves behind: immutable, raw samples kept, a missing value is None."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

# Of its speed: measured; measured while others were in the way, so that its figures are no measurement; not timed.
TIMINGS = ("ok", "disturbed", "none")
STATUSES = ("ok", "degraded", "mismatch", "error", "unsupported", "timeout", "oom")
# The same function as the reference's, rounded as well or worse: their speeds are worth a comparison.
EQUAL_STATUSES = ("ok", "degraded")
# How bad each is, for whoever asks whether a cell got worse. A declared limit is no failure, but a cell that leaves it
# for one got worse. A mismatch is a wrong result, which can be looked into; the last three are no result at all.
STATUS_SEVERITY = {"ok": 0, "degraded": 1, "unsupported": 2, "mismatch": 3, "error": 4, "timeout": 4, "oom": 4}
# What makes a run fail; `degraded` joins them under --strict, `unsupported` is a declared limit.
FAILING = frozenset({"mismatch", "error", "timeout", "oom"})
# What may go otherwise the next time; a mismatch is a finding and stays one.
RETRIED = frozenset({"error", "timeout", "oom"})
# Limits of `err_ratio`, in noise floors N: the acceptance rule (cell/rule.py) judges by them, reports draw them.
OK_FACTOR = 2.0
DEGRADED_FACTOR = 32.0


@dataclass(frozen=True)
class Record:
    """The first block names the case; the rest are measurements. Field order is column order."""

    case_id: str
    variant: str
    kernel: str
    reference: str
    embed_dim: int | None  # these sizes are absent in the row of a battery, which has them all
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    seq_len: int | None
    kv_len: int | None
    batch: int | None
    mask: str
    dtype: str
    phase: str
    bias: bool
    q_lora_rank: int | None
    kv_lora_rank: int | None
    rope_head_dim: int | None
    v_head_dim: int | None
    status: str
    # Equality: all of one compared tensor, the one with the worst err_ratio over tensors and regimes.
    max_abs_err: float | None = None  # max|C - G|
    mean_abs_err: float | None = None
    max_rel_err: float | None = None
    max_ulp_err: float | None = None
    ref_max_abs_err: float | None = None  # max|R - G|
    err_budget: float | None = None  # 2 N
    err_ratio: float | None = None  # max|C - G| / N
    worst_tensor: str | None = None
    worst_regime: str | None = None
    grad_max_abs_err: float | None = None
    golden_rows: int | None = None  # of a large cell: queries that had a golden; absent where all had one
    # Weight.
    params: int | None = None
    ref_params: int | None = None
    params_formula: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_bytes_formula: int | None = None
    kv_bytes_per_token: float | None = None
    # Speed.
    latency_ms: float | None = None
    ref_latency_ms: float | None = None
    latency_ratio: float | None = None
    latency_ratio_lo: float | None = None
    latency_ratio_hi: float | None = None
    timing: str = "none"
    threads: int | None = None  # that both sides were timed with: fewer than asked where others kept cores busy
    others_busy: float | None = None  # cores that others kept busy meanwhile
    rounds: int | None = None  # that the interval is over
    # In a contest, where cells that differ in one axis are sampled in the same rounds.
    against: str | None = None  # the cell that this one is held to
    ratio_to: float | None = None  # latency over that cell's
    ratio_lo: float | None = None
    ratio_hi: float | None = None
    peak_bytes: int | None = None
    flops: int | None = None
    calls: int | None = None
    error: str | None = None
    judged_as: str | None = None  # the cell at whose smaller size its equality was judged; None: as it is
    # Approximate kernels: all of one regime, the one with the largest rel_l1 (worst_regime names it).
    sparsity: float | None = None  # share of the visible blocks that was skipped; 0 is exact attention
    rel_l1: float | None = None  # sum|C - G| / sum|G|
    cosine: float | None = None
    rmse: float | None = None
    skipped_blocks: int | None = None  # visible blocks of queries x keys, over batch and heads
    # Kept in records.jsonl, not in the table.
    seconds: float | None = None  # wall time of the whole case
    measured_seconds: float | None = None  # of which inside compared or timed calls
    parts_s: dict[str, float] = field(default_factory=dict)  # part of the work -> seconds of the processor
    samples_s: dict[str, list[float]] = field(default_factory=dict)  # side -> seconds per call, block by block
    waited: dict[str, list[float]] = field(default_factory=dict)  # side -> share of each sample without a core
    equivalence: list[dict[str, Any]] = field(default_factory=list)  # every compared tensor in every regime
    sampled: dict[str, Any] = field(default_factory=dict)  # of a large cell: seed and rows, regimes, the short length
    approximation: list[dict[str, Any]] = field(default_factory=list)  # an approximate kernel, regime by regime
    attempt: int = 1  # the highest counts: `--retry` repeats a case that failed, `--retime` the timing of another


NOT_COLUMNS = frozenset(
    {"seconds", "measured_seconds", "parts_s", "samples_s", "waited", "equivalence", "sampled", "approximation",
     "attempt"}
)  # fmt: skip
# What timing alone fills.
SPEEDS = (
    "latency_ms", "ref_latency_ms", "latency_ratio", "latency_ratio_lo", "latency_ratio_hi", "timing", "threads",
    "others_busy", "rounds", "against", "ratio_to", "ratio_lo", "ratio_hi", "peak_bytes", "samples_s", "waited",
)  # fmt: skip
COLUMNS = tuple(f.name for f in fields(Record) if f.name not in NOT_COLUMNS)


def retimed(before: Record, again: Record) -> Record:
    """A record with the speed of a second measurement, or with the failure that this was."""
    spent: dict[str, Any] = {
        name: (getattr(before, name) or 0.0) + (getattr(again, name) or 0.0) for name in ("seconds", "measured_seconds")
    }
    speeds = {name: getattr(again, name) for name in SPEEDS}
    failure: dict[str, Any] = {} if again.status in EQUAL_STATUSES else {"status": again.status, "error": again.error}
    return replace(before, **speeds, **failure, **spent, attempt=before.attempt + 1)
