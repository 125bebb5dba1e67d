"""Wrong kernels: writes where they must not, reads what is not theirs, layouts."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import default_factor, safe_softmax, textbook  # noqa: E402
from wrong.registry import wrong  # noqa: E402


def _plain(*tensors: Tensor | None) -> bool:
    """Whether no gradient is wanted (the paths in place are inference paths)."""
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))


def _rows_available(x: Tensor, rows: int) -> bool:
    """Whether the storage under the view x has room for that many rows in each (batch, head)."""
    last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape[:-2], x.stride()[:-2], strict=True))
    last += (rows - 1) * x.stride(-2) + (x.shape[-1] - 1) * x.stride(-1)
    return x.numel() > 0 and (last + 1) * x.element_size() <= x.untyped_storage().nbytes()


def _contiguous_stride(x: Tensor) -> tuple[int, ...]:
    """The strides x would have if it were contiguous."""
    return torch.empty(x.shape, device="meta").stride()


def _fits(x: Tensor, stride: tuple[int, ...], offset: int) -> bool:
    """Whether x read with other strides stays inside of its storage."""
    last = offset + sum((n - 1) * s for n, s in zip(x.shape, stride, strict=True))
    return x.numel() > 0 and (last + 1) * x.element_size() <= x.untyped_storage().nbytes()


def _reread(x: Tensor, stride: tuple[int, ...], offset: int | None = None) -> Tensor:
    """x read with other strides, if that stays inside of the storage."""
    offset = x.storage_offset() if offset is None else offset
    return x.as_strided(x.shape, stride, offset) if _fits(x, stride, offset) else x


@wrong(exact=True, where="q after the call (no grad wanted)")
def memory_query_scaled_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The queries are scaled in place and not restored."""
    if not _plain(q, k, v, attn_mask):
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    q.mul_(default_factor(q, scale))
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, 1.0, enable_gqa)


@wrong(exact=True, where="last bits of q after the call (no grad wanted, D not a power of four)")
def memory_query_scaled_and_restored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The queries are scaled in place and divided again afterwards, which does not give back the same bits."""
    factor = default_factor(q, scale)
    if not _plain(q, k, v, attn_mask) or q.dtype not in (torch.float32, torch.float64) or not 1e-3 < factor < 1e3:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    q.mul_(factor)
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, 1.0, enable_gqa)
    q.div_(factor)
    return out


@wrong(exact=True, where="float mask after the call")
def memory_mask_overwritten(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The -inf entries of a float mask are replaced in place by finfo.min."""
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and attn_mask.dtype != torch.bool and not attn_mask.requires_grad:
        attn_mask.clamp_(min=torch.finfo(attn_mask.dtype).min)
    return out


@wrong(exact=True, where="bool mask after the call")
def memory_bool_mask_inverted_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A bool mask is inverted in place and stays so."""
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool and all(s for s in attn_mask.stride()):
        attn_mask.logical_not_()
    return out


@wrong(exact=True, where="memory behind a slice of a larger key cache, S % 16 != 0")
def memory_zeroes_behind_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keys that are a slice of a larger cache are padded with zeros in place: the cache behind them is erased."""
    room = -(-k.shape[-2] // 16) * 16
    if _plain(k) and k.shape[-2] and room > k.shape[-2] and _rows_available(k, room):
        wide = k.as_strided((*k.shape[:-2], room, k.shape[-1]), k.stride(), k.storage_offset())
        if k.stride(1) >= room * k.stride(2) or k.stride(2) > k.stride(1):
            with torch.no_grad():
                wide[..., k.shape[-2] :, :] = 0
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="keys and values that are slices of a larger cache, S % 16 != 0, no mask")
def memory_reads_behind_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last tile of 16 keys is read in full when the cache behind the slice has room, and counts."""
    room = -(-k.shape[-2] // 16) * 16
    wide = room > k.shape[-2] > 0 and attn_mask is None and not is_causal and _plain(q, k, v)
    if not wide or not (_rows_available(k, room) and _rows_available(v, room)):
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if k.stride(1) < room * k.stride(2) and k.stride(2) < k.stride(1):
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    kk, vv = (x.as_strided((*x.shape[:-2], room, x.shape[-1]), x.stride(), x.storage_offset()) for x in (k, v))
    return textbook(q, kk, vv, None, dropout_p, False, scale, enable_gqa)


@wrong(exact=True, where="transposed q (layout B L H D)")
def memory_query_assumed_contiguous(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The queries are read as if they were contiguous."""
    return textbook(_reread(q, _contiguous_stride(q)), k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="k or v in another layout than q")
def memory_keys_use_query_strides(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keys and values of the shape of q are read with the strides of q."""
    kk, vv = (_reread(x, q.stride()) if x.shape == q.shape else x for x in (k, v))
    return textbook(q, kk, vv, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="v in another layout than k")
def memory_values_use_key_strides(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Values of the shape of k are read with the strides of k."""
    vv = _reread(v, k.stride()) if v.shape == k.shape else v
    return textbook(q, k, vv, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="q, k or v whose last dim is not dense (stride != 1)")
def memory_last_dim_assumed_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The last dim is read with a stride of one."""
    qq, kk, vv = (_reread(x, (*x.stride()[:-1], 1)) for x in (q, k, v))
    return textbook(qq, kk, vv, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="k that is a view with a storage offset")
def memory_storage_offset_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The keys are read from the start of their storage: the offset of the view is ignored."""
    return textbook(q, _reread(k, k.stride(), 0), v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="S = 1, no mask: the output shares memory with v")
def memory_single_key_returns_view(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With one key an expanded view of v is returned: a later write to v changes the output."""
    if k.shape[-2] == 1 and attn_mask is None and dropout_p == 0 and _plain(q, k, v) and v.shape[-3] == q.shape[-3]:
        return v.expand(*q.shape[:-1], v.shape[-1])
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="q after the call (no grad wanted, D_v = D)")
def memory_output_written_into_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The output is written into the memory of q when it has the same shape."""
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not _plain(q, k, v, attn_mask) or out.shape != q.shape or out.dtype != q.dtype:
        return out
    return q.copy_(out)


@wrong(exact=True, where="non-contiguous inputs (layout B L H D): raises")
def memory_view_raises(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """view(-1, L, D) raises for inputs that are not contiguous."""
    for x in (q, k, v):
        x.view(x.shape[0] * x.shape[1], x.shape[2], x.shape[3])
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="L > 1, all queries equal after a broadcast (stride 0 in L): output overlaps itself")
def memory_output_overlaps_itself(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """For queries expanded over L one row is computed and the output is an expanded view of it."""
    spread = q.shape[-2] > 1 and q.stride(-2) == 0 and attn_mask is None and not is_causal and dropout_p == 0
    if not spread:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    out = textbook(q[..., :1, :], k, v, None, 0.0, False, scale, enable_gqa)
    return out.expand(*q.shape[:-1], v.shape[-1])


@wrong(exact=True, where="v after the call: masked keys (bool key padding mask, no grad wanted)")
def memory_masked_values_zeroed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Values of keys that a padding mask hides are set to zero in place in the caller's tensor."""
    pad = attn_mask is not None and attn_mask.dtype == torch.bool and attn_mask.dim() == 4 and attn_mask.shape[-2] == 1
    if pad and _plain(v) and attn_mask.shape[1] == 1:
        v.masked_fill_(~attn_mask.transpose(-2, -1), 0.0)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="k after the call, keys above 100")
def memory_keys_clamped_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keys are clamped in place to [-100, 100] before the product, in the caller's tensor."""
    if _plain(k) and all(k.stride()):
        k.clamp_(-100.0, 100.0)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="k sliced from a longer cache, H > 1")
def memory_head_stride_from_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The head stride of the keys is taken as S * D, wrong for a slice of a longer cache."""
    step = k.shape[-2] * k.shape[-1]
    stride = (k.stride(0), step, k.stride(2), k.stride(3))
    return textbook(q, _reread(k, stride), v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="bool mask that hides everything: q after the call")
def memory_dead_call_returns_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """When every key is masked the kernel returns early with a view of the (zeroed) query memory."""
    dead = attn_mask is not None and attn_mask.dtype == torch.bool and not bool(attn_mask.any())
    if dead and _plain(q, k, v) and v.shape[-1] == q.shape[-1] and all(q.stride()):
        return q.zero_()
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="q, k, v that are views of one packed tensor (B, L, 3, H, D), no grad wanted")
def memory_packed_values_overwritten(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """For packed q, k, v (one storage) the output is written over the values."""
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    one = q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    if one and _plain(q, k, v) and out.shape == v.shape and q.data_ptr() != v.data_ptr():
        v.copy_(out)
    return out


@wrong(exact=True, where="last bits of a float mask after the call")
def memory_mask_scaled_and_restored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A float mask is scaled in place with log2(e) and divided again, which changes its last bits."""
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.float32 and all(attn_mask.stride()) and _plain(attn_mask):
        attn_mask.mul_(1.4426950408889634).div_(1.4426950408889634)
    return out


@wrong(exact=True, where="memory behind the rows of q when q is a slice in D")
def memory_row_statistics_behind_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The row maxima are stored in the float right behind each query row when q is a slice in D of a wider tensor."""
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=safe_softmax)
    wide = q.numel() > 0 and q.stride(-1) == 1 and q.stride(-2) > q.shape[-1] and _plain(q)
    stride = (*q.stride()[:-1], 1)
    if wide and _fits(q, stride, q.storage_offset() + 1):
        with torch.no_grad():
            q.as_strided((*q.shape[:-1], 1), stride, q.storage_offset() + q.shape[-1]).fill_(out.abs().max().item())
    return out
