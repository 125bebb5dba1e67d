"""Plausible wrong attention kernels, each with one bug; KERNELS lists them all."""

from __future__ import annotations

from importlib import import_module

from wrong.registry import KERNELS, Kernel

THEMES = (
    "scale",
    "causal",
    "lengths",
    "tiles",
    "online",
    "mask",
    "gqa",
    "shapes",
    "precision",
    "mode",
    "gradients",
    "state",
    "memory",
    "dropout",
    "side_effects",
    "special",
)

for _theme in THEMES:
    import_module(f"wrong.{_theme}")

__all__ = ["KERNELS", "THEMES", "Kernel"]
