"""Caches for kernels that only decode."""

import dataclasses

from torch import Tensor

from harness.kernels import shield
from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.eager import KERNEL as EAGER


class PrefillByEager:
    """Around a kernel that takes one query at a time: its decode cells are judged, and `eager` fills their caches."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.calls = kernel, 0  # calls that were not the kernel's

    def as_kernel(self) -> Kernel:
        return dataclasses.replace(self.kernel, run=self.run)

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if q.shape[2] == 1:
            return self.kernel.run(q, k, v, call)
        self.calls += 1
        return shield.run(EAGER, q, k, v, call)
