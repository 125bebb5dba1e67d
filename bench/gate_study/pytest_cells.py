"""The study's cells as pytest-benchmark sees them: one test a cell, the candidate alone.

Run by path by the study, with the tree of one version first on PYTHONPATH; STUDY_REQUEST names the file of the request.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import harness
from bench.gate_study.orphans import die_with_parent
from harness.case import Case
from harness.cell.build import build_pair
from harness.cell.measure import timed_call
from harness.kernels.front import find_kernel

REQUEST = json.loads(Path(os.environ["STUDY_REQUEST"]).read_text(encoding="utf-8"))
assert Path(harness.__file__ or "").is_relative_to(REQUEST["root"]), f"harness came from {harness.__file__}"
die_with_parent()
torch.set_num_threads(REQUEST["threads"])


@pytest.mark.parametrize("case", [Case(**fields) for fields in REQUEST["cases"]], ids=lambda case: case.case_id)
def test_latency(benchmark: Any, case: Case) -> None:
    pair = build_pair(case, find_kernel(case.kernel), case.seed(REQUEST["suite_seed"]))
    pair.watch.checking = False
    benchmark(timed_call(pair, pair.candidate, case.seed(REQUEST["suite_seed"])))
    assert pair.calls > 0
