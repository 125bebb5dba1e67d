"""Keeps NaN and inf behind a mask from leaking through any kernel.

A weight of 0 does not stop a NaN: 0 * NaN = NaN, in P @ V and again in every matrix product of the backward pass. So
where something non-finite turns up, the kernel runs on cleaned inputs, and only the elements that may really see a
non-finite key or value take the raw result. Finite inputs, the usual case, pay one reduction.
"""

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.transforms import bare, is_recorded


def run(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    raw = kernel.run(q, k, v, call)
    if not kernel.shielded or not call.hides or q.is_meta:
        return raw
    # A recorded graph cannot branch on data, so it always takes the careful way.
    if not is_recorded() and _is_clean(q, k, v, raw[0]):
        return raw
    return _run_cleaned(kernel, q, k, v, call, raw)


def _is_clean(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> bool:
    """In a backward pass hidden NaNs reach gradients through finite outputs, so there the inputs are looked at."""
    differentiates = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    looked_at = (q, k, v, out) if differentiates else (out,)
    # The sum is finite only if all are; an overflowing sum merely takes the careful way.
    return all(bool(_sum(bare(t.detach())).isfinite()) for t in looked_at)


def _sum(t: Tensor) -> Tensor:
    return t.sum(dtype=torch.promote_types(t.dtype, torch.float32))


def _run_cleaned(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    raw: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    allowed = call.allowed(q, k)
    assert allowed is not None
    (B, H, L, _), (H_kv, S) = q.shape, k.shape[1:3]
    allowed = allowed.expand(B, H, L, S)

    dead = ~allowed.any(-1, keepdim=True)  # (B, H, L, 1)
    # What nobody sees goes whatever it is: uninitialised memory may hold finite numbers that overflow.
    grouped = allowed.reshape(B, H_kv, H // H_kv * L, S)  # (B, H_kv, G*L, S)
    seen = grouped.any(-2).unsqueeze(-1)  # (B, H_kv, S, 1)
    out, weights = kernel.run(
        torch.where(dead & ~q.isfinite(), 0, q),
        torch.where(seen & k.isfinite(), k, 0),
        torch.where(seen & v.isfinite(), v, 0),
        call,
    )

    # How many non-finite things each output element sees: a bad key spoils the whole row, a bad value its channel.
    rows = grouped.to(torch.float32)
    bad_keys = rows @ (~k.isfinite()).any(-1, keepdim=True).to(torch.float32)  # (B, H_kv, G*L, 1)
    bad_values = rows @ (~v.isfinite()).to(torch.float32)  # (B, H_kv, G*L, D_v)
    row_spoilt = bad_keys.view(B, H, L, 1) > 0
    out = torch.where(row_spoilt | (bad_values.view(out.shape) > 0), raw[0].detach(), out)
    if weights is not None and raw[1] is not None:
        weights = torch.where(row_spoilt, raw[1].detach(), weights)
    return out, weights
