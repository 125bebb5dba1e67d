"""Wrong softmaxes, and wrong factors on the scores."""

from dataclasses import replace

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall
from harness.mutants.saboteurs import saboteur as core
from harness.mutants.saboteurs.reach import any_call, attends_several, both, compares_weights, several_heads, some_query
from harness.mutants.saboteurs.saboteur import Result, attend, in_kernel, in_step

LOG2_E = 1.4426950408889634
QUERY_BLOCK = 16


def exponentials(scores: Tensor) -> Tensor:
    """exp(score - the row's largest); 0 in a row without visible keys."""
    largest = scores.amax(-1, keepdim=True).detach()
    return torch.exp(scores - largest.masked_fill(largest == float("-inf"), 0.0))


@in_step("normalise", applies=lambda case: case.seq_len > 1)
def softmax_over_queries(scores: Tensor) -> Tensor:
    """softmax(dim=-2): each key's weights sum to 1 over the queries."""
    return torch.softmax(scores, dim=-2)


@in_step("normalise", applies=several_heads)
def softmax_over_heads(scores: Tensor) -> Tensor:
    """softmax(dim=1), right for a layout in which that is the keys' dimension."""
    return torch.softmax(scores, dim=1)


@in_step("normalise", applies=attends_several)
def softmax_in_base_two(scores: Tensor) -> Tensor:
    """exp2 without log2(e) in the scale: the fast instruction put in place of exp."""
    return torch.softmax(scores / LOG2_E, dim=-1)


@in_step("normalise", applies=both(attends_several, lambda case: case.dtype != "float64"))
def no_max_subtraction(scores: Tensor) -> Tensor:
    """exp of raw scores: right until one exceeds 88, which float32 cannot hold (float64 can, up to 709)."""
    if scores.dtype == torch.float64:
        return core.normalise(scores)
    raised = torch.exp(scores)
    return raised / raised.sum(-1, keepdim=True)


@in_step("normalise", applies=attends_several)
def exponentials_overflow_half(scores: Tensor) -> Tensor:
    """exp of raw scores kept in half precision: infinite from a score of 11.1 on."""
    overflows = (scores > 11.09).any(-1, keepdim=True)
    return core.normalise(scores).masked_fill(overflows, float("nan"))


@in_step("normalise", applies=attends_several)
def exp_by_polynomial(scores: Tensor) -> Tensor:
    """2^x by exponent bits and a quadratic for the fraction: Schraudolph's trick with too few terms, off by 0.2 %."""
    largest = scores.amax(-1, keepdim=True).detach()
    power = ((scores - largest.masked_fill(largest == float("-inf"), 0.0)) * LOG2_E).clamp(min=-200.0)
    whole = power.detach().floor()
    fraction = power - whole
    raised = (1 + fraction * (0.6565 + 0.3435 * fraction)) * torch.exp2(whole)
    raised = raised.masked_fill(scores == float("-inf"), 0.0)
    return raised / raised.sum(-1, keepdim=True)


@in_step("normalise", applies=attends_several)
def small_weights_flushed(scores: Tensor) -> Tensor:
    """Weights below 1 % skipped to save work, and what is left not normalised again."""
    weights = core.normalise(scores)
    return weights.masked_fill(weights < 1e-2, 0.0)


@in_step("normalise", applies=some_query(lambda visible: (visible.sum(-1) > 1)[..., -QUERY_BLOCK:]))
def last_block_not_normalised(scores: Tensor) -> Tensor:
    """The division by the row sums left out of the epilogue of the last block of queries."""
    weights = core.normalise(scores)
    return torch.cat((weights[..., :-QUERY_BLOCK, :], exponentials(scores)[..., -QUERY_BLOCK:, :]), dim=-2)


@in_step("normalise")
def epsilon_in_the_normaliser(scores: Tensor) -> Tensor:
    """sum + 1e-4 against a division by 0: weights no longer sum to 1."""
    raised = exponentials(scores)
    return raised / (raised.sum(-1, keepdim=True) + 1e-4)


@in_step("normalise")
def softmax_plus_one(scores: Tensor) -> Tensor:
    """1 + sum in the denominator: a sink that nobody asked for."""
    sink = torch.zeros_like(scores[..., :1])
    return torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]


@in_kernel(applies=both(attends_several, compares_weights))
def weights_returned_unnormalised(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """The output is right, but the weights given back are those before the division."""
    out, _ = attend(q, k, v, call)
    _, unnormalised = attend(q, k, v, call, normalise=exponentials)
    return out, unnormalised


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
