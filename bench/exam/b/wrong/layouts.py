"""Wrong kernels that misread strides."""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import as_if_contiguous, attend, wrong


@wrong(exact=True, where="keys that are a transposed view")
def key_strides_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keys are read as if contiguous (pytorch/pytorch#181133, #112577, torch-spyre#4331)."""
    return attend(q, as_if_contiguous(k), v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="query that is a dense transposed view, D_v == D")
def output_takes_query_strides(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The output buffer copies the query's strides but is filled in row-major order."""
    out = attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if out.shape == q.shape and not q.is_contiguous() and torch.empty_like(q).stride() == q.stride():
        out = out.contiguous().view(-1).as_strided(q.shape, q.stride())
    return out


@wrong(exact=True, where="values that start inside a larger buffer")
def value_offset_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The storage offset of the values is ignored, so a slice of a fused QKV buffer reads its beginning."""
    if v.storage_offset() and v.numel():
        v = torch.as_strided(v, v.shape, v.stride(), 0)
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="query whose last dimension is strided")
def query_last_stride_taken_for_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last stride of the query is taken to be 1 (facebookresearch/xformers and flash-attention require it)."""
    if q.stride(-1) > 1 and q.size(-1) > 1:
        q = torch.as_strided(q, q.shape, (*q.stride()[:-1], 1), q.storage_offset())
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
