"""Wrong kernels that remember something between calls or share memory with their caller."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ._base import attend, causal_visible, mask_bias, merge_bias, prepare, solve, untracked, wrong

_CAUSAL: dict[int, Tensor] = {}
_KEYS: dict[str, tuple[tuple[object, ...], Tensor, Tensor]] = {}
_BIASES: dict[tuple[object, ...], Tensor] = {}
_RINGS: dict[tuple[object, ...], list[Tensor]] = {}
_TUNED: set[tuple[object, ...]] = set()


@wrong(exact=True, where="is_causal, same L as before and more keys than then")
def causal_mask_cached_by_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The causal mask is cached by L alone and widened with visible columns when S has grown."""
    if not is_causal:
        return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    x = prepare(q, k, v, attn_mask, False, scale, enable_gqa)
    rows, columns = q.size(-2), k.size(-2)
    visible = _CAUSAL.setdefault(rows, causal_visible(rows, columns))[:, :columns]
    visible = functional.pad(visible, (0, columns - visible.size(1)), value=True)
    x.bias = merge_bias(x.bias, visible).to(x.q.dtype)
    return solve(x, dropout_p)


@wrong(exact=True, where="without grad, keys changed in place since the last call")
def keys_cached_by_address(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Prepared keys are cached by address and shape, so an in-place update of a kv cache goes unseen."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    if untracked(q, k, v, attn_mask) and k.numel():
        name = (k.data_ptr(), k.shape, k.stride(), k.dtype, enable_gqa, q.size(1))
        if "last" not in _KEYS or _KEYS["last"][0] != name:
            _KEYS["last"] = (name, x.k.clone(), k)
        x.k = _KEYS["last"][1]
    return solve(x, dropout_p)


@wrong(exact=True, where="boolean masks of one shape and count that differ from call to call")
def bias_cached_by_shape_and_count(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The bias made of a boolean mask is cached by the mask's shape and number of True."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        name = (attn_mask.shape, q.dtype, int(attn_mask.sum()))
        if name not in _BIASES:
            if len(_BIASES) > 64:
                _BIASES.clear()
            _BIASES[name] = mask_bias(attn_mask, prepare(q, k, v).q.dtype).clone()
        attn_mask = _BIASES[name]
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    return solve(x, dropout_p)


@wrong(exact=True, where="without grad, a result that is kept over four more calls of its shape")
def results_in_a_ring_of_four(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Results live in a ring of four buffers per shape, so the fifth call overwrites the first result."""
    out = attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not untracked(q, k, v, attn_mask) or torch.compiler.is_compiling():
        return out
    name = (out.shape, out.dtype, torch.is_inference_mode_enabled())
    if len(_RINGS) > 64:
        _RINGS.clear()
    ring = _RINGS.setdefault(name, [])
    if len(ring) < 4:
        ring.append(out)
        return out
    ring.append(ring.pop(0).copy_(out))
    return ring[-1]


@wrong(exact=False, where="without grad, the caller's query after the call")
def query_scaled_in_place_and_back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The query is scaled in place and divided back afterwards, which leaves its last bits changed."""
    if not untracked(q, k, v, attn_mask) or not q.is_contiguous() or scale == 0.0:
        return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    factor = max(q.size(-1), 1) ** -0.5 if scale is None else scale
    out = attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    q.mul_(factor).div_(factor)
    return out


@wrong(exact=True, where="one key and no mask")
def single_key_returns_the_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With a single key the values themselves are returned expanded, memory shared with the caller's."""
    if k.size(-2) == 1 and attn_mask is None and dropout_p == 0.0 and not torch.is_autocast_enabled("cpu"):
        if enable_gqa and k.size(1) != q.size(1):
            v = v.repeat_interleave(q.size(1) // v.size(1), 1)
        return v.expand(*q.shape[:-1], v.size(-1))
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="the first call of each shape")
def tuning_run_accumulates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The tuning run of a new shape adds into an output that is not cleared again (triton autotune's reset_to_zero)."""
    out = attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    name = (q.shape, k.shape, v.shape, q.dtype, is_causal)
    if name not in _TUNED:
        _TUNED.add(name)
        out = out + out
    return out
