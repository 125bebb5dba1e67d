"""Dropout where there is none, and dropout done wrongly where there is some."""

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.kernels.call import AttentionCall
from harness.saboteurs.core import Result, attend
from harness.saboteurs.saboteur import in_kernel


@in_kernel()
def dropout_in_eval(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """F.dropout(weights, 0.1) without training=self.training."""
    return attend(q, k, v, call, drop=lambda weights, p: F.dropout(weights, p or 0.1))


@in_kernel()
def dropout_not_rescaled(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """Weights dropped without dividing the rest by 1 - p: right as long as nobody asks for dropout."""

    def drop(weights: Tensor, p: float) -> Tensor:
        return weights * (torch.rand_like(weights) >= p) if p > 0 else weights

    return attend(q, k, v, call, drop=drop)


@in_kernel()
def dropout_ignored(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """dropout_p accepted and never used: training is not what it says."""
    return attend(q, k, v, call, drop=lambda weights, p: weights)
