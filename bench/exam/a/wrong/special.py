"""Wrong kernels: ties, special values, empty inputs, silent approximations, non-determinism."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

import time  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import INF, hide, safe_softmax, ste, textbook  # noqa: E402
from wrong.registry import wrong  # noqa: E402


@wrong(exact=True, where="rows of q that are all zero")
def special_zero_query_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A query of zeros is taken for padding: its output is zero instead of the mean of the values."""
    dead = (q == 0).all(-1, keepdim=True) if q.shape[-1] else torch.zeros(1, dtype=torch.bool)
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_out=lambda o: o.masked_fill(dead, 0.0)
    )


@wrong(exact=True, where="keys that are all zero")
def special_zero_key_skipped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A key of zeros is taken for padding and skipped."""
    gone = (k == 0).all(-1) if k.shape[-1] else torch.zeros(k.shape[:-1], dtype=torch.bool)
    if enable_gqa:
        gone = gone.repeat_interleave(q.shape[-3] // k.shape[-3], -2)
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: s.masked_fill(gone.unsqueeze(-2), -INF),
    )


@wrong(exact=True, where="neighbouring keys that are equal")
def special_equal_keys_merged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A key equal to the one before it is merged with it and counts once."""
    gone = torch.zeros(k.shape[:-1], dtype=torch.bool)
    if k.shape[-2] > 1:
        gone[..., 1:] = (k[..., 1:, :] == k[..., :-1, :]).all(-1)
    if enable_gqa:
        gone = gone.repeat_interleave(q.shape[-3] // k.shape[-3], -2)
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: s.masked_fill(gone.unsqueeze(-2), -INF),
    )


@wrong(exact=True, where="NaN in an attended input")
def special_nan_hidden(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """NaN in the output is replaced by zero: broken inputs go unnoticed."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_out=lambda o: torch.where(o.isnan(), torch.zeros_like(o), o),
    )


@wrong(exact=True, where="inf in an attended value")
def special_inf_value_clamped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Infinite values are clamped to the largest finite number."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_out=lambda o: torch.nan_to_num(o, nan=float("nan")),
    )


@wrong(exact=True, where="NaN in an attended key or in q")
def special_nan_scores_as_minus_inf(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """NaN scores are taken as -inf: a NaN key is skipped without notice."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_scores=lambda s: s.masked_fill(s.isnan(), -INF)
    )


@wrong(exact=True, where="S = 0")
def special_no_keys_nan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Without any keys the output is NaN instead of zero."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_out=lambda o: o / torch.zeros_like(o) if k.shape[-2] == 0 else o,
    )


@wrong(exact=True, where="L = 0: raises")
def special_no_queries_raises(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Without any queries the grid is empty and the launch raises."""
    if q.shape[-2] == 0:
        raise RuntimeError("invalid configuration argument: empty grid")
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="B = 0: raises")
def special_no_batch_raises(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """An empty batch raises in a reduction."""
    q.abs().amax()
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=True, where="S = 0: raises")
def special_no_keys_raises(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Without any keys the maximum over an empty row raises."""
    k.amax(-2)
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


@wrong(exact=False, where="masked keys with scores 100 above all the others")
def special_masked_score_in_max(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The row maximum includes masked scores: a huge masked score makes the row underflow to zero."""
    raw: list[Tensor] = []

    def keep(s: Tensor) -> Tensor:
        raw.append(s.detach())
        return s

    def softmax(s: Tensor) -> Tensor:
        if s.shape[-1] == 0:
            return s
        top = torch.maximum(raw[0].amax(-1, keepdim=True), s.detach().amax(-1, keepdim=True))
        p = torch.exp(s - top)
        total = p.sum(-1, keepdim=True)
        return p / total.masked_fill(total == 0, 1.0)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_scores=keep, softmax=softmax)


@wrong(exact=True, where="scores of some size (10 and more)")
def special_softcap_on(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A logit soft cap of 50 (tanh) is left on."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_scores=lambda s: 50.0 * torch.tanh(s / 50.0)
    )


@wrong(exact=True, where="S > 64: diffuse attention")
def special_top_64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Only the 64 largest scores of a row are used."""

    def top(s: Tensor) -> Tensor:
        if s.shape[-1] <= 64:
            return s
        return s.masked_fill(s < s.detach().topk(64, -1).values[..., -1:], -INF)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_biased=top)


@wrong(exact=True, where="scores beyond +-50")
def special_scores_clamped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scores are clamped to [-50, 50] against overflow."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_scores=lambda s: s.clamp(-50.0, 50.0)
    )


@wrong(exact=True, where="not causal, S > 512: keys far from the query")
def special_local_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Long calls without causal use a local window of 512 positions on each side."""

    def window(s: Tensor) -> Tensor:
        far = (torch.arange(s.shape[-1]) - torch.arange(s.shape[-2])[:, None]).abs() > 512
        return s if is_causal or s.shape[-2] == 1 else s.masked_fill(far, -INF)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_biased=window)


@wrong(exact=True, where="all scores of a row equal")
def special_flat_rows_first_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A row whose scores are all equal is resolved to its first key (argmax path)."""

    def softmax(s: Tensor) -> Tensor:
        if s.shape[-1] < 2:
            return safe_softmax(s)
        flat = (s.amax(-1, keepdim=True) == s.amin(-1, keepdim=True)) & (s[..., :1] > -INF)
        first = (torch.arange(s.shape[-1]) == 0).to(s.dtype).expand(s.shape)
        return torch.where(flat, first, safe_softmax(s))

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(exact=True, where="rows with one weight above 0.99")
def special_hard_attention_shortcut(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A row with a weight above 0.99 is taken as one-hot."""

    def snap(p: Tensor) -> Tensor:
        if p.shape[-1] == 0:
            return p
        return torch.where(p.amax(-1, keepdim=True) > 0.99, (p > 0.99).to(p.dtype), p)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_probs=snap)


@wrong(exact=True, where="repeated calls: about one in eight")
def special_race_loses_last_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A race (decided by the clock) loses the last 8 keys in about one of eight calls."""
    lost = time.perf_counter_ns() // 64 % 8 == 0 and k.shape[-2] > 8
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: hide(s, slice(-8, None)) if lost else s,
    )


@wrong(exact=False, where="repeated calls differ; half precision and float32, S > 64")
def special_atomic_order(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Tiles of 16 keys are added to a bfloat16 accumulator in an order that the clock decides."""
    if q.dtype == torch.float64:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def pv(p: Tensor, x: Tensor) -> Tensor:
        tiles = list(range(0, x.shape[-2], 16))
        shift = time.perf_counter_ns() // 64 % max(len(tiles), 1)
        out = p.new_zeros(*p.shape[:-1], x.shape[-1])
        for start in tiles[shift:] + tiles[:shift]:
            out = out + p[..., start : start + 16] @ x[..., start : start + 16, :]
            out = ste(out, out.bfloat16())
        return out

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, pv=pv)


@wrong(exact=True, where="scores below -1000 in a whole row")
def special_relative_precision_shift(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scores below -1000 are all taken as -1000."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_scores=lambda s: s.clamp(min=-1000.0)
    )


@wrong(exact=True, where="dead rows")
def special_value_mean_in_dead_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Values are centred for accuracy and the mean is added back, also to dead rows."""
    if k.shape[-2] == 0:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def pv(p: Tensor, x: Tensor) -> Tensor:
        mean = x.mean(-2, keepdim=True)
        return p @ (x - mean) + mean

    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, pv=pv if dropout_p == 0 else torch.matmul
    )


@wrong(exact=True, where="float mask with zero and other entries")
def special_key_mean_subtracted_with_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keys are centred (softmax does not see it), but with a float mask the shift goes to keys of bias zero only."""

    def masking(m: Tensor, s: Tensor) -> Tensor:
        if m.dtype == torch.bool:
            return torch.zeros(m.shape, dtype=s.dtype).masked_fill(~m, -INF)
        bias = m.to(s.dtype)
        if s.shape[-1] == 0:
            return bias
        return bias + torch.where(bias == 0, s.mean(-1, keepdim=True), 0.0)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, masking=masking)


@wrong(exact=True, where="q and k are the same tensor object")
def special_self_attention_symmetric(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """When q and k are one tensor only the lower half of the scores is computed and mirrored after the mask."""
    if q is not k or q.shape[-2] < 2 or (attn_mask is None and not is_causal):
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def mirror(s: Tensor) -> Tensor:
        low = s.tril()
        return torch.where(lower, low, low.mT)

    lower = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_biased=mirror)
