"""What each layer's attention is given while a model runs its calibration batches."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.front import find_kernel
from harness.models.families.family import Batch
from harness.models.tuning.file import kernel_name
from harness.models.tuning.heads import head_slice
from harness.models.verify.golden import comparing, each
from harness.models.verify.metering import dense_attention
from harness.models.verify.result import Deviation


@dataclass(frozen=True)
class Seen:
    """One call of a layer's attention, and what dense attention in float64 makes of it."""

    batch: str
    q: Tensor
    k: Tensor
    v: Tensor
    call: AttentionCall
    dense: Tensor  # (B, H, L, D_v)
    real: Tensor | None  # (B, L): queries that count


@dataclass(frozen=True)
class Measured:
    """What one threshold does to one head."""

    error: float  # relative L1 against dense
    block_sparsity: float
    pv_skipped: float = 0.0  # of the visible blocks: scored, but not multiplied with their values

    @property
    def sparsity(self) -> float:
        """Of all work left out, that of the products with the values included."""
        return self.block_sparsity + self.pv_skipped


class Recorder:
    """Stands in for one layer's kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.batch = ""
        self.real: Tensor | None = None
        self.calls: list[Seen] = []

    def as_kernel(self) -> Kernel:
        return dataclasses.replace(self.kernel, run=self.run)

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        real = self.real if self.real is not None and self.real.shape == (q.shape[0], q.shape[2]) else None
        kept_q, kept_k, kept_v = (t.detach().clone() for t in (q, k, v))
        bare = dataclasses.replace(call, need_weights=False)
        dense = dense_attention(kept_q, kept_k, kept_v, bare)
        self.calls.append(Seen(self.batch, kept_q, kept_k, kept_v, bare, dense, real))
        return self.kernel.run(q, k, v, call)


def run_batches(model: nn.Module, batches: Mapping[str, Batch], recorders: Sequence[Recorder], seed: int) -> None:
    for name, batch in each(batches, Tensor.clone).items():
        for recorder in recorders:
            recorder.batch, recorder.real = name, batch.real
        with comparing(seed):
            batch.through(model)


def measure(calls: Sequence[Seen], head: int, name: str, options: Mapping[str, Any]) -> Measured:
    """One head of one layer under these options: the worst batch's error (steps apart), all blocks together."""
    kernel = find_kernel(kernel_name(name, options))
    assert kernel.tally is not None
    kernel.tally.take()
    pairs: dict[tuple[str, bool], list[tuple[Tensor, Tensor]]] = {}
    with torch.no_grad():
        for seen in calls:
            out, _ = kernel.run(*head_slice(seen.q, seen.k, seen.v, seen.call, [head]))
            found, dense = out[:, 0], seen.dense[:, head]  # (B, L, D_v)
            if seen.real is not None:
                found, dense = found[seen.real], dense[seen.real]
            pairs.setdefault((seen.batch, seen.q.shape[2] == 1), []).append((found, dense))
    count = kernel.tally.take()
    error = max((Deviation.of(together) for together in pairs.values()), key=lambda one: one.rank).rel_l1
    return Measured(error, count.sparsity, count.pv_skipped / max(count.visible, 1))
