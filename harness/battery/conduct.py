"""What no single call shows: memory of earlier calls, results that later ones overwrite, gradients asked for late."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.battery.axes import FEW, Point, point
from harness.battery.call import Call, generator_of, make_call
from harness.battery.result import FAILING, Finding, worst_of
from harness.battery.steps import Step, failed, judge_call, told
from harness.battery.views import arranged
from harness.candidate.examinee import Examinee
from harness.candidate.request import Failure, Reply, Request
from harness.cell.bare import Held

GROUP = "conduct"
SAME = point(24, 40, 16, **FEW)
SQUARE = point(40, 40, 16, batch="2", kv_heads="3")  # all of one shape
LATER = 9  # calls during which a result must stay: buffers may be used in turn
THOUSAND = 1000
MOST_S = 3.0  # for the thousand calls: a slow kernel makes fewer


def conduct_steps(seed: int) -> list[Step]:
    """The cheap and telling ones first."""
    sequences: dict[str, Callable[[int], list[Call]]] = {
        "same shape, other numbers": _other_numbers,
        "same shape, other arguments": _other_arguments,
        "one input changed": _one_changed,
        "keys that grow": _growing,
        "large and small in turn": _shrinking,
        "two sequences in turn": _in_turn,
        "one query for all": _one_query,
        "strides of one input": _one_arranged,
        "no queries, no keys": _nothing,
        "all hidden": _all_hidden,
        "NaN and inf": _not_finite,
        "modes of torch": _modes,
        "threads at once": _at_once,
    }
    steps = [Step(GROUP, name, partial(judge_sequence, calls=calls, seed=seed)) for name, calls in sequences.items()]
    single: dict[str, Callable[..., Finding]] = {
        "results stay": results_stay,
        "inputs changed in place": changed_in_place,
        "one tensor as several inputs": one_tensor,
        "gradients asked for later": gradients_later,
        "inputs changed before gradients": changed_before_gradients,
        "strides of an incoming gradient": incoming_strides,
        "arguments left out": arguments_left_out,
        "after a call that fails": after_a_failure,
        "a thousand calls": a_thousand_calls,
    }
    return steps + [Step(GROUP, name, partial(run, seed=seed)) for name, run in single.items()]


def judge_sequence(examinee: Examinee, calls: Callable[[int], list[Call]], seed: int) -> Finding:
    """One call after the other, each by the rule; the first that is wrong speaks for all."""
    made = calls(seed)
    findings = []
    for number, call in enumerate(made, start=1):
        finding = judge_call(examinee, call, seed + number)
        if finding.status in FAILING:
            asked = tuple(each.request for each in made[:number])
            reason = f"call {number} of {len(made)}: {finding.reason}"
            return replace(finding, reason=reason, calls=number, requests=asked)
        findings.append(finding)
    worst = worst_of(finding.status for finding in findings)
    ratio = max((f.err_ratio for f in findings if f.err_ratio is not None), default=None)
    reason = next((f.reason for f in findings if f.status == worst), "")
    return Finding("", "", made[0].words, worst, reason, err_ratio=ratio, calls=len(made))


def _calls(points: Sequence[Point], seed: int) -> list[Call]:
    """Every one with numbers of its own."""
    return [make_call(each, seed + number) for number, each in enumerate(points)]


def _other_numbers(seed: int) -> list[Call]:
    return _calls([SAME] * 4, seed)


def _other_arguments(seed: int) -> list[Call]:
    """What a memory by shape alone would not tell apart, and a scale that is an integer."""
    masked: dict[str, Any] = {"mask_shape": "(B,1,L,S)", **FEW}
    points = [
        SAME,
        point(24, 40, 16, mask="causal", **FEW),
        SAME,
        point(24, 40, 16, scale="given", **FEW),
        point(24, 40, 16, scale="given", **FEW),
        *[point(24, 40, 16, mask="bool", **masked)] * 2,
        point(24, 40, 16, mask="float", **masked),
        point(24, 40, 16, mask="dead rows", **masked),
        point(24, 40, 16, mask="-inf rows", **masked),
        point(24, 40, 16, mask="dead entries", **masked),
        point(24, 40, 16, dtype="bfloat16", **FEW),
        point(24, 40, 16, gradients="qkv", **FEW),
        point(24, 40, 16, mask="causal", gradients="qkv", **FEW),
        point(24, 40, 16, dtype="float64", **FEW),
        SAME,
    ]
    made = _calls(points, seed)
    # A mask of the same shape that hides as many keys, but others.
    masked_call = make_call(point(24, 40, 16, mask="bool", **masked), seed)
    mask = masked_call.request.mask
    assert mask is not None
    turned = replace(masked_call, request=replace(masked_call.request, mask=mask.roll(1, -1)))
    whole = replace(made[0], words=f"{made[0].words}, scale 2", request=replace(made[0].request, scale=2))
    return [*made, whole, masked_call, turned]


def _one_changed(seed: int) -> list[Call]:
    """All inputs but one are those of the call before."""
    call, other = make_call(SAME, seed), make_call(SAME, seed + 1)
    made = [call]
    for name in ("v", "k", "q"):
        tensor: Tensor = getattr(other.request, name)
        made.append(replace(made[-1], request=replace(made[-1].request, **{name: tensor})))  # type: ignore[arg-type]
    return [*made, call]


def _growing(seed: int) -> list[Call]:
    """Decoding: one more key in every step, the earlier ones as they were; then another, shorter sequence."""
    lengths = (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129)
    whole = make_call(point(1, 129, 16, **FEW), seed)
    queries = torch.randn(len(lengths), *whole.request.q.shape, generator=generator_of(seed, "growing"))
    made = []
    for S, q in zip(lengths, queries, strict=True):
        k, v = (t[:, :, :S] for t in (whole.request.k, whole.request.v))
        words = f"decoding: {point(1, S, 16, **FEW).words}"
        made.append(replace(whole, words=words, request=replace(whole.request, q=q, k=k, v=v)))
    return [*made, *_calls([point(1, S, 16, **FEW) for S in (3, 4, 17)], seed + 50)]


def _shrinking(seed: int) -> list[Call]:
    sizes = [(70, 130), (17, 33), (64, 64), (3, 5), (130, 70), (1, 1), (33, 129)]
    return _calls([point(L, S, 16, **FEW) for L, S in sizes], seed)


def _in_turn(seed: int) -> list[Call]:
    one, other = (
        _calls([point(1, S, 16, mask=mask, **FEW) for S in (8, 9, 10)], seed + start)
        for start, mask in ((0, "none"), (90, "right padding"))
    )
    return [call for pair in zip(one, other, strict=True) for call in pair]


def _one_query(seed: int) -> list[Call]:
    """All queries, or all of a batch, are one by strides of 0."""
    call = make_call(SAME, seed)
    q = call.request.q
    return [
        replace(call, words=f"{call.words}, queries expanded", request=replace(call.request, q=one.expand(q.shape)))
        for one in (q[:, :, :1], q[:1, :1])
    ]


def _one_arranged(seed: int) -> list[Call]:
    """One of q, k and v as a view of another kind than the other two: keys of a cache, values of a packed product, what
    the batch or the heads share."""
    made = []
    for name in ("q", "k", "v"):
        for layout in ("heads last", "longer", "channels", "columns", "expanded", "shared heads"):
            call = make_call(SQUARE, seed)
            view: Any = {name: arranged(getattr(call.request, name), layout)}
            words = f"{call.words}, {name} alone {layout}"
            made.append(replace(call, words=words, request=replace(call.request, **view)))
    return made


def _all_hidden(seed: int) -> list[Call]:
    """A mask that hides every key from every query: 0, and nothing else is touched."""
    made = []
    for kind, number in (("bool", False), ("float", float("-inf"))):
        call = make_call(point(24, 40, 16, mask=kind, mask_shape="(B,1,L,S)", gradients="qkv", **FEW), seed)
        mask = call.request.mask
        assert mask is not None
        words, hidden = f"{call.words}, all hidden", torch.full_like(mask, number)
        made.append(replace(call, words=words, request=replace(call.request, mask=hidden)))
        without = replace(call.request, mask=hidden, gradients=(), cotangent=None, mode="no_grad")
        made.append(replace(call, words=f"{words}, no gradients", request=without))
    return made


def _nothing(seed: int) -> list[Call]:
    """No queries, or no keys, are answered by torch: nothing, and zeros. A kernel may as well refuse."""
    points = [point(0, 7, 16, **FEW), point(7, 0, 16, **FEW)]
    return [replace(call, is_documented=False) for call in _calls(points, seed)]


def _not_finite(seed: int) -> list[Call]:
    """What is attended shows: a NaN of a query in its row, of a key in all that see it, of a value in its channel."""
    nan, inf, made = float("nan"), float("inf"), []
    places = (("q", (1, 2, 5, 3), nan), ("k", (0, 1, 7, 2), nan), ("v", (1, 0, 9, 4), nan), ("v", (1, 0, 9, 4), inf))
    for name, place, number in places:
        call = make_call(SAME, seed)
        changed: Any = {name: getattr(call.request, name).clone()}
        changed[name][place] = number
        words = f"{call.words}, {number} in {name}"
        made.append(replace(call, words=words, request=replace(call.request, **changed)))
    return made


def _modes(seed: int) -> list[Call]:
    """A call may raise where torch has no deterministic algorithm; float64 as the default dtype is nobody's excuse."""
    points = [
        point(24, 40, 16, mask=mask, gradients=gradients, **FEW)
        for mask, gradients in (("none", "qkv"), ("causal", "qkv"), ("right padding", "-"), ("float", "-"))
    ]
    return [
        replace(call, words=f"{call.words}, mode {mode}", is_documented=mode != "deterministic",
                request=replace(call.request, mode=mode))
        for mode in ("float64", "deterministic")
        for call in _calls(points, seed)
    ]  # fmt: skip


def _at_once(seed: int) -> list[Call]:
    """Each entry of a batch in a Python thread of its own, as a server calls: no workspace may be shared."""
    points = [point(48, 96, 32, mask=mask, batch="4", kv_heads="2", mode="threads") for mask in ("none", "causal")]
    return _calls(points * 4, seed)


def _asked(examinee: Examinee, request: Request) -> tuple[Reply, Finding | None]:
    """The reply, and what it means if it is no result."""
    beyond = examinee.domain.refusal(request.facts)
    reply = examinee.ask(request)
    words = SAME.words
    if reply.failure is None:
        return reply, None
    return reply, failed(words, reply.failure, request, may_refuse=beyond is not None)


def results_stay(examinee: Examinee, seed: int) -> Finding:
    """What was returned is the caller's: no later call changes it."""
    words, calls = f"{SAME.words}, held while others are asked", _calls([SAME] * (1 + LATER), seed)
    first, problem = _asked(examinee, replace(calls[0].request, hold=True))
    if problem is not None:
        return problem
    assert first.ticket is not None
    for call in calls[1:]:
        examinee.ask(replace(call.request, hold=False))
    later = examinee.reread(first.ticket)
    examinee.release(first.ticket)
    if not torch.equal(later, first.out):
        return Finding("", "", words, "mismatch", "a result was overwritten by later calls", calls=len(calls))
    return Finding("", "", words, "ok", calls=len(calls))


def changed_in_place(examinee: Examinee, seed: int) -> Finding:
    """The tensors of the call before, each the same object at the same place, with other numbers in them."""
    where = point(24, 40, 16, mask="bool", mask_shape="(B,1,L,S)", **FEW)
    words, calls = f"{where.words}, changed in place", _calls([where, where], seed)
    own: dict[str, Any] = {name: t.clone() for name, t in calls[0].request.tensors.items()}
    first, problem = _asked(examinee, replace(calls[0].request, hold=True, **own))
    if problem is not None:
        return problem
    finding = judge_call(examinee, replace(calls[1], request=replace(calls[1].request, reuse=first.ticket)), seed)
    assert first.ticket is not None
    examinee.release(first.ticket)
    return replace(finding, call=words, calls=2)


def one_tensor(examinee: Examinee, seed: int) -> Finding:
    """Self-attention without projections: q, k and v are one object; or k and v are, as in latent attention."""
    square = make_call(SQUARE, seed)
    q = square.request.q
    cotangent = torch.randn(q.shape, generator=generator_of(seed, "tied"))
    with_gradient = {"mode": "grad", "cotangent": cotangent}
    ties: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("q", "k", "v"), {"k": q, "v": q}),
        (("q", "k"), {"k": q}),
        (("k", "v"), {"v": square.request.k}),
        (("q", "k"), {"k": q, "is_causal": True}),
        # With the gradient of that one tensor, which is the sum of all that it stands for.
        (("k", "v"), {"v": square.request.k, "gradients": ("k",), **with_gradient}),
        (("q", "k", "v"), {"k": q, "v": q, "gradients": ("q",), **with_gradient}),
    ]
    calls = [
        Call(f"{square.words}, {' is '.join(tied)}{', gradient of it' if 'gradients' in same else ''}",
             replace(square.request, tied=tied, **same), None)
        for tied, same in ties
    ]  # fmt: skip
    return judge_sequence(examinee, lambda _: calls, seed)


def gradients_later(examinee: Examinee, seed: int) -> Finding:
    """Two results are held; the first one's gradients are asked for twice, then the second's."""
    where = point(24, 40, 16, mask="causal", gradients="qkv", **FEW)
    words = f"{where.words}, two results held"
    calls = _calls([where, where], seed)
    tickets = []
    for call in calls:
        reply, problem = _asked(examinee, replace(call.request, hold=True, cotangent=None))
        if problem is not None:
            return problem
        tickets.append((call, reply))
    verdicts = []
    for place, number in ((0, 1), (0, 2), (1, 3)):
        call, reply = tickets[place]
        cotangent = torch.randn(reply.out.shape, generator=generator_of(seed, "cotangent", number))
        assert reply.ticket is not None
        answer = examinee.differentiate(reply.ticket, cotangent)
        if isinstance(answer, Failure):
            return failed(words, answer, call.request)
        held = Held.of(replace(call.request, cotangent=cotangent), generator_of(seed, number))
        verdicts += held.judge({"out": reply.out, **answer})
    for _, reply in tickets:
        if reply.ticket is not None:
            examinee.release(reply.ticket)
    return replace(told(words, verdicts), calls=len(calls))


def changed_before_gradients(examinee: Examinee, seed: int) -> Finding:
    """The inputs get other numbers in place between a call and its gradients, as by a cache: an error, as
    in torch, or the gradients of the numbers that they were. Silently a mixture of both is wrong."""
    where = point(24, 40, 16, gradients="qkv", batch="2", kv_heads="3")  # no groups: no copies of k and v
    words, (call, other) = f"{where.words}, inputs changed before the gradients", _calls([where, where], seed)
    own: dict[str, Any] = {name: t.clone() for name, t in call.request.tensors.items()}
    reply, problem = _asked(examinee, replace(call.request, hold=True, cotangent=None, **own))
    if problem is not None:
        return problem
    ticket, cotangent = reply.ticket, call.request.cotangent
    assert ticket is not None and cotangent is not None
    examinee.ask(replace(other.request, reuse=ticket, gradients=(), cotangent=None, mode="no_grad"))
    answer = examinee.differentiate(ticket, cotangent)
    examinee.release(ticket)
    if isinstance(answer, Failure):
        return Finding("", "", words, "ok", calls=2)
    held = Held.of(call.request, generator_of(seed, words))
    return replace(told(words, held.judge({"out": reply.out, **answer})), calls=2)


def incoming_strides(examinee: Examinee, seed: int) -> Finding:
    """The gradient that arrives is one number, expanded (`out.sum().backward()`), or a transposed view."""
    call = make_call(point(24, 40, 16, gradients="qkv", **FEW), seed)
    given = call.request.cotangent
    assert given is not None
    views = {
        "of a plain sum": torch.ones((), dtype=given.dtype).expand(given.shape),
        "heads last": arranged(given, "heads last"),
        "columns": arranged(given, "columns"),
    }
    calls = [
        replace(call, words=f"{call.words}, incoming gradient {words}", request=replace(call.request, cotangent=view))
        for words, view in views.items()
    ]
    return judge_sequence(examinee, lambda _: calls, seed)


def arguments_left_out(examinee: Examinee, seed: int) -> Finding:
    """`f(q, k, v)`: the defaults are SDPA's, no mask, not causal, 1 / sqrt(D), no dropout."""
    call = make_call(point(24, 40, 16, batch="2", kv_heads="4"), seed)
    words = f"{call.words}, arguments left out"
    return judge_call(examinee, replace(call, words=words, request=replace(call.request, brief=True)), seed)


def after_a_failure(examinee: Examinee, seed: int) -> Finding:
    """A call that cannot be answered (other dims of q and k) leaves nothing behind."""
    where = point(24, 40, 16, scale="given", **FEW)
    good, other = make_call(where, seed), make_call(SAME, seed + 1)
    examinee.ask(replace(good.request, q=good.request.q[..., :-1].contiguous(), scale=3.0))
    calls = [replace(call, words=f"{call.words}, after a call that fails") for call in (good, other)]
    return judge_sequence(examinee, lambda _: calls, seed)


def a_thousand_calls(examinee: Examinee, seed: int) -> Finding:
    """The same small call again and again: every answer is right, and so is that to other numbers afterwards."""
    call = make_call(point(3, 5, 8, **FEW), seed)
    started = time.perf_counter()
    finding = judge_call(examinee, call, seed)
    if finding.status != "ok":
        return finding
    count = max(20, min(THOUSAND, int(MOST_S / (time.perf_counter() - started) * 10)))
    words = f"{call.words}, {count} times"
    reply, problem = _asked(examinee, replace(call.request, repeats=count))
    if problem is not None:
        return problem
    held = Held.of(call.request, generator_of(seed, "thousand"))
    golden = held.yardsticks["out"].golden.reshape(call.request.q.shape)
    error = (reply.out.double() - golden).flatten(1).abs().amax(1)  # (count,)
    worst = int(error.nan_to_num(float("inf")).argmax())
    found = told(words, held.judge({"out": reply.out[worst]}))
    if found.status in FAILING:
        return replace(found, reason=f"call {worst + 1} of {count}: {found.reason}", calls=count)
    after = judge_call(examinee, make_call(point(3, 5, 8, **FEW), seed + 1), seed)
    return replace(after, call=words, calls=count + 2)
