"""The cases of configs/smoke.yaml as pytest-benchmark suites, both sides of each in one group.

    pytest bench --benchmark-enable --benchmark-group-by=group

For comparing the two sides `harness run` is the better judge: it interleaves them, these run one after the other.
"""

from pathlib import Path

import pytest

from harness.build import build_pair
from harness.case import Case
from harness.config import load_suite
from harness.kernels.front import find_kernel
from harness.measure import timed_call
from harness.specs import VARIANTS

SUITE = load_suite(Path(__file__).parent.parent / "configs" / "smoke.yaml")


@pytest.mark.parametrize("side", ["candidate", "reference"])
@pytest.mark.parametrize("case", SUITE.cases, ids=lambda case: case.case_id)
def test_latency(benchmark, case: Case, side: str) -> None:
    pair = build_pair(case, find_kernel(case.kernel), case.seed(SUITE.seed))
    pair.watch.checking = False
    spec = VARIANTS[case.variant]
    benchmark.group = case.case_id
    benchmark.extra_info |= {
        "params": sum(p.numel() for p in getattr(pair, side).module.parameters()),
        "kv_cache_bytes": spec.kv_cache_bytes(case),
        "flops": spec.flops(case),
    }
    benchmark(timed_call(pair, getattr(pair, side), case.seed(SUITE.seed)))
    assert (pair.watch.calls > 0) == (side == "candidate")
