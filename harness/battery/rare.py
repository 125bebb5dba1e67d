"""Asked once: dropout, second derivatives, torch.compile; half precision in the directions in which bugs move it."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from harness.battery.axes import FEW, Point, point
from harness.battery.call import generator_of, make_call
from harness.battery.result import Finding
from harness.battery.steps import Step, failed, judge_call, told
from harness.candidate.examinee import Examinee
from harness.cell.bare import Held
from harness.cell.golden import in_float64, weights_of

RARE, HALF, TRACED = "rare calls", "half precision", "compiled"
SIGMAS = 6.0
NEIGHBOURS = math.sqrt(3)  # pairs of neighbours overlap: their number scatters by up to so much more, of two as well
TILES = (1, 16, 32, 64, 128)  # at which distances a pattern may repeat


def half_steps(seed: int) -> list[Step]:
    return [Step(HALF, "the rule, and directions", partial(judge_half, each, seed)) for each in _half_points()]


def _half_points() -> Iterator[Point]:
    """Large enough that rounding averages out, and small enough that every query has a golden."""
    for dtype, mask_dtype in (("bfloat16", "float32"), ("float16", "as q")):
        yield point(96, 96, 96, 64, dtype=dtype, mask="causal", **FEW)
        yield point(64, 160, 33, dtype=dtype, **FEW)
        yield point(4, 600, 64, dtype=dtype, batch="2", kv_heads="4", groups="4")
        yield point(48, 100, 128, dtype=dtype, mask="float", mask_dtype=mask_dtype, scale="given", **FEW)
        yield point(64, 100, 32, dtype=dtype, mask="right padding", values="peaked", **FEW)


def judge_half(where: Point, seed: int, examinee: Examinee) -> Finding:
    call = replace(make_call(where, seed), rows=None)
    return judge_call(examinee, call, seed, directions=True)


def rare_steps(seed: int) -> list[Step]:
    twice = [
        point(9, 13, 8, dtype="float64", gradients="qkv", **FEW),
        point(9, 13, 8, mask="causal", gradients="qkv", **FEW),
        point(7, 7, 16, mask="float", gradients="qkv", **FEW),
        point(600, 600, 8, mask="causal", gradients="qkv", batch="1", kv_heads="1"),
    ]
    dropped = [
        (point(40, 48, 16, 48, gradients="qkv", **FEW), 0.25),
        (point(48, 48, 16, 48, batch="2", kv_heads="3", mask="causal", gradients="qkv"), 0.7),
        (point(1, 48, 16, 48, batch="5", kv_heads="12"), 0.5),
        (point(160, 200, 16, 200, batch="1", kv_heads="2"), 0.1),
    ]
    return [
        *(Step(RARE, "second derivatives", partial(judge_second, each, seed)) for each in twice),
        *(Step(RARE, "dropout", partial(judge_dropout, each, p, seed)) for each, p in dropped),
    ]


def traced_steps(seed: int) -> list[Step]:
    """Late: the compiler's import alone takes seconds."""
    points = [
        point(33, 33, 16, mask="causal", mode="compile", **FEW),
        point(17, 40, 16, mask="bool", scale="given", mode="compile", **FEW),
        point(50, 90, 16, mask="causal", mode="compile", **FEW),  # traced anew, with other sizes
    ]
    return [Step(TRACED, "torch.compile", partial(judge_traced, each, seed)) for each in points]


def judge_second(where: Point, seed: int, examinee: Examinee) -> Finding:
    """Right, or an error: torch's fused kernel has no second derivative either. Silently none is wrong."""
    call = replace(make_call(where, seed), is_documented=False, rows=None)
    generator = generator_of(seed, "directions")
    along = tuple(
        torch.randn(t.shape, generator=generator).to(t.dtype)
        for name, t in call.request.tensors.items()
        if name in call.request.gradients
    )
    words = f"{call.words}, second derivatives"
    return judge_call(examinee, replace(call, words=words, request=replace(call.request, directions=along)), seed)


def judge_traced(where: Point, seed: int, examinee: Examinee) -> Finding:
    """Right, or an error: not every kernel can be traced."""
    return judge_call(examinee, replace(make_call(where, seed), is_documented=False), seed)


def judge_dropout(where: Point, p: float, seed: int, examinee: Examinee) -> Finding:
    """Values are one-hot, D_v = S, so that the result is the weights: each is dropped or 1/(1-p) of what it was.

    The weights that were dropped are read from the result; the gradients must be those of just these. How many there
    are, and that heads, queries, batch entries and calls have draws of their own, is statistics.
    """
    call = make_call(where, seed)
    one_hot = torch.eye(where.S, dtype=call.request.v.dtype).expand_as(call.request.v).contiguous()
    request = replace(call.request, v=one_hot, dropout_p=p, seed=seed, cotangent=None, gradients=(), mode="no_grad")
    words = f"{call.words}, dropout_p {p:g}"

    def wrong(reason: str) -> Finding:
        return Finding("", "", words, "mismatch", reason, calls=4)

    beyond = examinee.domain.refusal(request.facts)
    reply = examinee.ask(replace(request, repeats=2))
    if reply.failure is not None:
        return failed(words, reply.failure, request, may_refuse=beyond is not None)
    first, second = reply.out
    again = examinee.ask(request)
    if again.failure is not None:
        return failed(words, again.failure, request)
    weights = weights_of(in_float64(request))  # (B, H, L, S)
    seen = weights > 0
    if not bool(first.isfinite().all()) or first.shape != weights.shape:
        return wrong(f"not finite, or of shape {tuple(first.shape)} instead of {tuple(weights.shape)}")
    if torch.equal(first, torch.zeros_like(first)) or bool((first[seen] != 0).all()):
        return wrong(f"{int((first[seen] == 0).sum())} of {int(seen.sum())} weights are dropped")
    if not torch.equal(again.out, first):
        return wrong("the same seed of torch gives another result")
    kept = (first != 0) | ~seen
    if reason := _statistics(kept, (second != 0) | ~seen, seen, p):
        return wrong(reason)
    factor = kept.double() / (1 - p)
    gradients = where.gradients
    if not gradients:
        return told(words, Held.of(request, generator_of(seed, words), dropped=factor).judge({"out": first}))
    asked = replace(request, cotangent=call.request.cotangent, gradients=gradients, mode="grad")
    reply = examinee.ask(asked)
    if reply.failure is not None:
        beyond = examinee.domain.refusal(asked.facts)
        return failed(words, reply.failure, asked, may_refuse=beyond is not None)
    if not torch.equal(reply.out != 0, first != 0):
        return wrong("the same seed of torch gives another result where gradients are asked for")
    held = Held.of(asked, generator_of(seed, words), dropped=factor)
    return replace(told(words, held.judge(reply.tensors)), calls=4)


def _statistics(kept: Tensor, later: Tensor, seen: Tensor, p: float) -> str:
    """What is wrong with the draws `kept` (B, H, L, S), and those of the next call; empty if nothing is."""
    n, dropped = int(seen.sum()), int((seen & ~kept).sum())
    if not abs(dropped - n * p) <= SIGMAS * math.sqrt(n * p * (1 - p)):
        return f"{dropped} of {n} weights are dropped at dropout_p {p:g}"
    neighbours = [("the next call", later, seen)]
    for dim, name in enumerate(("batch entry", "head", "query", "key")):
        for far in (n for n in TILES if n < kept.shape[dim]):
            word = f"the next {name}" if far == 1 else f"the {name} {far} further"
            neighbours.append((word, kept.roll(far, dim), seen & seen.roll(far, dim)))
    agree = p * p + (1 - p) * (1 - p)
    for name, other, both in neighbours:
        m, same = int(both.sum()), int((both & (kept == other)).sum())
        if not abs(same - m * agree) <= NEIGHBOURS * SIGMAS * math.sqrt(m * agree * (1 - agree)):
            return f"{100 * same / m:.0f} % of the weights are dropped as in {name}, by chance {100 * agree:.0f} %"
    return ""
