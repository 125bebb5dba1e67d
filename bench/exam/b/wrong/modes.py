"""Wrong kernels that take another path in some mode of PyTorch."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from ._base import attend, default_scale, finish, normalise, prepare, scores, solve, untracked, wrong

_SETTINGS = threading.local()
_SETTINGS.scaled = True
_WORKSPACE: dict[tuple[object, ...], Tensor] = {}


@wrong(exact=False, where="torch.inference_mode with float32")
def keys_rounded_in_inference_mode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In inference mode a float32 key goes through bfloat16, a fast path meant for serving."""
    if torch.is_inference_mode_enabled() and k.dtype == torch.float32:
        k = k.bfloat16().float()
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="torch.no_grad with a finite float mask")
def float_mask_made_boolean_without_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Without grad the fast path turns a float mask into a boolean one, as nn.MultiheadAttention's did once."""
    if not torch.is_grad_enabled() and attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask > -1e4
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=False, where="torch.autocast, scores of some tens")
def autocast_lowers_the_inner_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Under autocast the float32 product inside is lowered again, so the scores are rounded to bfloat16."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    s = (x.q @ x.k.mT).to(x.q.dtype) * x.scale
    return finish(x, normalise(s if x.bias is None else s + x.bias), dropout_p)


@wrong(exact=True, where="torch.compile with an explicit scale")
def compiled_path_ignores_scale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """While compiling, the decomposition always uses the default scale."""
    if torch.compiler.is_compiling():
        scale = None
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="several threads at once without grad")
def workspace_shared_between_threads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Threads share one scratch buffer for the scores (flashinfer#2710, #4481)."""
    x = prepare(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    if not untracked(q, k, v, attn_mask) or torch.compiler.is_compiling():
        return solve(x, dropout_p)
    shape = (*x.q.shape[:-1], x.k.size(-2))
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        key = (shape, x.q.dtype, torch.is_inference_mode_enabled())
        if key not in _WORKSPACE:
            _WORKSPACE.clear()
            _WORKSPACE[key] = torch.empty(shape, dtype=x.q.dtype)
        buffer = _WORKSPACE[key]
        torch.matmul(x.q, x.k.mT, out=buffer)
        buffer.mul_(x.scale)
        if x.bias is not None:
            buffer.add_(x.bias)
        return finish(x, normalise(buffer), dropout_p)


@wrong(exact=True, where="any thread but the one that imported the module")
def setting_local_to_the_first_thread(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A thread-local setting made at import is missing in other threads, which then do not scale by default."""
    if scale is None and not getattr(_SETTINGS, "scaled", False):
        scale = 1.0
    return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="more than one intra-op thread, rows not divisible by it")
def rows_left_over_by_the_threads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Rows are dealt evenly to the intra-op threads and the remainder is dropped (cf. pytorch/pytorch#176091)."""
    x = prepare(q, k, v, attn_mask, is_causal, default_scale(q) if scale is None else scale, enable_gqa)
    out = finish(x, normalise(scores(x)), dropout_p)
    rows, threads = out[..., 0].numel() if out.size(-1) else 0, torch.get_num_threads()
    if rows > threads > 1:
        dealt = torch.arange(rows).view(*out.shape[:-1], 1) < rows // threads * threads
        out = torch.where(dealt, out, torch.zeros_like(out))
    return out
