"""Right attention kernels, each rounded in its own way, gathered in ``KERNELS``."""

from __future__ import annotations

from . import backends, dense, functions, optional, tiled
from .core import KERNELS, Kernel, right

__all__ = ["KERNELS", "Kernel", "backends", "dense", "functions", "optional", "right", "tiled"]
