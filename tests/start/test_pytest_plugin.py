"""The plugin as a user's own pytest has it, in a process of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = """\
import torch.nn.functional as F


def good(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, **options)


def wrong(q, k, v, scale=None, **options):
    scale = 1.01 * (q.shape[-1] ** -0.5 if scale is None else scale)
    return F.scaled_dot_product_attention(q, k, v, scale=scale, **options)


def for_half(q, k, v, **options):
    raise NotImplementedError("for bfloat16")
"""
TESTS = """\
import pytest
import torch
import torch.nn.functional as F
from my_kernels import good, wrong


@pytest.mark.attention(good, checks=200)
def test_good(attention):
    assert attention().status in ("ok", "degraded")


@pytest.mark.attention("my_kernels.py:wrong", checks=3)
def test_wrong(attention):
    attention()


@pytest.mark.attention("my_kernels.py:for_half", checks=1)
def test_refused(attention):
    attention()


def test_speed(paired_timing):
    q = torch.randn(1, 2, 16, 8)
    found = paired_timing(good, F.scaled_dot_product_attention, q, q, q, budget_s=0.01)
    assert found.ratio.lo <= found.ratio.value <= found.ratio.hi
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "my_kernels.py").write_text(KERNELS)
    (tmp_path / "test_mine.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    environment |= {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)


def test_items_of_a_good_kernel_under_xdist(suite: Path) -> None:
    """Both workers collect the same 200, new numbers or not; of these the first are asked here."""
    done = run(suite, "-n", "2", "-k", "good and first")
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b[34]\d passed", done.stdout) and "failed" not in done.stdout, done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("harness: "))
    assert re.match(r"harness: \S+my_kernels.py:good: [34]\d ok; worst error \d\.\d\d N", line), line
    listed = run(suite, "--collect-only", "-k", "good").stdout
    assert len(re.findall(r"^test_mine.py::test_good\[[a-z-]+-\d{3}\]$", listed, re.MULTILINE)) == 200


def test_a_wrong_kernel_fails_as_a_newcomer_reads_it(suite: Path) -> None:
    done = run(suite, "-k", "wrong or refused or speed", "--harness-report", "report", "--harness-seed", "7")
    assert done.returncode == 1
    assert "3 failed, 1 passed, 1 skipped" in done.stdout, done.stdout
    told = done.stdout
    for words in (
        "my_kernels.py:wrong gives a wrong answer",
        "asked     B=2 H=2",
        "found     out: error is",
        "1.01 times the scale that was asked for",
        "worst element: out[",
        "up to 2 N is ok",
        "harness judge my_kernels.py:wrong --seed 7",
    ):
        assert words in told, words
    assert "Traceback" not in told and "pytest_plugin.py" not in told
    page = (suite / "report" / "attention.md").read_text()
    assert "3 mismatch" in page and "--harness-seed 7" in page and "test\\_speed" in page
    document = json.loads((suite / "report" / "benchmark.json").read_text())
    assert [one["param"] for one in document["benchmarks"]] == ["candidate", "reference"]
    assert all(one["stats"]["rounds"] >= 11 for one in document["benchmarks"])


def test_minus_x_stops_at_the_first_and_a_missing_marker_is_told(suite: Path) -> None:
    assert "1 failed" in run(suite, "-x", "-k", "wrong").stdout
    (suite / "test_mine.py").write_text("def test_nothing(attention):\n    attention()\n")
    done = run(suite)
    assert "the fixture `attention` needs @pytest.mark.attention(KERNEL)" in done.stdout + done.stderr
