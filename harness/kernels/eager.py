"""The textbook lines. Clear first, fast where that costs no clarity; other kernels are judged beside this one."""

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.kernels.call import AttentionCall, Kernel


def eager(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    B, H, L, D = q.shape
    H_kv, S = k.shape[1:3]
    rows = H // H_kv * L  # the G query heads of a group become rows of one matrix product: K and V are never repeated
    dtype = q.dtype
    # Half-precision scores would break equality as soon as logits grow: fp32 from here to the output.
    q, k, v = (t.to(torch.promote_types(dtype, torch.float32)) for t in (q, k, v))

    scores = (q * call.scale).reshape(B, H_kv, rows, D) @ k.mT  # (B, H_kv, G*L, S)
    scores = scores.view(B, H, L, S)
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        scores = scores + call.bias.to(scores.dtype)
    allowed = call.allowed(q, k)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))

    weights = softmax(scores, call.sinks)
    if allowed is not None:
        # A row that may attend nothing is 0/0 above; and a NaN query must not reach the keys hidden from it.
        weights = weights.masked_fill(~allowed, 0.0)
    weights = F.dropout(weights, call.dropout_p) if call.dropout_p > 0 else weights

    out = weights.reshape(B, H_kv, rows, S) @ v  # (B, H_kv, G*L, D_v)
    return out.view(B, H, L, v.shape[-1]).to(dtype), weights.to(dtype)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the keys; a sink is one more logit per head that takes its share and carries no value."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


KERNEL = Kernel("eager", eager, gives_weights=True)
