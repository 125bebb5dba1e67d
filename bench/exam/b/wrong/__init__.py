"""Eighty plausible wrong attention kernels, gathered in ``KERNELS``."""

from __future__ import annotations

from . import (
    causal,
    gqa,
    gradients,
    layouts,
    masks,
    modes,
    numerics,
    randomness,
    sizes,
    special,
    state,
    tiling,
)
from ._base import REGISTRY, Kernel, attend

KERNELS: list[Kernel] = list(REGISTRY)

__all__ = [
    "KERNELS",
    "Kernel",
    "attend",
    "causal",
    "gqa",
    "gradients",
    "layouts",
    "masks",
    "modes",
    "numerics",
    "randomness",
    "sizes",
    "special",
    "state",
    "tiling",
]
