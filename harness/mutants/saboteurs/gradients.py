"""Right outputs with wrong gradients; dropout where there is none, and done wrongly where there is some."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.kernels.call import AttentionCall
from harness.mutants.saboteurs import saboteur as core
from harness.mutants.saboteurs.reach import any_call, attends_several, both, in_training
from harness.mutants.saboteurs.saboteur import Result, attend, in_kernel, in_step


class _Scaled(torch.autograd.Function):
    """x itself, with its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.factor, None


class _SoftmaxWithoutRowSum(torch.autograd.Function):
    """softmax, with the gradient P * dP instead of P * (dP - sum(P * dP))."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        weights = core.normalise(scores)
        # Rows without visible keys are 0/0: their gradient is 0, as it is in the right backward pass.
        ctx.save_for_backward(weights.nan_to_num(0.0))
        return weights

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weights,) = ctx.saved_tensors
        return weights * gradients[0]


def _scaled(x: Tensor, factor: float) -> Tensor:
    result: Tensor = _Scaled.apply(x, factor)  # type: ignore[no-untyped-call]
    return result


@in_kernel(applies=both(in_training, attends_several))
def q_detached(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """No gradient for the queries."""
    return attend(q.detach(), k, v, call)


@in_kernel(applies=both(in_training, attends_several))
def k_detached(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """No gradient for the keys: taken from a cache that holds no graph."""
    return attend(q, k.detach(), v, call)


@in_kernel(applies=in_training)
def v_detached(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """No gradient for the values."""
    return attend(q, k, v.detach(), call)


@in_kernel(applies=in_training)
def v_gradient_one_percent_large(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """A stray factor of 1.01 in dV."""
    return attend(q, k, _scaled(v, 1.01), call)


@in_kernel(applies=both(in_training, attends_several, any_call(lambda reached: reached.call.scale != 1)))
def q_gradient_not_scaled(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """dQ = dS K without the scale that the forward pass put on the scores."""
    return attend(_scaled(q, 1 / call.scale), k, v, call)


@in_kernel(applies=both(in_training, attends_several))
def softmax_gradient_without_row_sum(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """dS = P dP instead of P (dP - rowsum(P dP)): the precomputed delta never subtracted."""
    return attend(q, k, v, call, normalise=_SoftmaxWithoutRowSum.apply)


@in_kernel(applies=both(in_training, any_call(lambda reached: reached.groups[1] < reached.groups[0])))
def kv_gradient_of_one_head_per_group(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """dK and dV written by every query head of a group instead of added up: the last one wins."""

    def last_wins(kv: Tensor, heads: int) -> Tensor:
        shared = core.spread(kv, heads)
        G = heads // kv.shape[1]
        if G == 1:
            return shared
        wins = torch.arange(heads) % G == G - 1  # (H,)
        return torch.where(wins[:, None, None], shared, shared.detach())

    return attend(q, k, v, call, spread=last_wins)


@in_kernel(applies=in_training)
def last_query_gradient_lost(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """The backward pass walks one query too few: the last row sends nothing back."""
    out, weights = attend(q, k, v, call)
    return torch.cat((out[..., :-1, :], out[..., -1:, :].detach()), dim=-2), weights


@in_step("drop")
def dropout_in_eval(weights: Tensor, p: float) -> Tensor:
    """F.dropout(weights, 0.1) without training=self.training."""
    return F.dropout(weights, p or 0.1)


@in_step("drop")
def dropout_not_rescaled(weights: Tensor, p: float) -> Tensor:
    """Weights dropped without dividing the rest by 1 - p: right as long as nobody asks for dropout."""
    return weights * (torch.rand_like(weights) >= p) if p > 0 else weights


@in_step("drop")
def dropout_ignored(weights: Tensor, p: float) -> Tensor:
    """dropout_p accepted and never used: training is not what it says."""
    return weights
