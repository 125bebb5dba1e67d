"""Replace attention inside a model and prove that the weights went along."""

from harness.swaps import references as references
from harness.swaps import torch_layers as torch_layers
from harness.swaps.engine import SwapError, SwappedModule, SwapReport, swap

__all__ = ["SwapError", "SwapReport", "SwappedModule", "swap"]
