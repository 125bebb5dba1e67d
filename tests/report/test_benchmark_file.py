"""benchmark.json is read by the tools that it is for: pytest-benchmark itself, and github-action-benchmark."""

import csv
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytest_benchmark.stats import Stats

from harness import store
from harness.__main__ import main
from harness.record import Record
from harness.report.benchmark_file import BENCHMARKS, describe, write_benchmarks
from tests.support.records import HERE, folder, record

SAMPLES = {"candidate": [0.002, 0.001, 0.003, 0.0015, 0.0025], "reference": [0.001, 0.001, 0.0012, 0.0011, 0.0009]}
COMPARE = "import sys; from pytest_benchmark.cli import main; main()"


def timed(case_id: str = "a", **values: Any) -> Record:
    return record(case_id, **({"samples_s": SAMPLES, "latency_ratio": 1.9, "max_abs_err": 1e-6} | values))


def written(path: Path, *records: Record) -> dict[str, Any]:
    file = write_benchmarks(folder(path, *records), records)
    assert file == path / BENCHMARKS
    document: dict[str, Any] = json.loads(file.read_text(), parse_constant=pytest.fail)
    return document


@given(st.lists(st.floats(1e-7, 10), min_size=1, max_size=40))
def test_statistics_are_pytest_benchmarks_own(samples: list[float]) -> None:
    theirs = Stats()
    for sample in samples:
        theirs.update(sample)
    ours = describe(samples)
    for name, value in theirs.as_dict().items():
        if isinstance(value, str):
            assert ours[name] == value
        else:
            assert ours[name] == pytest.approx(value, rel=1e-9, abs=1e-15), name
    assert set(ours) == {*Stats.fields, "data", "iterations"}
    assert ours["data"] == samples


def test_both_sides_of_every_cell_with_what_they_weigh(tmp_path: Path) -> None:
    document = written(tmp_path / "run", timed("a"), timed("b", status="degraded", err_ratio=math.inf))
    assert [one["name"] for one in document["benchmarks"]] == [
        "a[candidate]", "a[reference]", "b[candidate]", "b[reference]"
    ]  # fmt: skip
    first, *_, last = document["benchmarks"]
    assert first["group"] == "a"
    assert first["params"]["variant"] == "mha"
    assert first["params"]["side"] == "candidate"
    extra = first["extra_info"]
    assert (extra["status"], extra["err_ratio"], extra["params"]) == ("ok", 1.2, 100)
    assert (extra["kv_cache_bytes"], extra["latency_ratio"]) == (4096, 1.9)
    assert first["stats"]["data"] == SAMPLES["candidate"]
    assert first["stats"]["mean"] == pytest.approx(0.002)
    assert last["extra_info"]["err_ratio"] == "inf"
    assert document["commit_info"]["id"] == "c0ffee"
    assert document["machine_info"]["cpu"]["brand_raw"] == HERE.cpu


def compare(tmp_path: Path, *files: Path) -> list[dict[str, str]]:
    """The rows of `pytest-benchmark compare FILE...`."""
    out = tmp_path / "compared.csv"
    command = [sys.executable, "-c", COMPARE, "compare", *map(str, files), f"--csv={out}", "--columns=mean,ops,rounds"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Failed to load" not in done.stdout + done.stderr
    assert "Name (time in" in done.stdout
    with out.open() as file:
        return list(csv.DictReader(file))


def test_pytest_benchmark_compare_reads_one_file_and_two(tmp_path: Path) -> None:
    written(tmp_path / "one", timed("a"), timed("b"))
    slower = {side: [2 * value for value in values] for side, values in SAMPLES.items()}
    written(tmp_path / "two", timed("a", samples_s=slower), timed("b"))
    files = [tmp_path / name / BENCHMARKS for name in ("one", "two")]
    alone = compare(tmp_path, files[0])
    assert len(alone) == 4
    (row,) = (row for row in alone if "a[candidate]" in row["name"])
    assert float(row["mean"]) == pytest.approx(0.002)
    assert float(row["rounds"]) == 5
    both = compare(tmp_path, *files)
    assert len(both) == 8
    means = sorted(float(row["mean"]) for row in both if "a[candidate]" in row["name"])
    assert means == pytest.approx([0.002, 0.004])


def test_what_github_action_benchmark_reads(tmp_path: Path) -> None:
    """Its src/extract.ts takes `fullname` and of `stats` ops, stddev, mean and rounds, in strict JSON."""
    document = written(tmp_path / "run", timed("a"), timed("b"))
    read = {}
    for bench in document["benchmarks"]:
        stats = bench["stats"]
        assert isinstance(bench["fullname"], str)
        numbers = [stats[name] for name in ("ops", "stddev", "mean", "rounds")]
        assert all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
        read[bench["fullname"]] = numbers
    assert len(read) == 4  # its charts are by name: none may stand for two
    ops, stddev, mean, rounds = read["harness::a[candidate]"]
    assert ops == pytest.approx(500)
    assert mean == pytest.approx(0.002)
    assert stddev == pytest.approx(7.905694e-4)
    assert rounds == 5


def test_without_timing_there_is_no_file_and_an_older_one_goes(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", record("a"))
    (run / BENCHMARKS).write_text("{}")
    assert write_benchmarks(run, [record("a")]) is None
    assert not (run / BENCHMARKS).exists()


def test_a_cell_that_failed_before_it_was_timed_is_left_out(tmp_path: Path) -> None:
    document = written(tmp_path / "run", timed("a"), replace(timed("b"), samples_s={}, status="error"))
    assert {one["group"] for one in document["benchmarks"]} == {"a"}


def test_every_run_writes_it(tmp_path: Path) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text(
        "name: tiny\nthreads: 1\nregimes: [plain]\ntiming: {budget_s: 0.001, min_blocks: 3, max_blocks: 3}\n"
        "grid: {variant: mha, embed_dim: 16, heads: 2, seq_len: 6, mask: causal}\n"
    )
    assert main(["run", str(config), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    document = json.loads((tmp_path / "run" / BENCHMARKS).read_text())
    (one,) = store.read_records(tmp_path / "run")
    assert [each["stats"]["data"] for each in document["benchmarks"]] == list(one.samples_s.values())
