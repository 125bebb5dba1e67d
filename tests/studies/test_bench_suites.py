"""bench/ is for people with a clock; here only that its suites still run, and save what they promise."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

TINY = "name: tiny\nthreads: 1\ngrid: {variant: gqa, embed_dim: 16, heads: 2, kv_heads: 1, seq_len: 8, mask: causal}\n"


def run(tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    (tmp_path / "tiny.yaml").write_text(TINY)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--suite", str(tmp_path / "tiny.yaml")]
    # By these variables pytest-benchmark takes what a worker of xdist has started for a worker, and does not time.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run([*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_every_suite_runs_untimed(tmp_path: Path) -> None:
    done = run(tmp_path, "bench")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_a_timed_case_has_its_errors_and_sizes_beside_it(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    timed = ["--benchmark-enable", "--benchmark-max-time=0.01", f"--benchmark-json={saved}"]
    done = run(tmp_path, "bench/test_cases.py", *timed)
    assert done.returncode == 0, done.stdout + done.stderr
    sides = json.loads(saved.read_text())["benchmarks"]
    assert {side["params"]["side"] for side in sides} == {"candidate", "reference"}
    for side in sides:
        found = side["extra_info"]
        assert found["status"] == "ok" and found["err_ratio"] <= 2 and found["max_abs_err"] >= 0
        assert found["params"] > 0 and found["kv_cache_bytes"] > 0
