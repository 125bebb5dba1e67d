"""Replace attention inside a model and prove that the weights went along."""

from harness.swaps import composed as composed
from harness.swaps import conversions as conversions
from harness.swaps import recurrent as recurrent
from harness.swaps import references as references
from harness.swaps import torch_layers as torch_layers
from harness.swaps.converters import VARIANT, SwapError
from harness.swaps.engine import replace_mha_with_eager, swap
from harness.swaps.report import SwappedModule, SwapReport

__all__ = ["VARIANT", "SwapError", "SwapReport", "SwappedModule", "replace_mha_with_eager", "swap"]
