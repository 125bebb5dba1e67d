"""Do our timer and pytest-benchmark's agree? The same call, ours before and after theirs.

pytest bench/test_timer.py --benchmark-enable
"""

import statistics

import pytest
import torch

from harness.cell.build import build_pair
from harness.cell.measure import timed_call
from harness.cell.timing import interleave
from harness.kernels.front import find_kernel
from harness.suite.config import Suite, threads_of

# Two samplers, one after the other on a machine with neighbours: a wrong unit or a forgotten division is far beyond.
FACTOR = 2.0


def test_the_timers_agree(benchmark, suite: Suite, capsys: pytest.CaptureFixture[str]) -> None:
    case = next(case for case in suite.cases if case.phase == "prefill")
    torch.set_num_threads(threads_of(suite))
    pair = build_pair(case, find_kernel(case.kernel), case.seed(suite.seed))
    pair.watch.checking = False
    call = timed_call(pair, pair.candidate, case.seed(suite.seed))
    if benchmark.disabled:
        benchmark(call)
        pytest.skip("nothing is timed without --benchmark-enable")

    def ours() -> list[float]:
        return interleave({"call": call}, budget_s=0.5, min_blocks=11, max_blocks=500, seed=0)["call"].seconds

    before = ours()
    benchmark(call)
    mine, theirs = statistics.median(before + ours()), benchmark.stats.stats.median
    benchmark.extra_info["harness_median_s"] = mine
    with capsys.disabled():
        print(f"\n{case.case_id}: harness {1e6 * mine:.1f} us, pytest-benchmark {1e6 * theirs:.1f} us, ", end="")
        print(f"ratio {mine / theirs:.3f}")
    assert 1 / FACTOR <= mine / theirs <= FACTOR
