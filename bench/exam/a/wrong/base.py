"""Correct attention cores with hooks: a textbook core, a tiled online-softmax core and one with a manual backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

INF = float("inf")
Rule = Callable[["Saved", Tensor], tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]]


def same(x: Tensor) -> Tensor:
    """The identity: the default of most hooks."""
    return x


def default_factor(q: Tensor, scale: float | None) -> float:
    """The scale of the scores: the one given, else 1/sqrt(D)."""
    return 1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale


def lower_triangle(rows: int, keys: int, device: torch.device | None = None) -> Tensor:
    """The top-left aligned causal mask, True where a row attends."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril()


def additive(mask: Tensor, scores: Tensor) -> Tensor:
    """The mask as a term to add to the scores."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device).masked_fill(~mask, -INF)
    return mask.to(scores.dtype)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each key/value head for the query heads of its group."""
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3)


def safe_softmax(scores: Tensor) -> Tensor:
    """Softmax over the keys; a row with no key left is zero."""
    if scores.shape[-1] == 0:
        return scores
    top = scores.detach().amax(-1, keepdim=True)
    p = torch.exp(scores - top.masked_fill(top == -INF, 0.0))
    total = p.sum(-1, keepdim=True)
    return p / total.masked_fill(total == 0, 1.0)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype the kernel computes in: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def under_autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast as SDPA does under autocast (float64 stays)."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    low = torch.get_autocast_dtype(kind)
    return [t if t.dtype == torch.float64 else t.to(low) for t in tensors]


def ste(x: Tensor, rounded: Tensor) -> Tensor:
    """The rounded value in the forward pass, the gradient of x in the backward pass."""
    return x + (rounded.to(x.dtype) - x).detach()


def hide(scores: Tensor, keys: slice | Tensor) -> Tensor:
    """The scores with some keys hidden, as if they had never been read."""
    gone = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
    gone[keys] = True
    return scores.masked_fill(gone, -INF)


def textbook(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    factor: Callable[[Tensor, float | None], float] = default_factor,
    causal: Callable[..., Tensor] = lower_triangle,
    masking: Callable[[Tensor, Tensor], Tensor] = additive,
    expand_k: Callable[[Tensor, int], Tensor] = expand_heads,
    expand_v: Callable[[Tensor, int], Tensor] = expand_heads,
    qk: Callable[[Tensor, Tensor], Tensor] | None = None,
    on_scores: Callable[[Tensor], Tensor] = same,
    on_biased: Callable[[Tensor], Tensor] = same,
    softmax: Callable[[Tensor], Tensor] = safe_softmax,
    on_probs: Callable[[Tensor], Tensor] = same,
    drop: Callable[[Tensor, float], Tensor] = F.dropout,
    pv: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
    on_out: Callable[[Tensor], Tensor] = same,
) -> Tensor:
    """Attention as in the textbook, with a hook at every step; correct when no hook is given."""
    q, k, v = under_autocast(q, k, v)
    compute = compute_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        qc, kc, vc = q.to(compute), k.to(compute), v.to(compute)
        if enable_gqa:
            kc, vc = expand_k(kc, q.shape[-3]), expand_v(vc, q.shape[-3])
        raw = qc @ kc.transpose(-2, -1) if qk is None else qk(qc, kc)
        scores = on_scores(raw * factor(q, scale))
        if is_causal:
            scores = scores.masked_fill(~causal(q.shape[-2], k.shape[-2], q.device), -INF)
        if attn_mask is not None:
            scores = scores + masking(attn_mask, scores)
        p = on_probs(softmax(on_biased(scores)))
        if dropout_p > 0:
            p = drop(p, dropout_p)
        return on_out(pv(p, vc)).to(q.dtype)


@dataclass
class Running:
    """The running state of an online softmax: row maximum, row sum, accumulator."""

    top: Tensor
    total: Tensor
    acc: Tensor


def merge_tile(run: Running, s: Tensor, v: Tensor, drop: Callable[[Tensor], Tensor]) -> Running:
    """Take one tile of scores and values into the running state."""
    top = torch.maximum(run.top, s.detach().amax(-1, keepdim=True))
    safe = top.masked_fill(top == -INF, 0.0)
    p, shrink = torch.exp(s - safe), torch.exp(run.top - safe)
    return Running(top, run.total * shrink + p.sum(-1, keepdim=True), run.acc * shrink + drop(p) @ v)


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    block: int = 64,
    first_top: float = -INF,
    merge: Callable[[Running, Tensor, Tensor, Callable[[Tensor], Tensor]], Running] = merge_tile,
    on_tile: Callable[[Tensor, int], Tensor] | None = None,
    on_total: Callable[[Running], Tensor] = lambda run: run.total,
) -> Tensor:
    """Attention in tiles of keys with an online softmax; correct when no hook is given."""
    q, k, v = under_autocast(q, k, v)
    compute = compute_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        qc, kc, vc = q.to(compute) * default_factor(q, scale), k.to(compute), v.to(compute)
        if enable_gqa:
            kc, vc = expand_heads(kc, q.shape[-3]), expand_heads(vc, q.shape[-3])
        rows, keys = q.shape[-2], k.shape[-2]
        bias = None if attn_mask is None else additive(attn_mask, qc).expand(*q.shape[:-1], keys)
        seen = lower_triangle(rows, keys, q.device) if is_causal else None
        lead = q.shape[:-1]
        run = Running(qc.new_full((*lead, 1), first_top), qc.new_zeros((*lead, 1)), qc.new_zeros((*lead, v.shape[-1])))
        for start in range(0, keys, block):
            stop = min(start + block, keys)
            s = qc @ kc[..., start:stop, :].transpose(-2, -1)
            if seen is not None:
                s = s.masked_fill(~seen[:, start:stop], -INF)
            if bias is not None:
                s = s + bias[..., start:stop]
            if on_tile is not None:
                s = on_tile(s, start)
            run = merge(run, s, vc[..., start:stop, :], lambda p: F.dropout(p, dropout_p) if dropout_p > 0 else p)
        total = on_total(run)
        return (run.acc / total.masked_fill(total == 0, 1.0)).to(q.dtype)


@dataclass
class Saved:
    """What the manual backward has at hand; needs says which of q, k, v and the bias want a gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    factor: float
    needs: tuple[bool, ...]
    memo: dict[str, Tensor] = field(default_factory=dict)

    def probs(self) -> Tensor:
        """The attention weights, computed again from the saved inputs."""
        s = self.q @ self.k.transpose(-2, -1) * self.factor
        return safe_softmax(s if self.bias is None else s + self.bias)


def score_grad(p: Tensor, dp: Tensor) -> Tensor:
    """The gradient of the scores from the weights and the gradient of the weights."""
    return p * (dp - (p * dp).sum(-1, keepdim=True))


def right_rule(saved: Saved, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The correct backward pass: gradients of q, k, v and the bias."""
    p = saved.probs()
    ds = score_grad(p, grad @ saved.v.transpose(-2, -1))
    dq = ds @ saved.k * saved.factor
    dk = ds.transpose(-2, -1) @ saved.q * saved.factor
    return dq, dk, p.transpose(-2, -1) @ grad, ds


class Manual(torch.autograd.Function):
    """Attention with a backward pass written by hand."""

    @staticmethod
    def forward(ctx, q, k, v, bias, factor, rule):  # noqa: ANN001, ANN205, D102
        saved = Saved(q, k, v, bias, factor, ())
        ctx.save_for_backward(q, k, v, bias)
        ctx.factor, ctx.rule, ctx.memo = factor, rule, saved.memo
        p = saved.probs()
        saved.memo["probs"] = p
        return p @ v

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205, D102
        q, k, v, bias = ctx.saved_tensors
        saved = Saved(q, k, v, bias, ctx.factor, ctx.needs_input_grad[:4], ctx.memo)
        grads = ctx.rule(saved, grad)
        return (*(g if need else None for g, need in zip(grads, saved.needs, strict=True)), None, None)


def manual(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    rule: Rule = right_rule,
    expand: Callable[[Tensor, int], Tensor] = expand_heads,
) -> Tensor:
    """Attention with a manual backward pass (with dropout it falls back to the textbook); correct with right_rule."""
    if dropout_p > 0:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    q, k, v = under_autocast(q, k, v)
    compute = compute_dtype(q.dtype)
    with torch.autocast(q.device.type, enabled=False):
        qc, kc, vc = q.to(compute), k.to(compute), v.to(compute)
        if enable_gqa:
            kc, vc = expand(kc, q.shape[-3]), expand(vc, q.shape[-3])
        bias = None
        if attn_mask is not None:
            bias = additive(attn_mask, qc).expand(*q.shape[:-1], k.shape[-2])
        if is_causal:
            seen = lower_triangle(q.shape[-2], k.shape[-2], q.device)
            start = qc.new_zeros(seen.shape) if bias is None else bias
            bias = start.masked_fill(~seen, -INF)
        return Manual.apply(qc, kc, vc, bias, default_factor(q, scale), rule).to(q.dtype)
