"""torch's flex_attention, compiled: the scores never exist as a whole, masks are code or one tensor.

Inference alone: flex_attention has no backward pass on CPU. Uncompiled it would be a slow eager attention with all
scores, so without a C++ compiler it is refused.
"""

import functools

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall, Kernel, Unsupported
from harness.kernels.compiled import compiled_by_torch, plain

ENDLESS = 1 << 40  # a window's side that hides nothing
ROOM = 16  # rows of zeros behind the keys of each head


def flex(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    _refuse(q, k, v, call)
    (B, H, L, _), (H_kv, S) = q.shape, k.shape[1:3]
    tensor = functools.partial(torch.tensor, device=q.device)
    mask, allowed = None, call.allowed(q, k)
    if call.mask is not None:
        assert allowed is not None
        bias = call.bias if call.bias is not None else torch.zeros((), device=q.device)
        mask = plain(bias.float().masked_fill(~allowed, float("-inf")).expand(B, H, L, S))
    left, right = call.reach
    starts = call.q_start if isinstance(call.q_start, Tensor) else tensor(call.q_start).expand(B)
    out = _lines(
        plain(q),
        _with_room(k),
        plain(v),
        tensor(call.scale, dtype=torch.float32),
        plain(starts.to(q.device)),
        tensor(ENDLESS if left is None else left),
        tensor(ENDLESS if right is None else right),
        mask,
        None if call.softcap is None else tensor(call.softcap, dtype=torch.float32),
        H_kv < H,
    )
    if allowed is not None:
        out = out.masked_fill(~allowed.any(-1, keepdim=True), 0.0)  # rows that see nothing
    return out, None


def _refuse(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> None:
    if call.needs_gradients(q, k, v):
        raise Unsupported("flex_attention has no backward pass on CPU")
    if q.dtype == torch.float64:
        raise Unsupported("flex_attention has no float64 on CPU")
    if q.is_meta or min(q.shape[0], q.shape[2], k.shape[2]) == 0:
        raise Unsupported("flex_attention needs real tensors that are not empty")
    for name, asked in (
        ("sinks", call.sinks is not None),
        ("dropout", call.dropout_p > 0),
        ("weights", call.need_weights),
    ):
        if asked:
            raise Unsupported(f"flex_attention has no {name}")


def _with_room(k: Tensor) -> Tensor:
    """torch 2.13's code for CPU reads past a head's last key (seen with D = 16 and S = 24): a NaN there spoils rows."""
    B, H_kv, S, D = k.shape
    room = k.new_zeros(B, H_kv, S + ROOM, D)
    room[:, :, :S] = k
    return room[:, :, :S]


@compiled_by_torch
def _lines(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    starts: Tensor,
    left: Tensor,
    right: Tensor,
    mask: Tensor | None,
    softcap: Tensor | None,
    grouped: bool,
) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score * scale
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if mask is not None:
            return score + mask[b, h, i, j]
        position = starts[b] + i
        seen = (j <= position + right) & (j >= position - left)
        return torch.where(seen, score, float("-inf"))

    # The scale stands in `change`: as a number it would be part of the graph.
    out = flex_attention(q, k, v, change, scale=1.0, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out


KERNEL = Kernel("flex", flex, delegates=True)
