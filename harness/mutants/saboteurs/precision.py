"""Right formulas in too few bits. Where the cell's own dtype has no more, that is its rounding and no bug."""

from collections.abc import Callable

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall
from harness.mutants.saboteurs import saboteur as core
from harness.mutants.saboteurs.reach import attends_several, both
from harness.mutants.saboteurs.saboteur import Applies, Result, attend, in_kernel, in_step

ACCUMULATED_KEYS = 16  # one matrix instruction
HALF = (torch.bfloat16, torch.float16)


def finer_than(dtype: torch.dtype) -> Applies:
    limit = torch.finfo(dtype).eps
    return lambda case: torch.finfo(getattr(torch, case.dtype)).eps < limit


def rounded(x: Tensor, to: Callable[[Tensor], Tensor]) -> Tensor:
    """As rounded by `to`, with the gradient of x: hardware rounds values, not derivatives."""
    return x + (to(x.detach()) - x.detach())


def _through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(dtype).to(x.dtype)


def ten_bits(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


@in_step("score", applies=attends_several)
def scores_in_bfloat16(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """q k^T leaves the matrix product in bfloat16: a score of 100 is off by up to 0.25."""
    return rounded(core.score(q, k, call), _through(torch.bfloat16))


@in_step("score", applies=attends_several)
def scores_in_float16(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """q k^T leaves the matrix product in float16: a score of 100 is off by up to 0.03."""
    return rounded(core.score(q, k, call), _through(torch.float16))


@in_kernel(applies=both(attends_several, finer_than(torch.bfloat16)))
def softmax_in_bfloat16(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """Weights rounded to bfloat16 before they meet the values."""
    if q.dtype == torch.bfloat16:
        return attend(q, k, v, call)
    return attend(q, k, v, call, normalise=lambda s: rounded(core.normalise(s), _through(torch.bfloat16)))


@in_step("normalise", applies=attends_several)
def weights_in_eight_bits(scores: Tensor) -> Tensor:
    """Weights quantised to multiples of 1/255, as int8 attention does before P V."""
    return rounded(core.normalise(scores), lambda w: (w * 255).round() / 255)


@in_kernel(applies=attends_several)
def sums_in_half_precision(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """P V accumulated in float16, or in bfloat16 if that is the input: a rounding after every 16 keys."""
    narrow = _through(q.dtype if q.dtype in HALF else torch.float16)

    def mix(weights: Tensor, v: Tensor) -> Tensor:
        parts = zip(weights.split(ACCUMULATED_KEYS, dim=-1), v.split(ACCUMULATED_KEYS, dim=-2), strict=True)
        total = torch.zeros((), dtype=v.dtype)
        for w, values in parts:
            total = rounded(total + w @ values, narrow)
        return total

    return attend(q, k, v, call, mix=mix)


@in_kernel(applies=lambda case: case.dtype in ("float32", "float64"))
def products_in_ten_bits(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """TF32 left on: the operands of both matrix products rounded to 10 bits. Half-precision ones have no more."""
    if q.dtype in HALF:
        return attend(q, k, v, call)

    def mix(weights: Tensor, v: Tensor) -> Tensor:
        return rounded(weights, ten_bits) @ v

    q, k, v = (rounded(t, ten_bits) for t in (q, k, v))
    return attend(q, k, v, call, mix=mix)


@in_kernel(applies=finer_than(torch.bfloat16))
def values_in_bfloat16(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """A cache that stores values in bfloat16 whatever the model's dtype."""
    return attend(q, k, v if v.dtype == torch.bfloat16 else rounded(v, _through(torch.bfloat16)), call)


@in_kernel(applies=finer_than(torch.float16))
def output_through_half_precision(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """The output buffer allocated in float16 and cast back."""
    out, weights = attend(q, k, v, call)
    return (out if q.dtype in HALF else rounded(out, _through(torch.float16))), weights


@in_kernel(applies=lambda case: case.dtype == "float64")
def float64_through_float32(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """A kernel that knows no float64 and casts to float32 in silence."""
    if q.dtype != torch.float64:
        return attend(q, k, v, call)
    out, weights = attend(q.float(), k.float(), v.float(), call)
    return out.double(), weights.double()
