"""benchmark.json: a run's samples in pytest-benchmark's schema, for tools of that world. The names are its own.

`pytest-benchmark compare` reads it, and github-action-benchmark with `tool: pytest`.
"""

import json
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import store
from harness.case import CASE_FIELDS
from harness.environment import Environment
from harness.record import Record
from harness.text import strict_json

BENCHMARKS = "benchmark.json"
SCHEMA = "5.3.1"  # the version of pytest-benchmark whose file this is like
METRICS = (
    "status", "reference", "max_abs_err", "err_budget", "err_ratio", "params", "ref_params", "kv_cache_bytes",
    "kv_bytes_per_token", "latency_ratio", "latency_ratio_lo", "latency_ratio_hi", "timing", "peak_bytes", "flops",
)  # fmt: skip
# pytest-benchmark's own settings, as far as they mean anything here: blocks, not rounds, and a budget of seconds.
OPTIONS = {"disable_gc": True, "timer": "perf_counter", "warmup": True}


def write_benchmarks(folder: Path, records: Sequence[Record]) -> Path | None:
    """None, and no file, where nothing was timed: pytest-benchmark cannot show a file without benchmarks."""
    path = folder / BENCHMARKS
    benchmarks = [benchmark for record in records for benchmark in _benchmarks(record)]
    if not benchmarks:
        path.unlink(missing_ok=True)  # of an earlier session that was timed
        return None
    environment = store.read_environment(folder) if (folder / store.ENVIRONMENT).exists() else None
    finished = datetime.fromtimestamp((folder / store.RECORDS).stat().st_mtime, UTC)
    whole = document(benchmarks, environment, finished)
    store.write_atomically(path, json.dumps(whole, indent=1, ensure_ascii=True, allow_nan=False).encode())
    return path


def document(
    benchmarks: Sequence[dict[str, Any]], environment: Environment | None, finished: datetime | None = None
) -> dict[str, Any]:
    """The whole file, of entries."""
    return {
        "machine_info": _machine(environment),
        "commit_info": _commit(environment),
        "benchmarks": list(benchmarks),
        "datetime": (finished or datetime.now(UTC)).isoformat(),
        "version": SCHEMA,
    }


def entry(
    name: str, side: str, samples: Sequence[float], *, extra: dict[str, Any], params: dict[str, Any]
) -> dict[str, Any]:
    return {
        "group": name,
        "name": f"{name}[{side}]",
        "fullname": f"harness::{name}[{side}]",
        "params": params,
        "param": side,
        "extra_info": extra,
        "options": OPTIONS,
        "stats": describe(samples),
    }


def _benchmarks(record: Record) -> list[dict[str, Any]]:
    extra = strict_json({name: getattr(record, name) for name in METRICS})
    axes = {name: getattr(record, name) for name in CASE_FIELDS}
    return [
        entry(record.case_id, side, samples, extra=extra, params=axes | {"side": side})
        for side, samples in record.samples_s.items()
        if samples
    ]


def describe(samples: Sequence[float]) -> dict[str, Any]:
    """The statistics that pytest-benchmark stores, by its definitions; seconds per call."""
    data = sorted(samples)
    q1, q3 = _quartiles(data)
    mean, total, iqr = statistics.mean(data), math.fsum(data), q3 - q1
    stddev = statistics.stdev(data) if len(data) > 1 else 0.0
    low, high = q1 - 1.5 * iqr, q3 + 1.5 * iqr
    far = sum(not mean - stddev <= value <= mean + stddev for value in data)
    outside = sum(not low <= value <= high for value in data)
    return {
        "min": data[0],
        "max": data[-1],
        "mean": mean,
        "stddev": stddev,
        "rounds": len(data),
        "median": statistics.median(data),
        "iqr": iqr,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": outside,
        "stddev_outliers": far,
        "outliers": f"{far};{outside}",
        "ld15iqr": data[bisect_left(data, low)],
        "hd15iqr": data[bisect_right(data, high) - 1],
        "ops": len(data) / total if total else 0.0,
        "total": total,
        "data": list(samples),
        "iterations": 1,
    }


def _quartiles(data: Sequence[float]) -> tuple[float, float]:
    """Of sorted data: medians of the halves where their number is even, else between neighbours."""
    count = len(data)
    if count == 1:
        return data[0], data[0]
    if count % 2 == 0:
        return statistics.median(data[: count // 2]), statistics.median(data[count // 2 :])
    n, rest = divmod(count, 4)
    if rest == 1:
        return 0.25 * data[n - 1] + 0.75 * data[n], 0.75 * data[3 * n] + 0.25 * data[3 * n + 1]
    return 0.75 * data[n] + 0.25 * data[n + 1], 0.25 * data[3 * n + 1] + 0.75 * data[3 * n + 2]


def _machine(environment: Environment | None) -> dict[str, Any]:
    """Where the run was, not where this is written."""
    if environment is None:
        return {}
    return {
        "processor": environment.cpu,
        "python_version": environment.python,
        "release": environment.platform,
        "system": environment.platform.partition("-")[0],
        "cpu": {"brand_raw": environment.cpu, "count": environment.cores},
        "torch": environment.torch,
        "threads": environment.threads,
    }


def _commit(environment: Environment | None) -> dict[str, Any]:
    if environment is None:
        return {"id": "unknown", "dirty": False}
    return {"id": environment.commit or "unknown", "dirty": bool(environment.dirty), "project": "attention-harness"}
