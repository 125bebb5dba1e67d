"""Eager's lines as torch.compile makes them: inductor's code, in a form that needs few graphs.

Heads and batch become one dimension and the masks one tensor, so that shapes, windows and positions share a graph;
each dtype, each of bias, mask, softcap and sinks, and training take another (seconds each, once).
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall, Kernel, Unsupported
from harness.kernels.compiling import compiled as compiled_by_torch
from harness.kernels.compiling import plain


def compiled(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    if call.need_weights:
        raise Unsupported("the compiled kernel gives no weights")
    if call.dropout_p > 0:
        raise Unsupported("the compiled kernel has no dropout")
    (B, H, L), (H_kv, S), D_v, dtype = q.shape[:3], k.shape[1:3], v.shape[-1], q.dtype
    if q.is_meta or min(B, L, S) == 0:
        raise Unsupported("the compiled kernel needs real tensors that are not empty")
    wide = torch.promote_types(dtype, torch.float32)
    allowed, bias, sinks = call.allowed(q, k), call.bias, call.sinks

    def rows(t: Tensor) -> Tensor:
        """From what broadcasts to (B, H, L, S) to one row for each row of the products."""
        return plain(t.expand(B, H, L, t.shape[-1]).reshape(B * H_kv, H // H_kv * L, t.shape[-1]))

    out = _graph()(
        rows(q.to(wide)),
        *(plain(t.to(wide).flatten(0, 1)) for t in (k, v)),  # (B*H_kv, S, D)
        torch.tensor(call.scale, dtype=wide, device=q.device),
        None if allowed is None else rows(~allowed.expand(B, H, L, S)),
        None if bias is None else rows(bias.to(wide).expand(B, H, L, S)),
        None if call.softcap is None else torch.tensor(call.softcap, dtype=wide, device=q.device),
        None if sinks is None else rows(sinks.to(wide).view(1, H, 1, 1)),
    )
    return out.view(B, H, L, D_v).to(dtype), None


def _lines(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    hidden: Tensor | None,
    bias: Tensor | None,
    softcap: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    scores = (q * scale) @ k.mT  # (B*H_kv, G*L, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    return weights @ v


@functools.cache
def _graph() -> Callable[..., Tensor]:
    return compiled_by_torch(_lines)


KERNEL = Kernel("compiled", compiled)
