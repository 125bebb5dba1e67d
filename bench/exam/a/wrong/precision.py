"""Wrong kernels: rounding, quantisation, approximations. Right in exact arithmetic unless marked."""

from __future__ import annotations

import sys
from pathlib import Path

if (_ROOT := str(Path(__file__).resolve().parents[1])) not in sys.path:
    sys.path.insert(0, _ROOT)

from collections.abc import Callable  # noqa: E402

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong.base import INF, Running, default_factor, safe_softmax, ste, textbook, tiled  # noqa: E402
from wrong.registry import wrong  # noqa: E402

HALF = (torch.float16, torch.bfloat16)


def _quantised(x: Tensor, levels: int) -> Tensor:
    """x rounded to 2 * levels + 1 steps of one scale per tensor."""
    if x.numel() == 0:
        return x
    step = x.detach().abs().amax() / levels
    return ste(x, torch.round(x.detach() / step.clamp(min=1e-30)) * step)


def _softmax_with(exp: Callable[[Tensor], Tensor], s: Tensor) -> Tensor:
    """The safe softmax with another exponential, which sees finite arguments only where keys are masked."""
    if s.shape[-1] == 0:
        return s
    top = s.detach().amax(-1, keepdim=True)
    x = (s - top.masked_fill(top == -INF, 0.0)).masked_fill(s == -INF, -1.0)
    p = exp(x).masked_fill(s == -INF, 0.0)
    total = p.sum(-1, keepdim=True)
    return p / total.masked_fill(total == 0, 1.0)


@wrong(exact=False, where="half precision inputs")
def precision_scores_in_half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """For half precision inputs the scores are rounded to half precision."""

    def qk(a: Tensor, b: Tensor) -> Tensor:
        s = a @ b.transpose(-2, -1)
        return ste(s, s.to(q.dtype)) if q.dtype in HALF else s

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, qk=qk)


@wrong(exact=False, where="half precision inputs")
def precision_softmax_in_bf16(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """For half precision inputs the whole softmax runs in bfloat16."""

    def softmax(s: Tensor) -> Tensor:
        return safe_softmax(s.bfloat16()).to(s.dtype) if q.dtype in HALF else safe_softmax(s)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax)


@wrong(exact=False, where="half precision inputs")
def precision_probs_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """For half precision inputs the weights are stored as float8 e4m3."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_probs=lambda p: ste(p, p.to(torch.float8_e4m3fn)) if q.dtype in HALF else p,
    )


@wrong(exact=False, where="every call")
def precision_probs_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The weights are quantised to 127 levels."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_probs=lambda p: ste(p, torch.round(p.detach() * 127) / 127),
    )


@wrong(exact=False, where="every call")
def precision_qk_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Queries and keys are quantised to int8 with one scale per tensor."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        qk=lambda a, b: _quantised(a, 127) @ _quantised(b, 127).transpose(-2, -1),
    )


@wrong(exact=False, where="S > 128, keys with outliers most")
def precision_long_keys_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Above 128 keys the key cache is int8 with one scale per tensor."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        qk=lambda a, b: a @ (_quantised(b, 127) if b.shape[-2] > 128 else b).transpose(-2, -1),
    )


@wrong(exact=False, where="every call")
def precision_keys_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The keys are stored as float8 e5m2."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        qk=lambda a, b: a @ ste(b, b.to(torch.float8_e5m2)).transpose(-2, -1),
    )


@wrong(exact=False, where="every call")
def precision_values_int4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The values are quantised to 15 levels per tensor."""
    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, pv=lambda p, x: p @ _quantised(x, 7))


@wrong(exact=True, where="every call, about 1e-3")
def precision_exp_quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """2^frac is a quadratic polynomial with a relative error of 2e-3."""

    def exp(x: Tensor) -> Tensor:
        y = (x * 1.4426950408889634).clamp(min=-126.0)
        whole = torch.floor(y.detach())
        f = y - whole
        return (1.0 + f * (0.6565 + f * 0.3435)) * torch.exp2(whole)

    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=lambda s: _softmax_with(exp, s)
    )


@wrong(exact=False, where="every call, about 1e-2")
def precision_exp_table(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The exponential is looked up in a table with steps of 1/32, without interpolation."""

    def exp(x: Tensor) -> Tensor:
        return torch.exp(ste(x, torch.round(x.detach().clamp(min=-1e4) * 32) / 32))

    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=lambda s: _softmax_with(exp, s)
    )


@wrong(exact=True, where="every call, about 3e-2")
def precision_exp_bit_trick(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The exponential is Schraudolph's bit trick (linear in the mantissa)."""

    def exp(x: Tensor) -> Tensor:
        y = (x * 1.4426950408889634).clamp(min=-126.0)
        whole = torch.floor(y.detach())
        return (1.0 + (y - whole)) * torch.exp2(whole) * 0.9714

    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=lambda s: _softmax_with(exp, s)
    )


@wrong(exact=False, where="half precision inputs, S > 64")
def precision_accumulator_in_half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The output accumulator is rounded to the input dtype after each tile of 16 keys."""

    def merge(run: Running, s: Tensor, x: Tensor, drop: object) -> Running:
        top = torch.maximum(run.top, s.detach().amax(-1, keepdim=True))
        safe = top.masked_fill(top == -INF, 0.0)
        p, shrink = torch.exp(s - safe), torch.exp(run.top - safe)
        acc = run.acc * shrink + drop(p) @ x
        acc = ste(acc, acc.to(q.dtype)) if q.dtype in HALF else acc
        return Running(top, run.total * shrink + p.sum(-1, keepdim=True), acc)

    return tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, merge=merge, block=16)


@wrong(exact=False, where="half precision inputs, long S")
def precision_row_sum_in_half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The row sum is rounded to bfloat16 after each tile of 16 keys (half precision inputs)."""

    def merge(run: Running, s: Tensor, x: Tensor, drop: object) -> Running:
        top = torch.maximum(run.top, s.detach().amax(-1, keepdim=True))
        safe = top.masked_fill(top == -INF, 0.0)
        p, shrink = torch.exp(s - safe), torch.exp(run.top - safe)
        total = run.total * shrink + p.sum(-1, keepdim=True)
        total = ste(total, total.bfloat16()) if q.dtype in HALF else total
        return Running(top, total, run.acc * shrink + drop(p) @ x)

    return tiled(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, merge=merge, block=16)


@wrong(exact=False, where="float16 inputs")
def precision_float16_through_bf16(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A float16 output is rounded to bfloat16 first."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_out=lambda o: ste(o, o.bfloat16()) if q.dtype == torch.float16 else o,
    )


@wrong(exact=False, where="bfloat16 inputs, values above 65504")
def precision_bf16_through_float16(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A bfloat16 output is rounded to float16 first, which overflows above 65504."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_out=lambda o: o.half().to(o.dtype) if q.dtype == torch.bfloat16 else o,
    )


@wrong(exact=False, where="bfloat16 inputs: outputs too small in magnitude")
def precision_output_truncated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The bfloat16 output is truncated instead of rounded to nearest."""

    def cut(o: Tensor) -> Tensor:
        if q.dtype != torch.bfloat16:
            return o
        return ste(o, (o.detach().contiguous().view(torch.int32) & -65536).view(torch.float32))

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_out=cut)


@wrong(exact=False, where="float64 inputs")
def precision_double_in_float(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """float64 inputs are computed in float32."""
    if q.dtype != torch.float64:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    mask = attn_mask.float() if attn_mask is not None and attn_mask.dtype == torch.float64 else attn_mask
    return textbook(q.float(), k.float(), v.float(), mask, dropout_p, is_causal, scale, enable_gqa).double()


@wrong(exact=False, where="float64 inputs, 1e-8")
def precision_double_softmax_in_float(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """For float64 inputs the exponential runs in float32."""

    def exp(x: Tensor) -> Tensor:
        return torch.exp(x.float()).to(x.dtype)

    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=lambda s: _softmax_with(exp, s)
    )


@wrong(exact=False, where="float32 inputs, 5e-4")
def precision_float_in_tf32(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """float32 matrix products cut their inputs to the 10 mantissa bits of TF32."""

    def cut(x: Tensor) -> Tensor:
        if q.dtype != torch.float32:
            return x
        return ste(x, (x.detach().contiguous().view(torch.int32) & -8192).view(torch.float32))

    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        qk=lambda a, b: cut(a) @ cut(b).transpose(-2, -1),
        pv=lambda p, x: cut(p) @ cut(x),
    )


@wrong(exact=False, where="float32 inputs, 4e-3")
def precision_float_in_bf16(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """float32 matrix products run on bfloat16 inputs."""

    def cut(x: Tensor) -> Tensor:
        return ste(x, x.bfloat16()) if q.dtype == torch.float32 else x

    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        qk=lambda a, b: cut(a) @ cut(b).transpose(-2, -1),
        pv=lambda p, x: cut(p) @ cut(x),
    )


@wrong(exact=False, where="float32 inputs")
def precision_float_probs_in_bf16(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The weights are rounded to bfloat16 for float32 inputs too."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_probs=lambda p: ste(p, p.bfloat16()) if q.dtype == torch.float32 else p,
    )


@wrong(exact=False, where="half precision inputs, D not a power of four")
def precision_query_scaled_in_half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The queries are scaled in half precision before the product."""
    if q.dtype not in HALF:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return textbook(q * default_factor(q, scale), k, v, attn_mask, dropout_p, is_causal, 1.0, enable_gqa)


@wrong(exact=False, where="float16 inputs, unscaled scores above 65504")
def precision_float16_scores_overflow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In float16 the unscaled scores are stored in float16 and overflow above 65504."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        qk=lambda a, b: (a @ b.transpose(-2, -1)).to(q.dtype).to(a.dtype) if q.dtype == torch.float16 else a @ b.mT,
    )


@wrong(exact=False, where="float16 inputs, sum of weights times values above 65504")
def precision_float16_accumulator_overflow(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In float16 the unnormalised output is stored in float16 and overflows with many or large values."""
    if q.dtype != torch.float16 or not k.shape[-2]:
        return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    total: list[Tensor] = []

    def softmax(s: Tensor) -> Tensor:
        top = s.detach().amax(-1, keepdim=True)
        p = torch.exp(s - top.masked_fill(top == -INF, 0.0))
        total.append(p.sum(-1, keepdim=True))
        return p

    def finish(o: Tensor) -> Tensor:
        return ste(o, o.half()) / total[0].masked_fill(total[0] == 0, 1.0)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, softmax=softmax, on_out=finish)


@wrong(exact=False, where="every call, about 1e-3")
def precision_reciprocal_approximate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The row sum is inverted with a half precision reciprocal."""
    return tiled(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_total=lambda run: ste(run.total, 1.0 / (1.0 / run.total.detach()).bfloat16().to(run.total.dtype)),
    )


@wrong(exact=False, where="float16 subnormal values")
def precision_float16_subnormals_flushed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """float16 subnormals (below 6.1e-5) of the inputs and the output are flushed to zero."""

    def flush(x: Tensor) -> Tensor:
        return x.masked_fill(x.abs() < 2.0**-14, 0.0) if q.dtype == torch.float16 else x

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, pv=lambda p, x: flush(p @ flush(x)))


@wrong(exact=False, where="half precision inputs with float32 mask of large entries")
def precision_biased_scores_in_half(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """For half precision inputs the scores are rounded to half precision after the float mask is added."""
    return textbook(
        q,
        k,
        v,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        on_biased=lambda s: ste(s, s.to(q.dtype)).masked_fill(s == -INF, -INF) if q.dtype in HALF else s,
    )


@wrong(exact=False, where="S > 512")
def precision_long_values_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Above 512 keys the values are stored as float8 e4m3 with one scale per tensor."""

    def pv(p: Tensor, x: Tensor) -> Tensor:
        if x.shape[-2] <= 512:
            return p @ x
        unit = x.detach().abs().amax().clamp(min=1e-30) / 448.0
        return p @ ste(x, (x.detach() / unit).to(torch.float8_e4m3fn).to(x.dtype) * unit)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, pv=pv)


@wrong(exact=True, where="many keys: weights below 1e-3")
def precision_small_weights_flushed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Weights below 1e-3 are flushed to zero (sparse attention threshold), without normalising again."""
    return textbook(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, on_probs=lambda p: p.masked_fill(p < 1e-3, 0.0)
    )


@wrong(exact=False, where="bfloat16 values of mixed size: P V in two bfloat16 halves")
def precision_partial_sums_in_bf16(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Partial outputs of the two halves of the keys are rounded to bfloat16 and then added (every dtype but double)."""

    def pv(p: Tensor, x: Tensor) -> Tensor:
        half = x.shape[-2] // 2
        if half == 0 or q.dtype == torch.float64:
            return p @ x
        parts = [p[..., :half] @ x[..., :half, :], p[..., half:] @ x[..., half:, :]]
        return sum(ste(o, o.bfloat16()) for o in parts)

    return textbook(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa, pv=pv)
