"""Kernels that call PyTorch's own attention, each prepared in another way."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from .core import Call, right


def _mask(call: Call) -> Tensor | None:
    """The mask argument for a call: as given, or all masks merged where there are two."""
    if call.causal and (call.bias is not None or call.keep is not None):
        return call.merged()
    return call.bias if call.keep is None else call.keep


def _native(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """PyTorch's attention on prepared inputs; causality by its own argument unless the mask has it."""
    causal = call.causal and mask is None
    return F.scaled_dot_product_attention(
        q, k, v, mask, call.dropout_p, causal, scale=call.scale, enable_gqa=q.shape[1] != k.shape[1]
    )


@right(double_backward=False, note="scaled_dot_product_attention itself; mask and causality together as one float mask")
def sdpa(call: Call) -> Tensor:
    """PyTorch's own choice of backend."""
    mask = _mask(call)
    return _native(call, call.q, call.k, call.v, mask)


@right(double_backward=False, note="all masks, also causality, as one boolean or float mask; heads repeated before")
def sdpa_merged_mask(call: Call) -> Tensor:
    """PyTorch's attention with causality as an explicit mask."""
    mask = call.merged() if call.bias is not None else call.attended()
    k, v = call.heads()
    return F.scaled_dot_product_attention(call.q, k, v, mask, dropout_p=call.dropout_p, scale=call.scale)


@right(note="the math backend, called directly")
def sdpa_math(call: Call) -> Tensor:
    """PyTorch's math backend."""
    k, v = call.heads()
    mask = call.merged() if call.bias is not None or call.keep is not None else None
    causal = call.causal and mask is None
    return torch._scaled_dot_product_attention_math(
        call.q, k, v, mask, call.dropout_p, causal, scale=call.scale, enable_gqa=False
    )[0]


def _same_width(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values zero-padded to one head dimension."""
    d, d_v = call.q.shape[-1], call.v.shape[-1]
    width = max(d, d_v)
    q, k, v = F.pad(call.q, (0, width - d)), F.pad(call.k, (0, width - d)), F.pad(call.v, (0, width - d_v))
    return q, k, v


@right(
    double_backward=False,
    dropout=False,
    mask_gradients=False,
    note="the CPU flash backend, called directly; no gradient of the mask, D and D_v padded to one width",
)
def sdpa_flash(call: Call) -> Tensor:
    """PyTorch's CPU flash backend."""
    if call.q.device.type != "cpu":
        raise NotImplementedError("sdpa_flash is for the CPU")
    q, k, v = _same_width(call)
    if call.groups > 1:
        k, v = k.repeat_interleave(call.groups, 1), v.repeat_interleave(call.groups, 1)
    mask = call.merged() if call.bias is not None or call.keep is not None else None
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        0.0,
        call.causal and mask is None,
        attn_mask=mask,
        scale=call.scale,
    )[0]
    return out[..., : call.v.shape[-1]]


@right(
    double_backward=False, note="v padded to the width of q and k (or they to its), result cropped: DeepSeek's practice"
)
def sdpa_padded_v(call: Call) -> Tensor:
    """PyTorch's attention with values padded to the head dimension."""
    q, k, v = _same_width(call)
    mask = _mask(call)
    out = _native(call, q, k, v, mask)
    return out[..., : call.v.shape[-1]]


@right(double_backward=False, note="half inputs upcast to float32 before PyTorch's attention; float32 to float64")
def sdpa_upcast(call: Call) -> Tensor:
    """PyTorch's attention one precision up."""
    dtype = torch.float64 if call.q.dtype in (torch.float32, torch.float64) else torch.float32
    k, v = call.heads()
    mask = _mask(call)
    mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    return call.out(_native(call, call.q.to(dtype), k.to(dtype), v.to(dtype), mask))


@right(
    gradients=False,
    double_backward=False,
    dropout=False,
    compile=False,
    note="flex_attention, eager; DOMAIN: forward only",
)
def flex(call: Call) -> Tensor:
    """flex_attention with all masks as a score modification."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (t.detach().contiguous() for t in call.inputs())
    merged = call.merged()
    bias = None if merged is None else merged.detach()

    def added(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert bias is not None
        return score + bias[b, h, i, j]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = flex_attention(q, k, v, score_mod=None if bias is None else added, scale=call.scale)
    assert isinstance(out, Tensor)
    return call.out(out)
