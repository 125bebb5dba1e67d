"""A user's kernel file: SDPA's signature, some right, most wrong in one known way. Each says where its bug can show."""

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.kernels.call import Unsupported

# Right


def plain(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def textbook(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(q k^T) v, written down without looking at any other implementation."""
    dtype = q.dtype
    q, k, v = (t.to(torch.promote_types(dtype, torch.float32)) for t in (q, k, v))
    if enable_gqa:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    # To hide the NaN of a row that sees nothing (`nan_to_num`) would leave it in the gradients of q and of the mask.
    sees_nothing = (scores == float("-inf")).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(sees_nothing, 0.0), -1).masked_fill(sees_nothing, 0.0)
    return (F.dropout(weights, dropout_p) @ v).to(dtype)


# Wrong numbers


def scale_off(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Shows everywhere."""
    scale = q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
    return F.scaled_dot_product_attention(q, k, v, **{**options, "scale": 1.01 * scale})


def causal_off_by_one(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Shows where SDPA's own is_causal is asked for: plain causal masks."""
    if options.get("is_causal"):
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)
        options = {**options, "is_causal": False, "attn_mask": seen}
    return F.scaled_dot_product_attention(q, k, v, **options)


def swapped_groups(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """tile instead of repeat_interleave: shows where there are several groups of several heads."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)
    return F.scaled_dot_product_attention(q, k, v, **{**options, "enable_gqa": False})


def zeros(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Shows everywhere; in training it also cuts the graph."""
    return q.new_zeros(*q.shape[:3], v.shape[3])


def mask_ignored(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Shows wherever something is hidden."""
    return F.scaled_dot_product_attention(q, k, v, **{**options, "attn_mask": None, "is_causal": False})


def scale_ignored(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Shows where the scale is not the default one: absorbed MLA, whose keys are wider than its heads."""
    return F.scaled_dot_product_attention(q, k, v, **{**options, "scale": None})


def fast_softmax(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Right, but for weights rounded to 16 bits: more than the reference's rounding, less than another function."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * options["scale"]
    weights = torch.softmax(scores, -1)
    mantissa, exponent = torch.frexp(weights)
    weights = torch.ldexp((mantissa * 2**16).round() / 2**16, exponent)
    return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


# Broken contract


def is_none(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    return None


def wrong_shape(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def wrong_dtype(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options).double()


def writes_q(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, **options)
    with torch.no_grad():
        q.mul_(0.5)
    return out


def writes_mask(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, **options)
    if options.get("attn_mask") is not None:
        options["attn_mask"].fill_(True)
    return out


def gives_nan(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, **options).clone()
    out[0, 0, 0, 0] = float("nan")
    return out


# Raises


def raises(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    raise RuntimeError("no such tile")  # RAISED HERE


def refuses(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    raise Unsupported("only for tensor cores")


def out_of_memory(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    raise MemoryError("8 TB")


def torch_out_of_memory(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return torch.empty(2**60)


def leaves(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    sys.exit(0)


NOT_A_FUNCTION = 3
