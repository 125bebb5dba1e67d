"""Wrong kernels: the scale of the scores."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

import math  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import INF, additive, default_factor, textbook, tiled  # noqa: E402
from wrong.registry import wrong  # noqa: E402


@wrong(exact=True, where="every call, 1 % of the scores")
def scale_one_percent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The scale is 1 % too large (a tuned constant left in)."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, factor=lambda q, s: 1.01 * default_factor(q, s)
    )


@wrong(exact=True, where="every call, 0.1 % of the scores")
def scale_one_permille(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The scale is 0.1 % too small."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, factor=lambda q, s: 0.999 * default_factor(q, s)
    )


@wrong(exact=True, where="scale given")
def scale_given_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A scale that is given is ignored; 1/sqrt(D) is always used."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, factor=lambda q, _: default_factor(q, None)
    )


@wrong(exact=True, where="scale given")
def scale_given_on_top(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A scale that is given multiplies 1/sqrt(D) instead of taking its place."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        factor=lambda q, s: default_factor(q, None) * (1.0 if s is None else s),
    )


@wrong(exact=True, where="scale not given")
def scale_default_missing(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Without a scale the scores are not scaled at all."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, factor=lambda _, s: 1.0 if s is None else s
    )


@wrong(exact=True, where="scale not given")
def scale_default_inverse_dim(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The default scale is 1/D (muP style) instead of 1/sqrt(D)."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        factor=lambda q, s: 1.0 / q.shape[-1] if s is None else s,
    )


@wrong(exact=True, where="D_v != D, scale not given")
def scale_from_value_dim(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The default scale comes from the head dim of the values."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, factor=lambda q, s: default_factor(v, s)
    )


@wrong(exact=True, where="D % 8 != 0, scale not given")
def scale_from_padded_dim(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The default scale comes from the head dim padded to a multiple of 8."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        factor=lambda q, s: 1.0 / math.sqrt(-(-q.shape[-1] // 8) * 8) if s is None else s,
    )


@wrong(exact=True, where="D = 96, 80: not a power of two; scale not given")
def scale_from_power_of_two_dim(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The default scale comes from the head dim rounded up to a power of two."""

    def factor(q: Tensor, s: float | None) -> float:
        return 1.0 / math.sqrt(1 << (q.shape[-1] - 1).bit_length()) if s is None else s

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, factor=factor)


@wrong(exact=True, where="scale = 0.0 given")
def scale_zero_is_default(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scale or default`: a scale of zero is read as not given."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, factor=lambda q, s: s or default_factor(q, None)
    )


@wrong(exact=True, where="scale < 0 given")
def scale_negative_made_positive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The scale is folded as sqrt(scale^2) into q and k, so a negative scale loses its sign."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        factor=lambda q, s: math.sqrt(default_factor(q, s) ** 2),
    )


@wrong(exact=False, where="scale < 0 given and scores of some size")
def scale_negative_overflows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The row maximum is taken of the unscaled scores, so with a negative scale the exponent overflows."""
    factor = default_factor(q, scale)

    def softmax(s: Tensor) -> Tensor:
        if s.shape[-1] == 0:
            return s
        live = s.detach() if factor >= 0 else s.detach().masked_fill(s == -INF, INF)
        top = live.amax(-1, keepdim=True) if factor >= 0 else live.amin(-1, keepdim=True)
        top = top.masked_fill(top.isinf(), 0.0)
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        return p / total.masked_fill(total == 0, 1.0)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(exact=True, where="is_causal")
def scale_twice_when_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The causal path scales the queries and then the scores once more."""

    def factor(q: Tensor, s: float | None) -> float:
        return default_factor(q, s) ** (2 if is_causal else 1)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, factor=factor)


@wrong(exact=True, where="D > 128, scale not given")
def scale_dim_capped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The default scale is computed from min(D, 128)."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        factor=lambda q, s: 1.0 / math.sqrt(min(q.shape[-1], 128)) if s is None else s,
    )


@wrong(exact=True, where="float mask")
def scale_on_float_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The float mask is added before the scaling, so that it is scaled as well."""
    factor = default_factor(q, scale)
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        masking=lambda m, s: additive(m, s) * (1.0 if m.dtype == torch.bool else factor),
    )


@wrong(exact=True, where="D not a square number, scale not given")
def scale_integer_root(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The default scale is 1/isqrt(D): the root is an integer."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        factor=lambda q, s: 1.0 / math.isqrt(q.shape[-1]) if s is None else s,
    )


@wrong(exact=False, where="D not a power of four, or a scale given")
def scale_rounded_to_bf16(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The scale is kept in bfloat16."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        factor=lambda q, s: torch.tensor(default_factor(q, s)).bfloat16().item(),
    )


@wrong(exact=True, where="L = 1 with a scale given")
def scale_given_ignored_in_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The decode path (one query) does not pass the given scale on."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        factor=lambda q, s: default_factor(q, None if q.shape[-2] == 1 else s),
    )


@wrong(exact=True, where="odd D, scale not given")
def scale_odd_dim_rounded_down(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The default scale of an odd head dim D is that of D - 1 (D is stored as pairs)."""

    def factor(q: Tensor, s: float | None) -> float:
        return 1.0 / math.sqrt(max(q.shape[-1] // 2 * 2, 1)) if s is None else s

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, factor=factor)


@wrong(exact=True, where="every call, 0.2 % of the exponent")
def scale_short_log2e(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The exponential is exp2(1.44 x): log2(e) is written with too few digits."""

    def softmax(s: Tensor) -> Tensor:
        if s.shape[-1] == 0:
            return s
        top = s.detach().amax(-1, keepdim=True)
        p = torch.exp2((s - top.masked_fill(top == -INF, 0.0)) * 1.44)
        total = p.sum(-1, keepdim=True)
        return p / total.masked_fill(total == 0, 1.0)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(exact=True, where="scale > 1 given")
def scale_clamped_to_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A scale above one is clamped to one."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, factor=lambda q, s: min(default_factor(q, s), 1.0)
    )


@wrong(exact=True, where="enable_gqa with a scale given, tiled path S > 64")
def scale_given_ignored_in_gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The grouped path for S > 64 does not pass the given scale on."""
    if enable_gqa and k.shape[-3] != q.shape[-3] and k.shape[-2] > 64:
        return tiled(q, k, v, attn_mask, dropout_p, is_causal, None, enable_gqa)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
