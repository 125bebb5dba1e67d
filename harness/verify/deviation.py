"""How far an approximation is from what it stands for."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from harness.approximate import Metrics


@dataclass(frozen=True)
class Deviation:
    """Of all elements together, against float64. What is not finite makes them NaN or infinite: beyond any limit."""

    rel_l1: float  # sum|C - G| / sum|G|
    cosine: float
    rmse: float
    max_abs: float
    sparsity: float | None = None  # here and below: of a layer's attention alone
    skipped_blocks: int | None = None
    pv_skipped: float | None = None  # share of the visible blocks that were scored, but not multiplied with values
    flow_rel_l1: float | None = None  # of the layer's output in the running model, all before it included

    @classmethod
    def of(cls, pairs: Sequence[tuple[Tensor, Tensor]]) -> "Deviation":
        """`pairs` of what was found and what it should be, all of them as one vector."""
        found = torch.cat([found.detach().reshape(-1).double() for found, _ in pairs])
        wanted = torch.cat([wanted.detach().reshape(-1).double() for _, wanted in pairs])
        return cls(**asdict(Metrics.of(found, wanted)))

    @property
    def rank(self) -> float:
        """Worst last; a NaN is worse than any number."""
        return self.rel_l1 if self.rel_l1 == self.rel_l1 else float("inf")

    @classmethod
    def unknown(cls) -> "Deviation":
        nan = float("nan")
        return cls(nan, nan, nan, nan)
