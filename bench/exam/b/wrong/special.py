"""Wrong kernels that mistreat special values and empty inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import NEG_INF, attend, prepare, wrong


@wrong(exact=True, where="NaN in the inputs")
def nan_replaced_by_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """NaN is replaced by zero in the output, meant for masked-out rows, and hides NaN inputs (mlx#2608, rten#1321)."""
    out = attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return torch.nan_to_num(out, nan=0.0, posinf=float("inf"), neginf=NEG_INF)


@wrong(exact=True, where="no keys")
def no_keys_give_nan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Without keys the result is 0 / 0 and not 0 (cf. Dao-AILab/flash-attention#1713)."""
    out = attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out + float("nan") if k.size(-2) == 0 else out


@wrong(exact=True, where="float mask with a row of finfo.min")
def finite_minimum_taken_for_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A bias of finfo.min counts as minus infinity, so a row full of it is 0 and not a mean (pytorch#109517)."""
    if attn_mask is not None and attn_mask.is_floating_point():
        bias = attn_mask.to(prepare(q, k, v).q.dtype)
        attn_mask = torch.where(attn_mask <= torch.finfo(attn_mask.dtype).min, torch.full_like(bias, NEG_INF), bias)
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
