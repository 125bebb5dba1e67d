"""Wrong kernels: grouped query attention."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import Saved, expand_heads, manual, right_rule, textbook  # noqa: E402
from wrong.registry import wrong  # noqa: E402


def _grouped(q: Tensor, k: Tensor, enable_gqa: bool) -> int:
    """The group size, one if the call is not grouped."""
    return q.shape[-3] // k.shape[-3] if enable_gqa and k.shape[-3] else 1


def _pick(x: Tensor, head: Tensor) -> Tensor:
    """One key/value head for every query head."""
    return x.index_select(-3, head.clamp(max=x.shape[-3] - 1))


@wrong(exact=True, where="GQA with 1 < H_kv < H")
def gqa_tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Key/value heads are tiled (0 1 0 1) instead of repeated (0 0 1 1)."""
    kk, vv = (_pick(x, torch.arange(q.shape[-3]) % x.shape[-3]) if enable_gqa else x for x in (k, v))
    return textbook(q, kk, vv, attn_mask, dropout_p, is_causal, scale, False)


@wrong(exact=True, where="GQA with 1 < H_kv < H")
def gqa_values_tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keys are repeated but values are tiled."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        expand_v=lambda x, heads: _pick(x, torch.arange(heads) % x.shape[-3]),
    )


@wrong(exact=True, where="GQA with groups larger than 4")
def gqa_group_over_four(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The group size is capped at 4, so larger groups read the wrong key/value head."""

    def expand(x: Tensor, heads: int) -> Tensor:
        return _pick(x, torch.arange(heads) // min(heads // x.shape[-3], 4))

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, expand_k=expand, expand_v=expand)


@wrong(exact=True, where="GQA with a group size that is not a power of two")
def gqa_group_shifted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The key/value head is found with a bit shift, wrong for groups of 3, 5, 6, 7, ..."""

    def expand(x: Tensor, heads: int) -> Tensor:
        return _pick(x, torch.arange(heads) >> ((heads // x.shape[-3]).bit_length() - 1))

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, expand_k=expand, expand_v=expand)


@wrong(exact=True, where="H_kv = 1 < H with a per-head mask")
def gqa_multi_query_first_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With one key/value head the mask of the first head is used for all the heads."""
    mask = attn_mask
    if enable_gqa and k.shape[-3] == 1 < q.shape[-3] and mask is not None and mask.dim() >= 3:
        mask = mask.narrow(-3, 0, 1)
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="GQA with a per-head mask")
def gqa_mask_by_key_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A per-head mask is indexed with the key/value head instead of the query head."""
    mask, group = attn_mask, _grouped(q, k, enable_gqa)
    if group > 1 and mask is not None and mask.dim() >= 3 and mask.shape[-3] == q.shape[-3]:
        mask = mask.index_select(-3, torch.arange(q.shape[-3]) // group)
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="GQA with a mask")
def gqa_mask_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The grouped path has no mask."""
    mask = None if _grouped(q, k, enable_gqa) > 1 else attn_mask
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="GQA, gradients of k and v")
def gqa_gradient_of_last_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradients of a group are written, not added: only the last query head of the group counts."""
    group = _grouped(q, k, enable_gqa)

    def rule(saved: Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv, db = right_rule(saved, grad)
        last = (torch.arange(grad.shape[-3]) % group == group - 1).to(dk.dtype)[:, None, None]
        return dq, dk * last, dv * last, db

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule if group > 1 else right_rule)


@wrong(exact=True, where="GQA, gradients of k and v")
def gqa_gradient_averaged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The gradients of a group are averaged instead of summed."""
    group = _grouped(q, k, enable_gqa)

    def rule(saved: Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv, db = right_rule(saved, grad)
        return dq, dk / group, dv / group, db

    return manual(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, rule=rule if group > 1 else right_rule)


@wrong(exact=True, where="GQA with H_kv > 8")
def gqa_more_than_eight_key_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The key/value head index wraps at 8."""

    def expand(x: Tensor, heads: int) -> Tensor:
        return _pick(x, torch.arange(heads) // (heads // x.shape[-3]) % 8)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, expand_k=expand, expand_v=expand)


@wrong(exact=True, where="GQA with 1 < H_kv < H, L = 1")
def gqa_decode_tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The decode path (L = 1) tiles the key/value heads instead of repeating them."""

    def expand(x: Tensor, heads: int) -> Tensor:
        return _pick(x, torch.arange(heads) % x.shape[-3]) if q.shape[-2] == 1 else expand_heads(x, heads)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, expand_k=expand, expand_v=expand)


@wrong(exact=True, where="GQA with B > 1: batches after the first")
def gqa_batch_offset_by_query_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The flat (batch, head) index into the keys is computed with H instead of H_kv and wraps."""
    batch, kv = k.shape[0], k.shape[-3]
    if _grouped(q, k, enable_gqa) <= 1:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    head = torch.arange(q.shape[-3]) // (q.shape[-3] // kv)
    flat = (torch.arange(batch)[:, None] * q.shape[-3] + head) % (batch * kv)
    kk, vv = (x.flatten(0, 1)[flat] for x in (k, v))
    return textbook(q, kk, vv, attn_mask, dropout_p, is_causal, scale, False)


@wrong(exact=True, where="GQA with exactly two query heads per group")
def gqa_pair_swapped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With groups of two the outputs of a pair of heads are written in swapped order."""
    pair = _grouped(q, k, enable_gqa) == 2
    order = torch.arange(q.shape[-3]) ^ 1
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_out=lambda o: o.index_select(-3, order) if pair else o,
    )


@wrong(exact=True, where="GQA, H_kv = 3 or another odd number above one")
def gqa_odd_key_heads_rounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Key/value heads are loaded in pairs; the last one of an odd number is read as the one before."""

    def expand(x: Tensor, heads: int) -> Tensor:
        index = torch.arange(heads) // (heads // x.shape[-3])
        kv = x.shape[-3]
        return _pick(x, index.clamp(max=kv - 2) if kv % 2 and kv > 1 else index)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, expand_k=expand, expand_v=expand)


@wrong(exact=True, where="GQA, non-contiguous keys (layout B S H D): raises")
def gqa_view_of_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The grouped path makes (B, H_kv * S, D) of the keys with view(), which raises for the B S H D layout."""
    if _grouped(q, k, enable_gqa) > 1:
        k.view(k.shape[0], k.shape[1] * k.shape[2], k.shape[3])
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
