"""Results that were not computed, or not here."""

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.kernels.call import AttentionCall
from harness.mutants.saboteurs.reach import attends_several, several_queries
from harness.mutants.saboteurs.saboteur import Result, Run, attend, in_kernel, in_step, with_memory


@in_kernel()
def zeros(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """An output buffer that nothing was written to."""
    _, weights = attend(q, k, v, call)
    return q.new_zeros(*q.shape[:3], v.shape[3]), weights


@in_kernel(applies=lambda case: case.seq_len > 1)
def mean_of_values(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """The mean of all values for every query: close to attention over many unrelated tokens."""
    _, weights = attend(q, k, v, call)
    mean = v.mean(-2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return mean.expand(*q.shape[:3], v.shape[3]), weights


@in_step("score", applies=attends_several)
def uniform_weights(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """The mean of the visible values: scores that never reach the softmax."""
    return q.new_zeros(*q.shape[:3], k.shape[2])


@in_kernel()
def one_element_off_by_one_percent(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """One lane of one warp with a bad register: a single number of the output is wrong by 1 %."""
    out, weights = attend(q, k, v, call)
    factor = torch.ones_like(out)
    factor[0, 0].view(-1)[out[0, 0].detach().nan_to_num(0.0).abs().argmax()] = 1.01  # the first may be of a dead row
    return out * factor, weights


@in_kernel(applies=several_queries)
def last_row_repeats_the_one_before(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """An index clamped to L - 2: the last query gets its neighbour's result."""
    out, weights = attend(q, k, v, call)
    return (out if q.shape[2] == 1 else torch.cat((out[..., :-1, :], out[..., -2:-1, :]), dim=-2)), weights


@in_kernel()
def reference_called_secretly(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """The kernel hands everything to torch's own attention: equal, fast, and not what was to be judged."""
    allowed, dtype = call.allowed(q, k), torch.promote_types(q.dtype, torch.float32)
    mask = allowed
    if call.bias is not None:
        mask = call.bias if allowed is None else call.bias.masked_fill(~allowed, float("-inf"))
        mask = mask.to(dtype)
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q.to(dtype), k.to(dtype), v.to(dtype), mask, call.dropout_p, scale=call.scale, enable_gqa=grouped
    )
    _, weights = attend(q, k, v, call) if call.need_weights else (out, out)
    return out.to(q.dtype), weights


@with_memory()
def last_output_again() -> Run:
    """The result of the call before this one, if its shape fits: a stream that was not waited for."""
    before: dict[tuple[int, ...], Tensor] = {}

    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
        out, weights = attend(q, k, v, call)
        stale = before.get(tuple(out.shape), out)
        before[tuple(out.shape)] = out.detach().clone()
        return stale, weights

    return run


@with_memory()
def cached_by_shape() -> Run:
    """A result kept under the shapes of its inputs: right for the first request, and for no other."""
    kept: dict[tuple[torch.Size, ...], Tensor] = {}

    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
        out, weights = attend(q, k, v, call)
        shapes = (q.shape, k.shape, v.shape)
        if shapes in kept:
            return kept[shapes], weights
        kept[shapes] = out.detach().clone()
        return out, weights

    return run
