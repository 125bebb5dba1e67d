"""Runs for the tests of the page: small, synthetic, and one full of hostile text."""

import itertools
from dataclasses import replace
from typing import Any

from harness import store
from harness.record import Record
from harness.report.page import StoredRun
from tests.support.records import HERE, timed_record

KV_HEADS = {"mha": 8, "gqa": 2, "mqa": 1}
# Each would set window.hacked if any of it became markup, script or template.
HOSTILE = (
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 2</script>",
    '"><img src=x onerror="window.hacked = 3">',
    "{{ 7 * 7 }}",
    "line\u2028separator\u2029",
    "<!--<script>",
    "javascript:window.hacked=4",
)


def record(variant: str = "mha", *, seq_len: int = 128, phase: str = "prefill", **values: Any) -> Record:
    """A causal cell whose size and times follow its key/value heads and its length; `values` are columns."""
    heads = KV_HEADS[variant]
    fields: dict[str, Any] = {
        "kv_heads": heads, "mask": "causal", "params": 1000 * (8 + heads), "kv_bytes_per_token": 256.0 * heads,
        "kv_cache_bytes": 256 * heads * seq_len, "latency_ms": seq_len / 100 + heads / 50,
        "latency_ratio": 1.0 + heads / 10, "latency_ratio_hi": 2.0,
    }  # fmt: skip
    return timed_record(variant, seq_len=seq_len, phase=phase, **(fields | values))


def run(*records: Record, label: str = "run", **values: Any) -> StoredRun:
    known: dict[str, Any] = {"environment": HERE, "config": "name: run\n", "command": "harness run config.yaml"}
    return StoredRun(label, store.table(records), **(known | values))


def small_run(label: str = "run") -> StoredRun:
    """Three variants, three lengths, two phases, and one cell of each kind that is not ok."""
    good = [
        record(variant, seq_len=length, phase=phase, err_ratio=0.5 + length / 1000)
        for variant, length, phase in itertools.product(KV_HEADS, (128, 256, 512), ("prefill", "decode"))
    ]
    none: dict[str, Any] = dict.fromkeys(
        (
            "err_ratio",
            "max_abs_err",
            "err_budget",
            "latency_ms",
            "latency_ratio",
            "latency_ratio_lo",
            "latency_ratio_hi",
        )
    )
    bad = [
        record("gqa", mask="alibi", status="mismatch", err_ratio=240.0),
        record("mqa", mask="alibi", status="mismatch", err_ratio=float("inf")),
        record("mha", mask="alibi", status="degraded", err_ratio=5.0),
        record("mha", mask="document", status="error", error="ValueError: no such mask", **none),
    ]
    return run(*good, *bad, label=label)


def hostile_run() -> StoredRun:
    """Every string that comes from outside is hostile: names, messages, config, command, environment."""
    rows = [
        replace(record("mha", phase="decode", kernel=text, status="error", error=text), mask=f"m{number}{text}")
        for number, text in enumerate(HOSTILE)
    ]
    text = " ".join(HOSTILE)
    rows += [record(phase="decode", kernel=text, worst_tensor=text), record("gqa", phase="decode", kernel=text)]
    return run(*rows, label=text, config=text, command=text, notes=(text,), environment=replace(HERE, cpu=text))


def large_run(cells: int) -> StoredRun:
    """About `cells` rows over all axes, with numbers that differ."""
    axes = itertools.product(
        KV_HEADS, (128, 256, 512, 1024, 2048), (256, 512, 1024), (1, 2, 4), ("none", "causal", "padding", "alibi"),
        ("float32", "bfloat16", "float16", "float64"), ("prefill", "decode", "train"), ("eager", "sdpa", "tiled"),
    )  # fmt: skip
    rows = []
    for number, (variant, length, size, batch, mask, dtype, phase, kernel) in enumerate(itertools.islice(axes, cells)):
        odd = (number * 7919 % 1009) / 1009  # spread over [0, 1), the same every time
        rows.append(
            record(variant, seq_len=length, phase=phase, embed_dim=size, batch=batch, mask=mask, dtype=dtype,
                   kernel=kernel, err_ratio=0.3 + odd, max_abs_err=1e-7 * (1 + odd), err_budget=3.3e-7 * (1 + odd),
                   latency_ms=length / 100 * (1 + odd), ref_latency_ms=length / 90 * (1 + odd / 3),
                   latency_ratio=0.7 + odd, latency_ratio_lo=0.6 + odd, latency_ratio_hi=0.9 + odd,
                   status="ok" if number % 97 else "degraded")
        )  # fmt: skip
    return run(*rows, label="large")
