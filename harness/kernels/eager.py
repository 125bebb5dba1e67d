"""The textbook lines. Clear first, fast where that costs no clarity; other kernels are judged beside this one."""

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.transforms import is_transformed


def eager(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    B, H, L, D = q.shape
    _, H_kv, S, _ = k.shape
    D_v, dtype = v.shape[-1], q.dtype
    if dtype.itemsize < 4:
        # Half-precision scores would break equality as soon as logits grow: fp32 from here to the output.
        q, k, v = q.float(), k.float(), v.float()
    # The G query heads of a group become rows of one matrix product: K and V are never repeated.
    rows = q.reshape(B * H_kv, H // H_kv * L, D)  # (B*H_kv, G*L, D)
    keys, values = k.reshape(B * H_kv, S, D), v.reshape(B * H_kv, S, D_v)

    scores = scaled_product(rows, keys.mT, call.scale)  # (B*H_kv, G*L, S)
    if call.hides or call.sinks is not None:
        weights = weigh(scores.view(B, H, L, S), call.allowed(q, k), call).reshape(scores.shape)
    else:  # what is left does not ask which row is whose
        weights = weigh(scores, None, call)
    out = torch.bmm(weights, values).view(B, H, L, D_v)
    if dtype.itemsize < 4:
        out, weights = out.to(dtype), weights.to(dtype) if call.need_weights else weights
    return out, weights.view(B, H, L, S) if call.need_weights else None


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * (a @ b) of batches of matrices, in one pass."""
    return torch.baddbmm(a.new_empty(1), a, b, beta=0, alpha=scale)  # of the first nothing is read


def weigh(scores: Tensor, allowed: Tensor | None, call: AttentionCall) -> Tensor:
    """Softcap, masks, softmax and dropout: the weights (B, H, L, S) that multiply v. May overwrite the scores."""
    # Autograd may need the scores again. Without it they are overwritten: fresh pages cost more than the arithmetic.
    in_place = not torch.is_grad_enabled() and not is_transformed()
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    bias = call.bias
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    hidden = None if allowed is None else ~allowed
    if hidden is not None:
        scores = (scores.masked_fill_ if in_place else scores.masked_fill)(hidden, float("-inf"))
    weights = softmax(scores, call.sinks, in_place=in_place)
    if hidden is not None:
        # A row that may attend nothing is 0/0 above; and a NaN query must not reach the keys hidden from it.
        weights = (weights.masked_fill_ if in_place else weights.masked_fill)(hidden, 0.0)
    return F.dropout(weights, call.dropout_p) if call.dropout_p > 0 else weights


def softmax(scores: Tensor, sinks: Tensor | None, *, in_place: bool = False) -> Tensor:
    """Over the keys; a sink is one more logit per head that takes its share and carries no value."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, out=scores) if in_place else torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


KERNEL = Kernel("eager", eager, gives_weights=True)
