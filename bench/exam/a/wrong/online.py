"""Wrong kernels: online softmax."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

from collections.abc import Callable  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import INF, Running, safe_softmax, textbook, tiled  # noqa: E402
from wrong.registry import wrong  # noqa: E402

Drop = Callable[[Tensor], Tensor]


def _step(run: Running, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The new row maximum, the weights of the tile and the factor for what was there before."""
    top = torch.maximum(run.top, s.detach().amax(-1, keepdim=True))
    safe = top.masked_fill(top == -INF, 0.0)
    return top, torch.exp(s - safe), torch.exp(run.top - safe)


@wrong(exact=True, where="S > 64")
def online_accumulator_not_rescaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The accumulator is not rescaled when the row maximum grows (the sum is)."""

    def merge(run: Running, s: Tensor, v: Tensor, drop: Drop) -> Running:
        top, p, shrink = _step(run, s)
        return Running(top, run.total * shrink + p.sum(-1, keepdim=True), run.acc + drop(p) @ v)

    return tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, merge=merge)


@wrong(exact=True, where="S > 64")
def online_sum_not_rescaled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The row sum is not rescaled when the row maximum grows (the accumulator is)."""

    def merge(run: Running, s: Tensor, v: Tensor, drop: Drop) -> Running:
        top, p, shrink = _step(run, s)
        return Running(top, run.total + p.sum(-1, keepdim=True), run.acc * shrink + drop(p) @ v)

    return tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, merge=merge)


@wrong(exact=False, where="rows whose scores are all below about -100")
def online_max_starts_at_zero(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The running maximum starts at zero, so rows of very negative scores underflow to nothing."""
    return tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, first_top=0.0)


@wrong(exact=False, where="rows whose scores are all below about -1100")
def online_max_starts_at_minus_thousand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The running maximum starts at -1000 instead of -inf."""
    return tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, first_top=-1000.0)


@wrong(exact=False, where="scores above 88")
def online_max_not_subtracted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """No maximum is subtracted: exp overflows for scores above 88."""

    def softmax(s: Tensor) -> Tensor:
        p = torch.exp(s)
        total = p.sum(-1, keepdim=True)
        return p / total.masked_fill(total == 0, 1.0)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(exact=False, where="S > 64, later scores 88 above the first tile")
def online_max_of_first_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The maximum of the first tile that is seen serves for all the tiles: later larger scores overflow."""

    def merge(run: Running, s: Tensor, v: Tensor, drop: Drop) -> Running:
        top = torch.where(run.top == -INF, s.detach().amax(-1, keepdim=True), run.top)
        p = torch.exp(s - top.masked_fill(top == -INF, 0.0))
        return Running(top, run.total + p.sum(-1, keepdim=True), run.acc + drop(p) @ v)

    return tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, merge=merge)


@wrong(exact=True, where="S > 64, maximum grows by less than 8 between tiles")
def online_lazy_rescale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Rescaling is skipped when the maximum grows by less than 8, but the new maximum is used all the same."""

    def merge(run: Running, s: Tensor, v: Tensor, drop: Drop) -> Running:
        top, p, shrink = _step(run, s)
        shrink = torch.where((top - run.top) < 8.0, torch.ones_like(shrink), shrink)
        return Running(top, run.total * shrink + p.sum(-1, keepdim=True), run.acc * shrink + drop(p) @ v)

    return tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, merge=merge)


@wrong(exact=True, where="S > 64")
def online_rescale_inverted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The old row sum is multiplied with exp(new - old) instead of exp(old - new)."""

    def merge(run: Running, s: Tensor, v: Tensor, drop: Drop) -> Running:
        top, p, shrink = _step(run, s)
        grow = torch.where(shrink > 0, 1.0 / shrink, 0.0)
        return Running(top, run.total * grow + p.sum(-1, keepdim=True), run.acc * shrink + drop(p) @ v)

    return tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, merge=merge)


@wrong(exact=False, where="rows of one tile whose scores differ by more than 100")
def online_max_shared_by_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One maximum per tile of rows is subtracted: rows with much smaller scores underflow to nothing."""

    def softmax(s: Tensor) -> Tensor:
        if s.numel() == 0:
            return s
        top = s.detach().amax((-2, -1), keepdim=True)
        p = torch.exp(s - top.masked_fill(top == -INF, 0.0))
        total = p.sum(-1, keepdim=True)
        return p / total.masked_fill(total == 0, 1.0)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(exact=True, where="scores more than 10 below the row maximum")
def online_exponent_clamped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The exponent is clamped at -10 for the sake of a short polynomial: far keys keep a weight of 4.5e-5."""

    def softmax(s: Tensor) -> Tensor:
        if s.shape[-1] == 0:
            return s
        top = s.detach().amax(-1, keepdim=True)
        x = (s - top.masked_fill(top == -INF, 0.0)).clamp(min=-10.0)
        p = torch.exp(x).masked_fill(s == -INF, 0.0)
        total = p.sum(-1, keepdim=True)
        return p / total.masked_fill(total == 0, 1.0)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(exact=True, where="every call")
def online_sink_in_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """An attention sink of logit zero is left on: the row sum has one term exp(-max) more."""
    return tiled(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_total=lambda run: run.total + torch.exp(-run.top).masked_fill(run.top == -INF, 0.0),
    )


@wrong(exact=True, where="S > 64 and a row whose first tile is wholly masked")
def online_dead_tile_nan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A row whose first tile is wholly masked computes -inf - -inf and becomes NaN (wholly dead rows are caught)."""

    def merge(run: Running, s: Tensor, v: Tensor, drop: Drop) -> Running:
        top = torch.maximum(run.top, s.detach().amax(-1, keepdim=True))
        p, shrink = torch.exp(s - top), torch.exp(run.top - top)
        if bool((run.total == 0).all()) and not bool(torch.isnan(run.total).any()):
            shrink = torch.zeros_like(shrink)
        return Running(top, run.total * shrink + p.sum(-1, keepdim=True), run.acc * shrink + drop(p) @ v)

    out = tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, merge=merge)
    if attn_mask is None:
        return out
    keep = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -INF
    if is_causal:
        keep = keep & torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return out.masked_fill(~keep.any(-1, keepdim=True), 0.0)


@wrong(exact=True, where="S > 64 and a row with a wholly masked tile after a live one")
def online_dead_tile_resets_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A wholly masked tile resets the row: what came before it is lost."""

    def merge(run: Running, s: Tensor, v: Tensor, drop: Drop) -> Running:
        top, p, shrink = _step(run, s)
        shrink = shrink.masked_fill((s == -INF).all(-1, keepdim=True), 0.0)
        return Running(top, run.total * shrink + p.sum(-1, keepdim=True), run.acc * shrink + drop(p) @ v)

    return tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, merge=merge)


@wrong(exact=True, where="bool mask or causal")
def online_sum_before_masking(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The row sum is taken before the mask is applied to the weights: masked keys stay in the denominator."""
    bias: list[Tensor] = []

    def softmax(s: Tensor) -> Tensor:
        raw = bias[0]
        p = safe_softmax(raw)
        dead = (s == -INF).all(-1, keepdim=True) if s.shape[-1] else s.new_zeros((*s.shape[:-1], 1), dtype=torch.bool)
        return p.masked_fill((s == -INF) | dead, 0.0)

    def masking(m: Tensor, s: Tensor) -> Tensor:
        add = torch.zeros(m.shape, dtype=s.dtype).masked_fill(~m, -INF) if m.dtype == torch.bool else m.to(s.dtype)
        bias[0] = bias[0] + add.masked_fill(add == -INF, 0.0)
        return add

    def keep(s: Tensor) -> Tensor:
        bias.append(s)
        return s

    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_scores=keep, masking=masking, softmax=softmax
    )


@wrong(exact=False, where="S > 256 and log-sum-exp above 88")
def online_merge_without_max(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Two halves of more than 256 keys are merged with exp(lse) itself, which overflows above 88."""
    half = k.shape[-2] // 2
    if k.shape[-2] <= 256:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    def softmax(s: Tensor) -> Tensor:
        parts = [s[..., :half], s[..., half:]]
        weight = [torch.exp(torch.logsumexp(x, -1, keepdim=True)) for x in parts]
        total = weight[0] + weight[1]
        share = [w / total.masked_fill(total == 0, 1.0) for w in weight]
        return torch.cat([safe_softmax(x) * w for x, w in zip(parts, share, strict=True)], -1)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(exact=True, where="S > 64")
def online_rescale_in_base_two(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The old part is rescaled with exp2 although the weights use exp."""

    def merge(run: Running, s: Tensor, v: Tensor, drop: Drop) -> Running:
        top, p, _ = _step(run, s)
        shrink = torch.exp2(run.top - top.masked_fill(top == -INF, 0.0))
        return Running(top, run.total * shrink + p.sum(-1, keepdim=True), run.acc * shrink + drop(p) @ v)

    return tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, merge=merge)


@wrong(exact=True, where="S > 64: three or more tiles")
def online_rescale_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Only the second tile rescales what came before; from the third on the rescale is forgotten."""
    count = [0]

    def merge(run: Running, s: Tensor, v: Tensor, drop: Drop) -> Running:
        top, p, shrink = _step(run, s)
        count[0] += 1
        if count[0] > 2:
            shrink = torch.ones_like(shrink)
        return Running(top, run.total * shrink + p.sum(-1, keepdim=True), run.acc * shrink + drop(p) @ v)

    return tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, merge=merge)


@wrong(exact=True, where="S > 64")
def online_normalised_per_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Each tile is divided by the row sum so far and what came before is not rescaled."""

    def merge(run: Running, s: Tensor, v: Tensor, drop: Drop) -> Running:
        top, p, shrink = _step(run, s)
        total = run.total * shrink + p.sum(-1, keepdim=True)
        safe = total.masked_fill(total == 0, 1.0)
        return Running(top, total, run.acc + drop(p) @ v / safe)

    def total_of(run: Running) -> Tensor:
        return torch.ones_like(run.total)

    return tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, merge=merge, on_total=total_of)
