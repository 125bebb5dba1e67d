"""Wrong kernels that mistake the kv heads."""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import attend, wrong


@wrong(exact=True, where="GQA with a group of 3, 5, 6, 7, ...")
def group_rounded_to_power_of_two(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kv head is found by shifting with the group size rounded up to a power of two."""
    if enable_gqa and k.size(1) != q.size(1):
        shift = (q.size(1) // k.size(1) - 1).bit_length()
        index = (torch.arange(q.size(1)) >> shift).clamp(max=k.size(1) - 1)
        k, v = k[:, index], v[:, index]
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="GQA, gradient of k")
def key_gradient_of_last_head_only(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradient of a shared key is that of the last query head of its group and not the sum over the group."""
    if enable_gqa and k.size(1) != q.size(1):
        group = q.size(1) // k.size(1)
        last = (torch.arange(q.size(1)) % group == group - 1).view(1, -1, 1, 1)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        k = torch.where(last, k, k.detach())
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="GQA with a mask per query head")
def mask_read_per_kv_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A mask (B, H, L, S) is read once per group, so all heads of a group share the first one's mask."""
    group = q.size(1) // max(k.size(1), 1)
    if enable_gqa and attn_mask is not None and attn_mask.dim() == 4 and attn_mask.size(1) == q.size(1) > 1 < group:
        attn_mask = attn_mask[:, ::group].repeat_interleave(group, 1)
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="one kv head and more than one batch")
def single_kv_head_shared_over_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A single kv head is broadcast with batch stride 0, so every batch attends to the first one's keys."""
    if enable_gqa and k.size(1) == 1 < q.size(1) and k.size(0) > 1:
        k = k[:1].expand(k.shape)
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="GQA where the group size is not the number of kv heads")
def head_divided_by_kv_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kv head is h // H_kv in place of h // group, right for 4 over 2 heads (PSAL-POSTECH/ONNXim#34)."""
    if enable_gqa and k.size(1) != q.size(1):
        index = (torch.arange(q.size(1)) // k.size(1)).clamp(max=k.size(1) - 1)
        k, v = k[:, index], v[:, index]
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
