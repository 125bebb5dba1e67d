"""Counts a kernel's calls: a swap that is bypassed shows as zero."""

import dataclasses

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall, Kernel


class Counter:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.calls = kernel, 0

    def as_kernel(self) -> Kernel:
        return dataclasses.replace(self.kernel, run=self.run)

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        # A compiled graph would be made anew for every count.
        if not torch.compiler.is_compiling():
            self.calls += 1
        return self.kernel.run(q, k, v, call)
