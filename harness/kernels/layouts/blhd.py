"""flash_attn_func's: (B, L, H, D), no mask, and `causal` is aligned bottom-right: the last query sees the last key.

SDPA's `is_causal` is aligned top-left. The two agree where L = S; else only a mask that spells out bottom-right can be
said, and everything that `causal` alone does not say is refused.
"""

import torch
from torch import Tensor

from harness.kernels.layouts.layout import Layout, Prepared, SdpaCall
from harness.kernels.layouts.sight import causal, visible


def prepare(call: SdpaCall) -> Prepared:
    L, S = call.q.shape[2], call.k.shape[2]
    seen = visible(call, LAYOUT)
    if seen is not None and not bool((seen == causal(L, S, S - L)).all()):
        raise LAYOUT.refuse("what this call hides: there is no mask, and causal is aligned bottom-right")
    tensors = tuple(t.transpose(1, 2).contiguous() for t in (call.q, call.k, call.v))  # (B, L, H, D)
    options = {"dropout_p": call.dropout_p, "softmax_scale": call.scale, "causal": seen is not None}
    return Prepared(tensors, options, shape=(*tensors[0].shape[:3], call.v.shape[3]))


def restore(result: Tensor, memo: None) -> Tensor:
    return torch.transpose(result, 1, 2)  # (B, H, L, D_v)


LAYOUT = Layout(
    "blhd",
    prepare,
    restore,
    "f(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False) with q (B, L, H, D), as flash_attn_func",
    limits={"masks": ["none", "causal"]},
)
