"""What this machine can do, measured in the same run: its best matrix product and its best reading speed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from bench.kernel_study.cell import DTYPES

GEMM_SIZES = (256, 512, 1024, 2048)  # the small first
READ_BYTES = 256 * 2**20  # far beyond any cache
ROUNDS = 5
# A dtype that the processor has no instructions for is hundreds of times slower: larger sizes would take minutes.
SLOW_S = 0.2


@dataclass(frozen=True)
class Roofline:
    flops_per_s: dict[str, float]  # by dtype
    bytes_per_s: float

    def seconds(self, flops: int, moved: int, dtype: str) -> float:
        """No call can be faster than this, unless its operands stay in the cache."""
        return max(flops / self.flops_per_s[dtype], moved / self.bytes_per_s)


def measure(*, sizes: tuple[int, ...] = GEMM_SIZES, read_bytes: int = READ_BYTES) -> Roofline:
    block = torch.ones(read_bytes // 4)
    peaks = {name: _gemm_peak(dtype, sizes) for name, dtype in DTYPES.items()}
    return Roofline(peaks, read_bytes / _best(block.sum))


def _gemm_peak(dtype: torch.dtype, sizes: tuple[int, ...]) -> float:
    peak = 0.0
    for size in sizes:
        a, b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        seconds = _best(partial(torch.matmul, a, b))
        peak = max(peak, 2 * size**3 / seconds)
        if seconds > SLOW_S:
            break
    return peak


def _best(call: Callable[[], object]) -> float:
    call()  # the first one loads and allocates
    return min(_seconds(call) for _ in range(ROUNDS))


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
