"""Wrong kernels: many heads, many batches, odd or large head dims."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import textbook  # noqa: E402
from wrong.registry import wrong  # noqa: E402


def _rows_zero(out: Tensor, dim: int, start: int) -> Tensor:
    """The output with everything from start on along dim left zero."""
    place = torch.arange(out.shape[dim])
    shape = [-1 if i == dim % out.dim() else 1 for i in range(out.dim())]
    return out.masked_fill((place >= start).view(shape), 0.0)


@wrong(exact=True, where="H > 16")
def shapes_heads_beyond_16_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The grid covers 16 heads: the output of further heads stays zero."""
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_out=lambda o: _rows_zero(o, -3, 16))


@wrong(exact=True, where="H > 32")
def shapes_heads_wrap_at_32(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The head index of the keys has five bits and wraps at 32."""
    if k.shape[-3] <= 32:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return textbook(
        q, k.index_select(-3, torch.arange(k.shape[-3]) % 32), v, attn_mask, dropout_p, is_causal, scale, enable_gqa
    )


@wrong(exact=True, where="H > 4 and H % 4 != 0")
def shapes_head_tail_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Heads are worked off four at a time; the H % 4 last ones stay zero (H <= 4 has its own path)."""
    heads = q.shape[-3]
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_out=lambda o: _rows_zero(o, -3, heads // 4 * 4) if heads > 4 else o,
    )


@wrong(exact=True, where="odd H > 1")
def shapes_odd_head_reads_neighbour(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Heads are worked off in pairs; the last one of an odd number uses the values of the head before."""
    heads = v.shape[-3]
    if heads % 2 == 0 or heads == 1:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    order = torch.arange(heads).clamp(max=heads - 2)
    return textbook(q, k, v.index_select(-3, order), attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="B > 2")
def shapes_batch_beyond_two(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """From the third batch on the keys of the second batch are read."""
    kk = k.index_select(0, torch.arange(k.shape[0]).clamp(max=1))
    return textbook(q, kk, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="B >= 4")
def shapes_fourth_batch_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The fourth and later batches are not computed."""
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_out=lambda o: _rows_zero(o, 0, 3))


@wrong(exact=True, where="odd B > 1")
def shapes_odd_batch_tail_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Batches are worked off in pairs; the last of an odd number stays zero."""
    batch = q.shape[0]
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_out=lambda o: _rows_zero(o, 0, batch // 2 * 2) if batch > 1 else o,
    )


@wrong(exact=True, where="B * H > 64")
def shapes_grid_beyond_64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The flat (batch, head) index is clamped to 64 programs: later ones repeat the 64th."""
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if out.shape[0] * out.shape[1] <= 64:
        return out
    flat = out.flatten(0, 1)
    return flat.index_select(0, torch.arange(flat.shape[0]).clamp(max=63)).view(out.shape)


@wrong(exact=True, where="B * H > 65535")
def shapes_grid_limit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The grid's second dimension ends at 65535: later (batch, head) pairs stay zero."""
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if out.shape[0] * out.shape[1] <= 65535:
        return out
    return _rows_zero(out.flatten(0, 1), 0, 65535).view(out.shape)


@wrong(exact=True, where="odd D > 1")
def shapes_odd_dim_cut(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Components are loaded in pairs: the last one of an odd head dim is not in the scores."""
    dim = q.shape[-1]
    cut = dim if dim < 2 else dim // 2 * 2
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        qk=lambda a, b: a[..., :cut] @ b[..., :cut].transpose(-2, -1),
    )


@wrong(exact=True, where="D > 128")
def shapes_dim_beyond_128_cut(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Only the first 128 components are in the scores."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        qk=lambda a, b: a[..., :128] @ b[..., :128].transpose(-2, -1),
    )


@wrong(exact=True, where="D = 96")
def shapes_dim_96_overlaps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A head dim of 96 is worked off as two overlapping chunks of 64: components 32 to 63 count twice."""

    def qk(a: Tensor, b: Tensor) -> Tensor:
        s = a @ b.transpose(-2, -1)
        return s + a[..., 32:64] @ b[..., 32:64].transpose(-2, -1) if a.shape[-1] == 96 else s

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, qk=qk)


@wrong(exact=True, where="D_v > D")
def shapes_wide_values_cut(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The output has the head dim of the queries in mind: columns past D stay zero when D_v > D."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_out=lambda o: _rows_zero(o, -1, q.shape[-1])
    )


@wrong(exact=True, where="D_v < D: shape of the output")
def shapes_narrow_values_padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The output has the shape of the queries: when D_v < D zero columns are appended."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_out=lambda o: F.pad(o, (0, max(q.shape[-1] - o.shape[-1], 0))),
    )


@wrong(exact=True, where="D_v % 8 != 0: shape of the output")
def shapes_padded_dim_not_cropped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Values are padded to a multiple of 8 columns and the padding is not cropped from the output."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_out=lambda o: F.pad(o, (0, -o.shape[-1] % 8))
    )


@wrong(exact=True, where="D_v > 8 and D_v % 8 != 0")
def shapes_value_tail_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Output columns are written in vectors of 8; the D_v % 8 last ones stay zero."""
    wide = v.shape[-1]
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_out=lambda o: _rows_zero(o, -1, wide // 8 * 8) if wide > 8 else o,
    )


@wrong(exact=True, where="H > 1 and L > 1")
def shapes_output_not_transposed_back(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The output is computed as (B, L, H, D) and its memory is returned as (B, H, L, D)."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_out=lambda o: o.transpose(1, 2).reshape(o.shape)
    )


@wrong(exact=True, where="D_v > 256")
def shapes_values_beyond_256_not_normalised(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Value columns past 256 are left without the division by the row sum."""
    if v.shape[-1] <= 256 or not k.shape[-2]:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    total: list[Tensor] = []

    def note(s: Tensor) -> Tensor:
        top = s.detach().amax(-1, keepdim=True)
        total.append(torch.exp(s - top.masked_fill(top.isinf(), 0.0)).sum(-1, keepdim=True))
        return s

    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=note,
        on_out=lambda o: torch.cat([o[..., :256], o[..., 256:] * total[0]], -1),
    )


@wrong(exact=True, where="B = 1: shape of the output")
def shapes_batch_of_one_squeezed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A batch of one is squeezed away: the output has three dims."""
    out = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out.squeeze(0) if out.shape[0] == 1 and out.dim() == 4 else out


@wrong(exact=True, where="H = L > 1")
def shapes_layout_guessed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """When H = L the layout is taken for (B, L, H, D) and the two dims are swapped."""
    if 1 < q.shape[1] == q.shape[2] == k.shape[1] == k.shape[2] and attn_mask is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="D = 80 or 112: D % 32 == 16")
def shapes_dim_half_warp_twice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A head dim with D % 32 == 16 is loaded in chunks of 32, the last one moved back: 16 components count twice."""

    def qk(a: Tensor, b: Tensor) -> Tensor:
        s, dim = a @ b.transpose(-2, -1), a.shape[-1]
        if dim > 32 and dim % 32 == 16:
            s = s + a[..., dim - 32 : dim - 16] @ b[..., dim - 32 : dim - 16].transpose(-2, -1)
        return s

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, qk=qk)


@wrong(exact=True, where="D = 256")
def shapes_dim_256_half_read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A head dim of exactly 256 overflows an unsigned byte: components 255 and up are not in the scores."""
    cut = 255 if q.shape[-1] == 256 else q.shape[-1]
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        qk=lambda a, b: a[..., :cut] @ b[..., :cut].transpose(-2, -1),
    )


@wrong(exact=True, where="D < 16")
def shapes_small_dim_doubled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A head dim below 16 is padded by wrapping around instead of with zeros."""

    def qk(a: Tensor, b: Tensor) -> Tensor:
        dim = a.shape[-1]
        index = torch.arange(16) % dim if 0 < dim < 16 else torch.arange(dim)
        return a.index_select(-1, index) @ b.index_select(-1, index).transpose(-2, -1)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, qk=qk)


@wrong(exact=True, where="B > 1 with a different k batch stride: k expanded over the batch (stride 0)")
def shapes_expanded_batch_rolls(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keys expanded over the batch (stride 0) are indexed with the strides of the values."""
    if k.shape[0] > 1 and k.stride(0) == 0 and k.shape[-2] > 1:
        shift = torch.arange(k.shape[0]).view(-1, 1, 1, 1)
        place = (torch.arange(k.shape[-2]).view(1, 1, -1, 1) + shift) % k.shape[-2]
        return textbook(q, k.gather(-2, place.expand(k.shape)), v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
