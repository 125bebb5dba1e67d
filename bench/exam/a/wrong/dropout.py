"""Wrong kernels: dropout."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import INF, Saved, manual, safe_softmax, score_grad, textbook  # noqa: E402
from wrong.registry import wrong  # noqa: E402


def _keep(shape: torch.Size | tuple[int, ...], p: float, generator: torch.Generator | None = None) -> Tensor:
    """A random mask, True with probability 1 - p."""
    return torch.rand(shape, generator=generator) >= p


@wrong(exact=True, where="dropout_p > 0")
def dropout_not_scaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Kept weights are not divided by 1 - p."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, drop=lambda p, rate: p * _keep(p.shape, rate)
    )


@wrong(exact=True, where="dropout_p > 0, not 0.5")
def dropout_divided_by_p(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Kept weights are divided by p instead of 1 - p."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        drop=lambda p, rate: p * _keep(p.shape, rate) / rate,
    )


@wrong(exact=True, where="dropout_p > 0")
def dropout_scaled_twice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Kept weights are divided by 1 - p twice."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        drop=lambda p, rate: F.dropout(p, rate) / max(1 - rate, 1e-6),
    )


@wrong(exact=True, where="dropout_p > 0")
def dropout_ignored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """dropout_p is ignored."""
    return textbook(q, k, v, attn_mask, 0.0, is_causal, scale, enable_gqa)


@wrong(exact=True, where="dropout_p > 0, under no_grad")
def dropout_ignored_without_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """dropout_p is ignored under no_grad (taken for evaluation)."""
    return textbook(q, k, v, attn_mask, dropout_p if torch.is_grad_enabled() else 0.0, is_causal, scale, enable_gqa)


@wrong(exact=True, where="dropout_p > 0")
def dropout_before_softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scores are dropped before the softmax, so that the weights still sum to one."""

    def cut(s: Tensor) -> Tensor:
        return s.masked_fill(~_keep(s.shape, dropout_p), -INF) if dropout_p > 0 else s

    return textbook(q, k, v, attn_mask, 0.0, is_causal, scale, enable_gqa, on_biased=cut)


@wrong(exact=True, where="dropout_p > 0")
def dropout_normalised_again(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """After the dropout the weights are normalised to one again."""

    def drop(p: Tensor, rate: float) -> Tensor:
        kept = p * _keep(p.shape, rate)
        total = kept.sum(-1, keepdim=True)
        return kept / total.masked_fill(total == 0, 1.0)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, drop=drop)


@wrong(exact=True, where="dropout_p > 0")
def dropout_on_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Dropout is applied to the output instead of the weights."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        drop=lambda p, _: p,
        on_out=lambda o: F.dropout(o, dropout_p) if dropout_p > 0 else o,
    )


@wrong(exact=True, where="dropout_p > 0, H > 1")
def dropout_same_for_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One dropout mask is used for all the heads."""

    def drop(p: Tensor, rate: float) -> Tensor:
        return p * F.dropout(torch.ones_like(p[..., :1, :, :]), rate)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, drop=drop)


@wrong(exact=True, where="dropout_p > 0, B > 1")
def dropout_same_for_batches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One dropout mask is used for all the batches."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        drop=lambda p, rate: p * F.dropout(torch.ones_like(p[:1]), rate),
    )


@wrong(exact=True, where="dropout_p > 0, L > 1")
def dropout_same_for_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Whole keys are dropped, the same ones for all the queries."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        drop=lambda p, rate: p * F.dropout(torch.ones_like(p[..., :1, :]), rate),
    )


@wrong(exact=True, where="dropout_p > 0, S > 64")
def dropout_same_for_key_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The dropout pattern of the first tile of 64 keys is used for every tile."""

    def drop(p: Tensor, rate: float) -> Tensor:
        pattern = F.dropout(torch.ones_like(p[..., :64]), rate)
        return p * pattern.index_select(-1, torch.arange(p.shape[-1]) % 64)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, drop=drop)


@wrong(exact=True, where="dropout_p > 0: global generator after the call")
def dropout_resets_global_seed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel seeds the global generator with a constant to make its dropout reproducible."""

    def drop(p: Tensor, rate: float) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(p, rate)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, drop=drop)


@wrong(exact=True, where="dropout_p > 0: two calls, or two seeds")
def dropout_constant_pattern(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The dropout mask comes from an own generator with a fixed seed: every call drops the same weights."""

    def drop(p: Tensor, rate: float) -> Tensor:
        keep = _keep(p.shape, rate, torch.Generator().manual_seed(1234))
        return p * keep / (1 - rate) if rate < 1 else p * 0.0

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, drop=drop)


@wrong(exact=True, where="dropout_p > 0, not 0.5")
def dropout_keeps_p(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Weights are kept with probability p instead of 1 - p (and divided by p)."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, drop=lambda p, rate: F.dropout(p, 1 - rate)
    )


@wrong(exact=True, where="dropout_p = 1")
def dropout_of_one_nan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """dropout_p = 1 divides zero by zero and gives NaN instead of zeros."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        drop=lambda p, rate: p * _keep(p.shape, rate) / torch.tensor(1 - rate),
    )


@wrong(exact=True, where="0 < dropout_p < 1/16, or p not a multiple of 1/16")
def dropout_rate_in_four_bits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The dropout rate is rounded down to a multiple of 1/16, the division by 1 - p is not."""

    def drop(p: Tensor, rate: float) -> Tensor:
        return p * _keep(p.shape, int(rate * 16) / 16) / max(1 - rate, 1e-6)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, drop=drop)


@wrong(exact=True, where="dropout_p > 0: gradients")
def dropout_backward_draws_again(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The backward pass draws a new dropout mask instead of the one of the forward pass."""
    if dropout_p <= 0 or dropout_p >= 1 or attn_mask is not None or is_causal:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def rule(saved: Saved, grad: Tensor) -> tuple[Tensor | None, ...]:
        p = saved.probs()
        drop = _keep(p.shape, dropout_p) / (1 - dropout_p)
        ds = score_grad(p, grad @ saved.v.transpose(-2, -1) * drop)
        dv = (p * drop).transpose(-2, -1) @ grad
        return ds @ saved.k * saved.factor, ds.transpose(-2, -1) @ saved.q * saved.factor, dv, ds

    smooth = manual(q, k, v, None, 0.0, False, scale, enable_gqa, rule=rule)
    with torch.no_grad():
        dropped = textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return smooth + (dropped - smooth).detach()


@wrong(exact=True, where="dropout_p > 0 with a mask")
def dropout_ignored_with_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """With a mask the path without dropout is taken."""
    rate = dropout_p if attn_mask is None else 0.0
    return textbook(q, k, v, attn_mask, rate, is_causal, scale, enable_gqa)


@wrong(exact=True, where="dropout_p > 0, first row of keys: diagonal never dropped")
def dropout_spares_first_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The first key is never dropped (its random number is always the initial state)."""

    def drop(p: Tensor, rate: float) -> Tensor:
        keep = _keep(p.shape, rate) | (torch.arange(p.shape[-1]) == 0)
        return p * keep / max(1 - rate, 1e-6)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, drop=drop)


@wrong(exact=True, where="dropout_p > 0, softmax denominators")
def dropout_in_row_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The row sum is taken over the kept weights and divided by 1 - p, so kept weights are not scaled up right."""

    def drop(p: Tensor, rate: float) -> Tensor:
        kept = F.dropout(p, rate)
        total = kept.sum(-1, keepdim=True)
        return torch.where(total > 1, kept / total.clamp(min=1e-6), kept)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=safe_softmax, drop=drop)
