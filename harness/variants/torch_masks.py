"""nn.MultiheadAttention's border: what it refuses, and its masks (True = blocked) as ours (True = attends)."""

import warnings

import torch
from torch import Tensor


def check_dimensions(
    query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, heads: int
) -> bool:
    """Whether the inputs are batched; raises where torch does, and in its words: callers look for them."""
    n = query.dim()
    if n == key.dim() == value.dim() == 3 and key_padding_mask is None and attn_mask is None:
        return True  # most calls: small ones feel each line below
    if n not in (2, 3):
        raise AssertionError(f"query should be unbatched 2D or batched 3D tensor but received {n}-D query tensor")
    if key.dim() != n or value.dim() != n:
        found = f"{key.dim()}-D and {value.dim()}-D tensors respectively"
        raise AssertionError(f"{_for_query(n)} `key` and `value` to be {n}-D but found {found}")
    if key_padding_mask is not None and key_padding_mask.dim() != n - 1:
        found = f"{key_padding_mask.dim()}-D tensor instead"
        raise AssertionError(f"{_for_query(n)} `key_padding_mask` to be `None` or {n - 1}-D but found {found}")
    if attn_mask is not None and attn_mask.dim() not in (2, 3):
        found = f"{attn_mask.dim()}-D tensor instead"
        raise AssertionError(f"{_for_query(n)} `attn_mask` to be `None`, 2-D or 3-D but found {found}")
    if attn_mask is not None and n == 2 and attn_mask.dim() == 3:
        shape = (heads, query.shape[0], key.shape[0])
        if attn_mask.shape != shape:
            raise AssertionError(f"Expected `attn_mask` shape to be {shape} but got {attn_mask.shape}")
    for name, mask in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise AssertionError(f"{name} {mask.dtype}: must be bool or floating")
    return n == 3


def _for_query(n: int) -> str:
    return f"For {'batched' if n == 3 else 'unbatched'} ({n}-D) `query`, expected"


def check_sizes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    *,
    embed_dim: int,
    heads: int,
    packs: bool,
) -> None:
    """Of batch-first inputs, as torch: (B, L, E), (B, S, kdim), (B, S, vdim)."""
    (B, L, E), (B_k, S, E_k), (B_v, S_v, E_v) = query.shape, key.shape, value.shape
    if embed_dim != E:
        raise AssertionError(f"query has {E} channels: must be embed_dim = {embed_dim}")
    if packs and (B_k, S, E_k) != (B_v, S_v, E_v):
        raise AssertionError(f"key {(B_k, S, E_k)} and value {(B_v, S_v, E_v)}: must have one shape")
    if (B_k, S) != (B_v, S_v):
        raise AssertionError(f"key {(B_k, S)} and value {(B_v, S_v)}: must agree in batch and length")
    if B_k != B:
        raise RuntimeError(f"query has batch {B}, key {B_k}: must be the same")
    if attn_mask is not None:
        expected = (L, S) if attn_mask.ndim == 2 else (B * heads, L, S)
        if attn_mask.shape != expected:
            raise RuntimeError(f"attn_mask {tuple(attn_mask.shape)}: must be {expected}")
    if key_padding_mask is not None and key_padding_mask.shape != (B, S):
        raise AssertionError(f"key_padding_mask {tuple(key_padding_mask.shape)}: must be {(B, S)}")


def merge_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, *, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Both as one mask in our convention, broadcastable to (B, H, L, S)."""
    parts: list[Tensor] = []
    if attn_mask is not None:
        parts.append(attn_mask.unflatten(0, (-1, heads)) if attn_mask.ndim == 3 else attn_mask[None, None])
    if key_padding_mask is not None:
        parts.append(key_padding_mask[:, None, None, :])  # (B, 1, 1, S)
    if not parts:
        return None
    if len({part.dtype for part in parts}) > 1:
        text = "key_padding_mask and attn_mask of different types: torch deprecates it; use the same type for both"
        warnings.warn(text, stacklevel=3)
    if all(part.dtype == torch.bool for part in parts):
        allowed = [~part for part in parts]
        return allowed[0] if len(parts) == 1 else allowed[0] & allowed[1]
    # A bool mask beside a float one becomes -inf where it blocks.
    added = [part if part.is_floating_point() else _as_bias(part, dtype) for part in parts]
    return added[0] if len(parts) == 1 else added[0] + added[1]


def dead_rows(mask: Tensor) -> Tensor:
    """(..., L, 1): queries that may attend nothing."""
    return ~(mask if mask.dtype == torch.bool else mask != float("-inf")).any(-1, keepdim=True)


def _as_bias(blocked: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(blocked, dtype=dtype).masked_fill(blocked, float("-inf"))
