"""A right attention in small steps. A saboteur replaces one of them; what it leaves alone is right, to the bit."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.kernels.call import AttentionCall, Unsupported

Result = tuple[Tensor, Tensor]


def spread(kv: Tensor, heads: int) -> Tensor:
    """(B, H_kv, S, D) -> (B, H, S, D): neighbouring query heads share a key/value head."""
    return kv if kv.shape[1] == heads else kv.repeat_interleave(heads // kv.shape[1], dim=1)


def score(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
    """(B, H, L, S), before anything is hidden."""
    scores = (q * call.scale) @ k.mT
    return scores if call.bias is None else scores + call.bias.to(scores.dtype)


def normalise(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1)


def drop(weights: Tensor, p: float) -> Tensor:
    return F.dropout(weights, p) if p > 0 else weights


def mix(weights: Tensor, v: Tensor) -> Tensor:
    return weights @ v  # (B, H, L, D_v)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    *,
    spread_k: Callable[[Tensor, int], Tensor] = spread,
    spread_v: Callable[[Tensor, int], Tensor] = spread,
    score: Callable[[Tensor, Tensor, AttentionCall], Tensor] = score,
    normalise: Callable[[Tensor], Tensor] = normalise,
    drop: Callable[[Tensor, float], Tensor] = drop,
    mix: Callable[[Tensor, Tensor], Tensor] = mix,
) -> Result:
    if call.softcap is not None or call.sinks is not None:
        raise Unsupported("saboteurs have no softcap and no sinks: no cell of a grid asks for them")
    dtype, heads = q.dtype, q.shape[1]
    q, k, v = (t.to(torch.promote_types(dtype, torch.float32)) for t in (q, k, v))
    k, v = spread_k(k, heads), spread_v(v, heads)
    scores = score(q, k, call)
    allowed = call.allowed(q, k)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    weights = normalise(scores)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)  # a row that may attend nothing is 0/0 above
    weights = drop(weights, call.dropout_p)
    return mix(weights, v).to(dtype), weights.to(dtype)
