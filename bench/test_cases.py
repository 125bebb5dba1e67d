"""The cases of a suite as pytest-benchmark suites, both sides of each in one group.

    pytest bench/test_cases.py --benchmark-enable --benchmark-group-by=group [--suite configs/default.yaml]

For comparing the two sides `harness run` is the better judge: it interleaves them, these run one after the other.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from harness.case import Case
from harness.cell.build import build_pair
from harness.cell.measure import timed_call
from harness.kernels.front import find_kernel
from harness.record import Record
from harness.suite.config import Suite, threads_of
from harness.suite.schema import REGIMES, Timing
from harness.workers.job import Job, perform

METRICS = ("status", "max_abs_err", "err_budget", "err_ratio", "kv_cache_bytes", "kv_bytes_per_token", "flops")


@pytest.fixture(scope="session")
def judge(suite: Suite) -> Callable[[Case], Record]:
    """Is it the same, and what does it weigh? Once for both sides of a case."""

    @cache
    def judged(case: Case) -> Record:
        return perform(Job(case, suite.seed, suite.regimes or REGIMES, Timing(enabled=False), threads_of(suite)))

    return judged


@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_latency(benchmark, case: Case, side: str, suite: Suite, judge: Callable[[Case], Record]) -> None:
    record = judge(case)
    benchmark.group = case.case_id
    benchmark.extra_info |= {name: getattr(record, name) for name in METRICS}
    benchmark.extra_info["params"] = record.params if side == "candidate" else record.ref_params
    torch.set_num_threads(threads_of(suite))
    pair = build_pair(case, find_kernel(case.kernel), case.seed(suite.seed))
    pair.watch.checking = False
    benchmark(timed_call(pair, getattr(pair, side), case.seed(suite.seed)))
    assert (pair.calls > 0) == (side == "candidate")
    assert record.status in ("ok", "degraded"), f"{record.status}: {record.error}"
