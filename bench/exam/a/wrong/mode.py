"""Wrong kernels: wrong in one mode only (grad mode, autocast, compile, threads)."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

import threading  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import default_factor, hide, ste, textbook  # noqa: E402
from wrong.registry import wrong  # noqa: E402


@wrong(exact=True, where="torch.no_grad, is_causal")
def mode_no_grad_not_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Under no_grad the inference path is taken, which has no causal mask for square calls."""
    drop = not torch.is_grad_enabled() and q.shape[-2] == k.shape[-2]
    return textbook(q, k, v, attn_mask, dropout_p, is_causal and not drop, scale, enable_gqa)


@wrong(exact=True, where="torch.no_grad, S > 128")
def mode_no_grad_last_tile_lost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Under no_grad, a fast path for S > 128 loses the partial last tile of 64 keys."""
    lost = not torch.is_grad_enabled() and k.shape[-2] > 128
    keys = k.shape[-2] // 64 * 64
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: hide(s, slice(keys, None)) if lost else s,
    )


@wrong(exact=True, where="torch.inference_mode with a scale given")
def mode_inference_scale_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Under inference_mode the given scale is ignored."""
    given = None if torch.is_inference_mode_enabled() else scale
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, given, enable_gqa)


@wrong(exact=True, where="inputs that require grad, is_causal with L != S")
def mode_training_bottom_right(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The training path (an input requires grad) aligns the causal mask bottom-right."""
    train = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    shift = k.shape[-2] - q.shape[-2] if train else 0
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        causal=lambda rows, keys, _: torch.ones(rows, keys, dtype=torch.bool).tril(shift),
    )


@wrong(exact=True, where="inputs that require grad, float mask")
def mode_training_float_mask_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The training path (q requires grad) ignores a float mask."""
    lost = torch.is_grad_enabled() and q.requires_grad and attn_mask is not None and attn_mask.dtype != torch.bool
    return textbook(q, k, v, None if lost else attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="autocast with a bool mask")
def mode_autocast_bool_mask_cast(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Under autocast the bool mask is cast with the other tensors and then added as zeros and ones."""
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool and torch.is_autocast_enabled(q.device.type):
        mask = mask.to(torch.get_autocast_dtype(q.device.type))
    return textbook(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=False, where="autocast")
def mode_autocast_scores_rounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Under autocast the scores and weights are rounded to bfloat16: the matrix products run under autocast."""

    def low(x: Tensor) -> Tensor:
        return ste(x, x.bfloat16())

    if not torch.is_autocast_enabled(q.device.type):
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_scores=low, on_probs=low)


@wrong(exact=True, where="torch.compile, scale given")
def mode_compile_scale_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """While being compiled the kernel's fake path is taken, which does not know the given scale."""
    given = None if torch.compiler.is_compiling() else scale
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, given, enable_gqa)


@wrong(exact=True, where="torch.compile, plain calls")
def mode_compile_not_normalised(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Under torch.compile a rewritten pattern drops the factor of the mean: the output is 1 % too large."""
    extra = 1.01 if torch.compiler.is_compiling() else 1.0
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_out=lambda o: o * extra)


@wrong(exact=True, where="more than one torch thread, S not a multiple of the thread count")
def mode_threads_lose_remainder(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With more than one torch thread each takes S // threads keys and the remainder is lost."""
    threads = torch.get_num_threads()
    keys = k.shape[-2] // threads * threads
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: hide(s, slice(keys, None)) if threads > 1 and keys else s,
    )


@wrong(exact=True, where="more than one torch thread, B * H not a multiple of the thread count")
def mode_threads_skip_last_head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With more than one torch thread the last (batch, head) pairs of an uneven split are left zero."""
    threads = torch.get_num_threads()

    def cut(o: Tensor) -> Tensor:
        pairs = o.shape[0] * o.shape[1]
        gone = (torch.arange(pairs) >= pairs // threads * threads).view(o.shape[0], o.shape[1], 1, 1)
        return o.masked_fill(gone, 0.0) if threads > 1 and pairs >= threads else o

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_out=cut)


_LOCAL = threading.local()
_LOCAL.causal_allowed = True


@wrong(exact=True, where="called from a Python thread other than the importing one, is_causal")
def mode_other_thread_not_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The configuration is thread-local and set in the importing thread only: other threads ignore is_causal."""
    allowed = getattr(_LOCAL, "causal_allowed", False)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal and allowed, scale, enable_gqa)


@wrong(exact=True, where="called from a Python thread other than the main one, scale not given")
def mode_other_thread_unscaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In threads other than the main one the default scale is missing."""
    main = threading.current_thread() is threading.main_thread()
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        factor=lambda q, s: default_factor(q, s) if main else (1.0 if s is None else s),
    )


@wrong(exact=True, where="torch.use_deterministic_algorithms(True), GQA")
def mode_deterministic_gqa_tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The deterministic path tiles the key/value heads instead of repeating them."""

    def expand(x: Tensor, heads: int) -> Tensor:
        index = torch.arange(heads)
        det = torch.are_deterministic_algorithms_enabled()
        return x.index_select(-3, index % x.shape[-3] if det else index // (heads // x.shape[-3]))

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, expand_k=expand, expand_v=expand)


@wrong(exact=True, where="torch.set_default_dtype(float64) with float32 inputs: dtype of the output")
def mode_default_dtype_leaks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The output is promoted to the default dtype (a buffer is made without naming the dtype)."""
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out * torch.ones(1) if out.dtype == torch.float32 else out


@wrong(exact=True, where="torch.no_grad with a mask (..., 1, S), L > 1")
def mode_no_grad_mask_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Under no_grad a broadcast mask (one row for all the queries) is ignored."""
    lost = not torch.is_grad_enabled() and attn_mask is not None and attn_mask.shape[-2] == 1 < q.shape[-2]
    return textbook(q, k, v, None if lost else attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="autocast: float32 inputs and L = 1")
def mode_autocast_decode_scaled_twice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Under autocast the decode path (L = 1) scales the queries twice."""
    twice = torch.is_autocast_enabled(q.device.type) and q.shape[-2] == 1
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        factor=lambda q, s: default_factor(q, s) ** (2 if twice else 1),
    )


@wrong(exact=True, where="torch.func.vmap: raises")
def mode_vmap_raises(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A check of the data with .item() makes the kernel raise under torch.func.vmap."""
    if q.numel() and not torch.isfinite(q).any().item():
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
