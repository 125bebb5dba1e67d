"""Wrong kernels that misread the mask."""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import HALVES, NEG_INF, as_if_contiguous, attend, finish, mm, normalise, prepare, scores, wrong


@wrong(exact=True, where="gradients, when one row is masked out")
def masked_row_has_nan_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A masked-out row is zeroed after the softmax, so its gradient is NaN (Xilinx/brevitas#1591, pytorch#41508)."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    s = scores(x)
    empty = (s == NEG_INF).all(-1, keepdim=True)
    probs = torch.softmax(s, -1)
    return finish(x, torch.where(empty, torch.zeros_like(probs), probs), dropout_p)


@wrong(exact=False, where="half precision with a float32 mask of large values")
def float_mask_rounded_to_half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A float32 bias for half precision inputs is first rounded to half, which ruins biases of large magnitude."""
    if attn_mask is not None and attn_mask.is_floating_point() and q.dtype in HALVES:
        attn_mask = attn_mask.to(q.dtype)
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="float mask together with an explicit scale")
def bias_scaled_with_the_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With an explicit scale the bias is scaled too (the reference formula in facebookresearch/xformers#576)."""
    if scale is not None and attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask * scale
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="mask of shape (B, 1, L, S), B > 1 and H > 1, different per batch")
def batch_of_mask_taken_modulo(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The mask of flat head i is that of batch i % B and not i // H (the kind of jwohlwend/boltz#523)."""
    batch, heads = q.shape[:2]
    if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[:2] == (batch, 1) and batch > 1:
        order = torch.arange(batch * heads) % batch
        attn_mask = attn_mask[:, 0][order].unflatten(0, (batch, heads))
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="masks that are transposed or sliced views")
def mask_strides_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The mask's memory is read as if it were contiguous (the family of pytorch/pytorch#112577)."""
    if attn_mask is not None:
        attn_mask = as_if_contiguous(attn_mask)
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="boolean mask that is all True for the first batch and head only")
def mask_skipped_if_first_head_is_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A boolean mask is dropped as trivial after looking at the first batch and head only."""
    if attn_mask is not None and attn_mask.dtype == torch.bool and attn_mask.dim() > 2 and attn_mask.numel():
        if bool(attn_mask.flatten(0, -3)[0].all()):
            attn_mask = None
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="mask of shape (..., L, 1) with L == S")
def query_mask_read_as_key_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A mask that broadcasts over keys is taken for a key padding mask when L == S."""
    if attn_mask is not None and attn_mask.size(-1) == 1 and attn_mask.size(-2) == k.size(-2) > 1:
        attn_mask = attn_mask.mT
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="mask of shape (H, L, S) with B == H > 1")
def three_dim_mask_read_as_batch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A mask (n, L, S) is taken to be per batch when n == B, though broadcasting says per head (pytorch#120810)."""
    if attn_mask is not None and attn_mask.dim() == 3 and attn_mask.size(0) == q.size(0) > 1:
        attn_mask = attn_mask.unsqueeze(1)
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="boolean mask, masked scores 1e4 above the visible ones")
def masked_scores_lowered_by_ten_thousand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Masked scores are lowered by 1e4 and not set to minus infinity, the constant of early BERT code."""
    if attn_mask is None or attn_mask.dtype != torch.bool:
        return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    x = prepare(q, k, v, None, is_causal, scale, enable_gqa)
    s = mm(x.q, x.k.mT) * x.scale + torch.where(attn_mask, 0.0, -1e4).to(x.q.dtype)
    probs = normalise(s if x.bias is None else s + x.bias)
    dead = ~attn_mask.any(-1, keepdim=True)
    return finish(x, torch.where(dead, torch.zeros_like(probs), probs), dropout_p)
