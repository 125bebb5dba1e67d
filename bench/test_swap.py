"""What a swap costs beyond the copy of the model: 1,000 nn.MultiheadAttention must be replaced in under a second.

pytest bench/test_swap.py --benchmark-enable
"""

import copy
from typing import Any

import pytest
from torch import nn

import harness

MODULES, SECONDS = 1000, 1.0


@pytest.mark.parametrize("use_in_proj", [False, True], ids=["split", "packed"])
def test_a_thousand_modules(benchmark: Any, use_in_proj: bool) -> None:
    model = nn.Sequential(*(nn.MultiheadAttention(64, 4) for _ in range(MODULES)))

    def fresh_copy() -> tuple[tuple[nn.Module], dict[str, Any]]:
        return (copy.deepcopy(model),), {"inplace": True, "use_in_proj": use_in_proj}

    _, report = benchmark.pedantic(harness.swap, setup=fresh_copy, rounds=5)
    assert len(report.swapped) == MODULES
    if benchmark.enabled:
        assert benchmark.stats.stats.median < SECONDS
