"""The battery as a row of a run: on for kernels of the command line, by a key for those of a config."""

import json

import pytest

import harness
from harness.case import BATTERY, Case
from harness.suite.config import ConfigError, load_suite
from tests.support import python

GRID = {"variant": "gqa", "embed_dim": 32, "heads": 4, "kv_heads": 2, "seq_len": 8, "mask": "causal"}
CONFIG = {"name": "asked", "timing": {"enabled": False}, "battery": {"minutes": 0.05}, "grid": GRID}
SOURCE = """
import torch.nn.functional as F


def right(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


def wrong_beyond_the_grid(q, k, v, **options):
    return right(q, k, v, **options) * (1.01 if k.shape[2] > 16 else 1.0)
"""


@pytest.fixture
def kernels(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def batteries(config, **options) -> list[str]:
    return [case.kernel for case in load_suite(config, **options).cases if case.is_battery]


def test_it_is_on_for_kernels_of_the_command_line_and_by_a_key_for_all(kernels):
    mine = f"{kernels}:right"
    plain = {key: value for key, value in CONFIG.items() if key != "battery"}
    named = plain | {"grid": GRID | {"kernel": ["eager", mine]}}
    assert batteries(plain) == batteries(plain, kernels=["eager"]) == batteries(named) == []
    assert batteries(plain, kernels=[mine, "eager"]) == batteries(named | {"battery": {}}) == [mine]
    assert batteries(plain | {"battery": {"enabled": False}}, kernels=[mine]) == []


@pytest.mark.parametrize(("value", "rule"), [({"minutes": 0}, "0 < m <= 600"), ({"minute": 1}, "did you mean")])
def test_a_wrong_key_is_told(value, rule):
    with pytest.raises(ConfigError, match=rule):
        load_suite(CONFIG | {"battery": value})


def test_a_bug_that_no_cell_reaches_is_a_row(kernels, tmp_path):
    wrong = f"{kernels}:wrong_beyond_the_grid"
    table = harness.run(CONFIG, tmp_path / "out", kernels=[wrong]).set_index("variant")
    assert table.loc["gqa", "status"] == "ok"
    row = table.loc[BATTERY]
    assert row["status"] == "mismatch" and "harness judge" in row["error"] and "--seed" in row["error"]
    assert row["case_id"] == Case.battery(wrong).case_id
    assert row[["embed_dim", "heads", "seq_len", "batch", "params", "latency_ms"]].isna().all()
    stored = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    assert any(f["status"] == "mismatch" for f in next(r for r in stored if r["variant"] == BATTERY)["equivalence"])


def test_a_right_kernel_passes_and_its_run_can_be_shown_and_gated(kernels, tmp_path):
    (tmp_path / "asked.yaml").write_text(json.dumps(CONFIG))
    run = python("-m", "harness", "run", "asked.yaml", "--kernel", "mine.py:right", "--out", "out", cwd=tmp_path)
    assert run.code == 0 and "battery" in run.out and "2 cells: 2 ok" in run.out, run.out + run.err
    assert (tmp_path / "out" / "report.html").exists()
    shown = python("-m", "harness", "show", "out", cwd=tmp_path)
    assert shown.code == 0 and "battery" in shown.out, shown.err
    for code, words in ((0, ["--accept"]), (0, [])):
        gate = python("-m", "harness", "gate", "out", "--baseline", "accepted", *words, cwd=tmp_path)
        assert gate.code == code, gate.out + gate.err
