"""One layer's attention, in which every head has thresholds of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.kernels.blocksparse.kernel import is_spoilt
from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.front import find_kernel
from harness.kernels.tally import BlockCount, Tally
from harness.tuning.file import TuningError, kernel_name


def kernel_with(name: str, options: Mapping[str, Any]) -> Kernel:
    return find_kernel(kernel_name(name, options))


def head_slice(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, heads: Sequence[int]) -> tuple[Any, ...]:
    """What these query heads see of a call; key heads are repeated where several share one."""
    H, G = q.shape[1], q.shape[1] // k.shape[1]
    at = torch.tensor(heads, device=q.device)
    mask, sinks = call.mask, call.sinks
    if mask is not None and mask.ndim >= 3 and mask.shape[-3] == H:
        mask = mask.index_select(-3, at)
    if sinks is not None:
        sinks = sinks.index_select(0, at)
    shared = torch.div(at, G, rounding_mode="floor")
    parts = q.index_select(1, at), k.index_select(1, shared), v.index_select(1, shared)
    return (*parts, replace(call, mask=mask, sinks=sinks))


class HeadKernels:
    """Heads with the same thresholds run together."""

    def __init__(self, layer: str, name: str, options: Sequence[Mapping[str, Any]]) -> None:
        self.layer, self.name, self.heads = layer, name, len(options)
        self.tally = Tally()
        groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
        for head, of_head in enumerate(options):
            groups.setdefault(tuple(sorted(of_head.items())), []).append(head)
        self.groups = [(kernel_with(name, dict(key)), heads) for key, heads in groups.items()]

    def as_kernel(self) -> Kernel:
        return Kernel(f"{self.name} (tuned)", self.run, approximate=True, tally=self.tally)

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, None]:
        if q.shape[1] != self.heads:
            raise TuningError(f"{self.layer}: tuned for {self.heads} heads, called with {q.shape[1]}")
        count, out = BlockCount(0, 0, 0), q.new_empty(*q.shape[:3], v.shape[3])
        for kernel, heads in self.groups:
            if len(self.groups) == 1:
                out, _ = kernel.run(q, k, v, call)
            else:
                out[:, heads], _ = kernel.run(*head_slice(q, k, v, call, heads))
            assert kernel.tally is not None
            count += kernel.tally.last
        self.tally.add(count, call=call, is_spoilt=is_spoilt(out, call))
        return out, None
