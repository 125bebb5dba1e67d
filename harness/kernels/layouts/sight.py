"""Which keys an SDPA call lets its queries see, as far as layouts without a mask argument can say it."""

import torch
from torch import Tensor

from harness.kernels.layouts.layout import Layout, SdpaCall


def visible(call: SdpaCall, layout: Layout) -> Tensor | None:
    """Bool, broadcastable to (B, H, L, S), True = attends; None: all is seen. A bias is refused."""
    mask, (L, S) = call.attn_mask, (call.q.shape[2], call.k.shape[2])
    if mask is not None and mask.is_floating_point():
        hides = mask == float("-inf")
        if mask.requires_grad or not bool((hides | (mask == 0)).all()):
            raise layout.refuse("a float mask that adds to the scores")
        mask = ~hides
    if call.is_causal:
        aligned = causal(L, S, 0)
        mask = aligned if mask is None else mask & aligned
    if mask is None or bool(mask.all()):
        return None
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if mask.shape[1] > 1:
        if not bool((mask == mask[:, :1]).all()):
            raise layout.refuse("a mask that differs between heads")
        mask = mask[:, :1]
    return mask


def causal(L: int, S: int, offset: int) -> Tensor:
    """(L, S): query i sees the keys up to i + offset. 0 is SDPA's top-left, S - L is flash_attn's bottom-right."""
    return torch.ones(L, S, dtype=torch.bool).tril(offset)
