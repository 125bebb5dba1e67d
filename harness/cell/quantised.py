"""A quantised cache, judged by two budgets of its own, and never by a wider tolerance.

What reads it is held by the acceptance rule to attention over its *dequantised* contents, which a reference decodes
from the codes by itself. What quantises is held to its step: no number may be further from what was appended than the
codes explain, nor the output of attention further than that error can carry through the softmax.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.cell.check import check
from harness.cell.rule import Equivalence
from harness.kernels.front import AnyKernel, attention
from harness.variants.quantised import QuantisedKVCache

TINY = 1e-300  # a row that attends nothing: its weights are 0, and stay so


@dataclass(frozen=True)
class CacheJudgement:
    """`equality` is of what reads the cache; the errors, and the bounds that they must keep, of what quantises."""

    equality: Equivalence
    contents_err: float  # largest |dequantised - appended| over its own bound; at most 1
    output_err: float  # max |attention over the cache - attention over what was appended|
    output_bound: float  # the largest bound of any output
    output_ratio: float  # largest error over its own bound; at most 1

    @property
    def passed(self) -> bool:
        return self.equality.passed and self.contents_err <= 1 and self.output_ratio <= 1


def judge_cache(
    cache: QuantisedKVCache, q: Tensor, *streams: Tensor, kernel: AnyKernel = "eager", **rules: Any
) -> CacheJudgement:
    """`streams` (k, v), or one of which all channels are keys and values, are appended to the cache; q attends to it.

    q (B, H, L, D); rules as in `attention`.
    """
    held = cache.append(*streams)
    contents = dequantised(cache)

    def attend(q: Tensor, *kv: Tensor) -> Tensor:
        out: Tensor = attention(q, kv[0], kv[-1], kernel=kernel, **rules)
        return out

    equality = check(lambda q, *_: attend(q, *held), attend, (q, *(c.to(q.dtype) for c in contents)))
    bounds = cache.error_bound()
    distances = [(h.double() - s.double()).abs() for h, s in zip(held, streams, strict=True)]
    ratios = [_largest_ratio(d, b) for d, b in zip(distances, bounds, strict=True)]
    exact = [t.double() for t in streams]
    moved = (attend(q.double(), *(h.double() for h in held)) - attend(q.double(), *exact)).abs()
    bound = propagated(q.double(), exact[0], exact[-1], bounds[0], bounds[-1], **rules)
    return CacheJudgement(equality, max(ratios), float(moved.max()), float(bound.max()), _largest_ratio(moved, bound))


def propagated(q: Tensor, k: Tensor, v: Tensor, of_k: Tensor, of_v: Tensor, **rules: Any) -> Tensor:
    """How far attention's output can be when keys and values are off by at most `of_k` and `of_v`: (B, H, L, D_v).

    A score is then off by at most e_j = scale |q| . of_k[j], and no weight w_j gets above h_j, where its score goes up
    and all others go down. On the way from the one output o to the other, do = sum w_j de_j (v_j - o), so that
    |do| <= sum h_j e_j (|v_j - o| + |moved so far|), which ends (Gronwall) at A (exp(C) - 1) / C with A = sum h_j e_j
    |v_j - o| and C = sum h_j e_j. And no mean of values is further from another than the furthest value.
    """
    groups = q.shape[1] // k.shape[1]
    k, v, of_k, of_v = (t.repeat_interleave(groups, dim=1) for t in (k, v, of_k, of_v))
    out, w = attention(q, k, v, kernel="eager", return_weights=True, **rules)
    scale = q.shape[-1] ** -0.5 if rules.get("scale") is None else abs(rules["scale"])
    e = scale * q.abs() @ of_k.mT  # (B, H, L, S)
    up, down = w * e.exp(), w * (-e).exp()
    highest = up / (up + (down.sum(-1, keepdim=True) - down)).clamp(min=TINY)
    pull = highest * e
    C = pull.sum(-1).clamp(min=TINY)  # (B, H, L)
    bound = torch.empty_like(out)
    for c in range(v.shape[-1]):  # all at once they would be (B, H, L, S, D_v)
        far = torch.where(w > 0, (v[..., c][:, :, None] - out[..., c, None]).abs(), 0.0)
        bound[..., c] = torch.minimum((pull * far).sum(-1) * torch.expm1(C) / C, far.amax(-1))
    return bound + torch.minimum(highest @ of_v, of_v.amax(2, keepdim=True))


def _largest_ratio(errors: Tensor, bounds: Tensor) -> float:
    """NaN where an error is: it keeps no bound."""
    return float(torch.where(errors == 0, 0.0, errors / bounds).max()) if errors.numel() else 0.0


def dequantised(cache: QuantisedKVCache) -> tuple[Tensor, ...]:
    """What the cache holds, decoded number by number, in float64: each stream (B, heads, S, width).


    Nothing of the cache's own decoding is used: fp8 is read from its bits.
    """
    found = []
    for coded, waiting in zip(cache.coded(), cache.waiting(), strict=True):
        codes = coded.codes
        if cache.how.format == "fp8":
            numbers = _fp8_values()[codes.view(torch.uint8).long()]
        elif cache.how.format == "int4":
            halves = codes.long()
            numbers = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=torch.float64)
            numbers[..., 0::2], numbers[..., 1::2] = halves % 16, halves // 16
        else:
            numbers = codes.double()
        S, width = numbers.shape[2:]
        token = torch.arange(S) // max(1, S // max(1, coded.scale.shape[2]))
        channel = torch.arange(width) // (width // coded.scale.shape[3])
        scale = coded.scale.double()[:, :, token][..., channel] if S else numbers
        values = numbers * scale
        if coded.least is not None and S:
            values = values + coded.least.double()[:, :, token][..., channel]
        found.append(torch.cat((values, waiting.double()), dim=2))
    return tuple(found)


def _fp8_values() -> Tensor:
    """Of all 256 patterns: a sign, four bits of exponent (bias 7), three of mantissa; all ones is NaN."""
    values = []
    for bits in range(256):
        sign, exponent, mantissa = -1.0 if bits & 128 else 1.0, bits >> 3 & 15, bits & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(float("nan") if bits & 127 == 127 else sign * size)
    return torch.tensor(values, dtype=torch.float64)
