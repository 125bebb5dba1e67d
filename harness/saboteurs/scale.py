"""Wrong factors on the scores."""

from dataclasses import replace

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall
from harness.saboteurs.core import Result, attend
from harness.saboteurs.reach import any_call, attends_several, both, several_heads
from harness.saboteurs.saboteur import in_kernel


def _as_bfloat16(scale: float) -> float:
    return float(torch.tensor(scale, dtype=torch.bfloat16))


is_scaled = both(attends_several, any_call(lambda reached: reached.call.scale != 1))


@in_kernel(applies=both(attends_several, several_heads))
def scale_of_embed_dim(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """1/sqrt(H D) instead of 1/sqrt(D): the width of the model taken for the width of a head."""
    return attend(q, k, v, replace(call, scale=call.scale * q.shape[1] ** -0.5))


@in_kernel(applies=is_scaled)
def scale_missing(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """No 1/sqrt(D) at all: left to a caller that does not do it either."""
    return attend(q, k, v, replace(call, scale=1.0))


@in_kernel(applies=is_scaled)
def scale_twice(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """1/D instead of 1/sqrt(D): queries already scaled by the projection are scaled again."""
    return attend(q, k, v, replace(call, scale=call.scale**2))


@in_kernel(applies=attends_several)
def scale_off_by_a_thousandth(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """A scale typed in with three digits."""
    return attend(q, k, v, replace(call, scale=call.scale * 1.001))


@in_kernel(applies=both(attends_several, any_call(lambda r: r.call.scale != r.q.shape[-1] ** -0.5)))
def scale_argument_ignored(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """1/sqrt of the tensor's width though another scale was given: absorbed MLA's keys are wider than its heads."""
    return attend(q, k, v, replace(call, scale=q.shape[-1] ** -0.5))


@in_kernel(applies=both(attends_several, any_call(lambda r: r.q.shape[-1] != r.v.shape[-1])))
def scale_of_value_dim(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """The root of the values' width instead of the keys': no difference until the two differ, as in MLA."""
    widths = q.shape[-1] / v.shape[-1]
    return attend(q, k, v, replace(call, scale=call.scale * widths**0.5))


@in_kernel(applies=both(attends_several, any_call(lambda r: _as_bfloat16(r.call.scale) != r.call.scale)))
def scale_rounded_to_bfloat16(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """The scale passed through a half-precision argument: exact for D = 64, off by up to 0.4 % for others."""
    return attend(q, k, v, replace(call, scale=_as_bfloat16(call.scale)))
