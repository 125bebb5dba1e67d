"""Records and folders of runs that nothing was measured for."""

from pathlib import Path
from typing import Any

from harness import store
from harness.environment import Environment
from harness.record import Record
from harness.store import RunFolder

HERE = Environment("3.11", "2.13", "2", "3", "0.1", "Linux", "CPU 9", 2, 2, 2**30, "c0ffee", False)
AXES: dict[str, Any] = {
    "variant": "mha", "kernel": "eager", "reference": "torch_mha", "embed_dim": 256, "heads": 8, "kv_heads": 8,
    "head_dim": 32, "seq_len": 128, "kv_len": 128, "batch": 1, "mask": "none", "dtype": "float32", "phase": "prefill",
    "bias": True, "q_lora_rank": None, "kv_lora_rank": None, "rope_head_dim": None, "v_head_dim": None,
}  # fmt: skip
COUNTS = {"params": 100, "ref_params": 100, "kv_cache_bytes": 4096, "kv_bytes_per_token": 32.0, "flops": 1000}


def bare_record(case_id: str = "a", **values: Any) -> Record:
    """A cell that is ok, and nothing but its axes; `values` are columns."""
    return Record(case_id=case_id, **(AXES | {"status": "ok"} | values))


def record(case_id: str = "a", **values: Any) -> Record:
    """A cell with all that the exact gate compares; `values` are columns."""
    return bare_record(case_id, **({"err_ratio": 1.2} | COUNTS | values))


def timed_record(variant: str = "mha", *, seq_len: int = 128, phase: str = "prefill", **values: Any) -> Record:
    """A cell with an error and times, named by its axes; `values` are columns."""
    fields: dict[str, Any] = {
        "reference": "sdpa", "max_abs_err": 1e-7, "err_budget": 2e-7, "err_ratio": 1.0, "latency_ms": 2.0,
        "ref_latency_ms": 2.0, "latency_ratio": 1.0, "latency_ratio_lo": 0.9, "latency_ratio_hi": 1.1,
    }  # fmt: skip
    fields |= {"variant": variant, "seq_len": seq_len, "kv_len": seq_len, "phase": phase} | values
    axes = AXES | fields
    parts = (variant, f"e{axes['embed_dim']}", f"l{seq_len}", f"b{axes['batch']}", axes["mask"], phase, axes["dtype"])
    return bare_record("-".join((*parts, axes["kernel"])), **fields)


def folder(
    path: Path,
    *records: Record,
    suite: str = "smoke",
    config: str | None = "name: smoke\n",
    environment: Environment | None = HERE,
) -> Path:
    """The folder of a run of these records; without a config or an environment that file is missing."""
    with RunFolder.create(path, suite) as run:
        run.append(*records)
    if config is not None:
        store.write_config(path, config)
    if environment is not None:
        store.write_environment(path, environment)
    return path
