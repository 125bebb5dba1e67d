"""Ways to be wrong, each of them a whole attention: the saboteurs, and what a call may be misread as.

A reading maps the call that was made to the one that was understood. It can stand before any other guess: so two bugs
at once are a guess, too.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harness.cell.golden import Problem
from harness.kernels.call import AttentionCall, Kernel, four_dims
from harness.mutants.saboteurs import saboteur as core
from harness.mutants.saboteurs.precision import rounded, ten_bits
from harness.mutants.saboteurs.saboteur import SABOTEURS, attend, load_all
from harness.mutants.saboteurs.softmax import exponentials

Run = Callable[[Problem], Tensor]
Reading = Callable[[Problem], Problem]
LOG2_E = math.log2(math.e)
TILES = (8, 16, 32, 64, 128, 256, 512, 1024)
INF = float("inf")
PLAIN, WITH_NUMBER, SABOTEUR = 0, 1, 2


@dataclass(frozen=True)
class Guess:
    """`make` gives a fresh one, for some remember earlier calls."""

    name: str
    words: str  # completes "computes what you get with ..."
    make: Callable[[], Run]
    reading: Reading | None = None  # where that is all it is: it can stand before others
    rank: int = PLAIN  # of guesses that give the same answer the lowest speaks
    kernel: Callable[[], Callable[..., Tensor]] | None = None  # with SDPA's signature: it may write into its inputs


@dataclass(frozen=True)
class Family:
    """A right attention but for one number, found by least squares; `right`: the number of a right kernel."""

    name: str
    run: Callable[[Problem, float], Tensor]
    words: Callable[[float, float], str]  # number, its uncertainty
    starts: tuple[float, ...]
    right: float = 1.0


def call_of(problem: Problem) -> AttentionCall:
    mask = None if problem.mask is None else four_dims(problem.mask)
    given = problem.scale is not None
    scale = problem.scale if problem.scale is not None else problem.q.shape[-1] ** -0.5
    return AttentionCall(scale=scale, mask=mask, causal=problem.is_causal, dropout_p=problem.dropout_p, is_default_scale=not given)


def attended(problem: Problem, **steps: Any) -> Tensor:
    return attend(problem.q, problem.k, problem.v, call_of(problem), **steps)[0]


def _of_kernel(kernel: Kernel) -> Run:
    """On copies: some saboteurs write into their inputs."""
    return lambda problem: kernel.run(*(_copied(t) for t in (problem.q, problem.k, problem.v)), call_of(problem))[0]


def _copied(t: Tensor) -> Tensor:
    """With its strides, and what lies around it."""
    if t.requires_grad:
        return t.clone()
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride())


@functools.cache
def all_guesses() -> tuple[Guess, ...]:
    saboteurs = [
        Guess(name, _words_of(name, saboteur.stands_for), functools.partial(_fresh, saboteur.kernel), rank=SABOTEUR,
              kernel=functools.partial(as_function, saboteur.kernel))
        for name, saboteur in ((name, SABOTEURS[name]) for name in load_all())
        if saboteur.kernel is not None
    ]
    readings = [
        Guess(name, words, functools.partial(_read_first, reading, attended), reading)
        for name, words, reading in _readings()
    ]
    steps = [Guess(name, words, functools.partial(_same, run)) for name, words, run in _steps()]
    return (*readings, *steps, *saboteurs)


def _fresh(make: Callable[[], Kernel]) -> Run:
    return _of_kernel(make())


def as_function(make: Callable[[], Kernel]) -> Callable[..., Tensor]:
    kernel = make()

    def function(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        return kernel.run(q, k, v, call_of(Problem(q, k, v, attn_mask, dropout_p, is_causal, scale)))[0]

    return function


def _same(run: Run) -> Run:
    return run


def _read_first(reading: Reading, run: Run) -> Run:
    return lambda problem: run(reading(problem))


def _words_of(name: str, stands_for: str) -> str:
    return f"{name.replace('_', ' ')} ({stands_for.rstrip('.')})"


def pair(reading: Guess, other: Guess) -> Guess:
    """Two bugs at once."""
    assert reading.reading is not None
    first = reading.reading

    def make() -> Run:
        return _read_first(first, other.make())

    both = None
    if other.reading is not None:
        second = other.reading
        both = lambda problem: second(first(problem))  # noqa: E731
    return Guess(f"{reading.name} + {other.name}", f"both {reading.words} and {other.words}", make, both, other.rank)


# ---- readings -------------------------------------------------------------------------------------------------------


def _bool_of(problem: Problem, kept: Tensor) -> Problem:
    """Only the keys that are `kept`, (L or 1, S), besides what the call hides."""
    mask = problem.mask
    if mask is None:
        return replace(problem, mask=kept.expand(problem.q.shape[2], problem.k.shape[2]))
    if mask.dtype == torch.bool:
        return replace(problem, mask=mask & kept)
    return replace(problem, mask=mask.masked_fill(~kept, -INF))


def _places(problem: Problem) -> tuple[Tensor, Tensor]:
    """Of rows (L, 1) and keys (S,)."""
    return torch.arange(problem.q.shape[2])[:, None], torch.arange(problem.k.shape[2])


def _causal_by(problem: Problem, offset: Callable[[Problem], int]) -> Problem:
    if not problem.is_causal:
        return problem
    i, j = _places(problem)
    return _bool_of(replace(problem, is_causal=False), j <= i + offset(problem))


def _hides(problem: Problem, kept: Callable[[Tensor, int], Tensor]) -> Problem:
    """`kept` of the keys' places and S."""
    _, j = _places(problem)
    chosen = kept(j, len(j))
    return problem if bool(chosen.all()) else _bool_of(problem, chosen[None])


def _mask_by(problem: Problem, change: Callable[[Tensor], Tensor | None], *, bias: bool | None = None) -> Problem:
    if problem.mask is None or (bias is not None and problem.mask.is_floating_point() != bias):
        return problem
    return replace(problem, mask=change(four_dims(problem.mask)))


def _scale_by(problem: Problem, change: Callable[[float], float]) -> Problem:
    return replace(problem, scale=change(call_of(problem).scale))


def _tensor_by(problem: Problem, name: str, change: Callable[[Tensor], Tensor]) -> Problem:
    return replace(problem, **{name: change(getattr(problem, name))})


def _in_groups(problem: Problem, order: Callable[[int, int], list[int]]) -> Problem:
    """Query head h reads key head order(H, H_kv)[h]."""
    H, H_kv = problem.q.shape[1], problem.k.shape[1]
    chosen = order(H, H_kv)
    return replace(problem, k=problem.k[:, chosen], v=problem.v[:, chosen])


def _to_bits(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: rounded(t, lambda x: x.to(dtype).to(x.dtype))


def _to_eight(t: Tensor) -> Tensor:
    step = t.detach().abs().amax().clamp(min=1e-30) / 127
    return rounded(t, lambda x: (x / step).round() * step)


WIDTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": _to_bits(torch.bfloat16),
    "float16": _to_bits(torch.float16),
    "10 bits (TF32)": lambda t: rounded(t, ten_bits),
    "8-bit integers": _to_eight,
}


def _viewed(t: Tensor) -> Tensor:
    """(B, L, H, D) taken for (B, H, L, D)."""
    return t.transpose(1, 2).reshape(t.shape)


def _readings() -> Iterator[tuple[str, str, Reading]]:
    yield "mask ignored", "the mask ignored", lambda p: replace(p, mask=None)
    yield "causal ignored", "the causal flag ignored", lambda p: replace(p, is_causal=False)
    yield (
        "causal ignored beside a mask", "the causal flag ignored where there is a mask",
        lambda p: replace(p, is_causal=p.is_causal and p.mask is None),
    )  # fmt: skip
    yield (
        "mask ignored beside causal", "the mask ignored where the call is causal",
        lambda p: replace(p, mask=None) if p.is_causal else p,
    )  # fmt: skip
    yield (
        "causal lower right", "causal aligned at the lower right corner instead of the upper left one",
        lambda p: _causal_by(p, lambda p: p.k.shape[2] - p.q.shape[2]),
    )  # fmt: skip
    for n in (-3, -2, -1, 1, 2, 3):
        more = f"{abs(n)} {'keys' if abs(n) > 1 else 'key'} {'more' if n > 0 else 'fewer'}"
        yield f"causal {n:+}", f"causal off by {n:+}: each row sees {more}", lambda p, n=n: _causal_by(p, lambda _: n)  # type: ignore[misc]
    yield (
        "always causal", "a causal mask that nobody asked for",
        lambda p: p if p.is_causal else replace(p, is_causal=True),
    )  # fmt: skip
    yield "mask inverted", "the bool mask inverted", lambda p: _mask_by(p, torch.logical_not, bias=False)
    yield (
        "mask transposed", "the mask transposed",
        lambda p: _mask_by(p, lambda m: m.mT if m.shape[-1] == m.shape[-2] else m),
    )  # fmt: skip
    for dim, name in ((0, "batch entry"), (1, "head"), (2, "row")):
        for end, one in (("first", 0), ("last", -1)):
            yield (
                f"mask of the {end} {name}", f"the mask of the {end} {name} for all",
                lambda p, dim=dim, one=one: _mask_by(p, lambda m: m.select(dim, one).unsqueeze(dim)),  # type: ignore[misc]
            )  # fmt: skip
    for name, change in (("negated", torch.neg), ("doubled", lambda m: 2 * m), ("clamped at 0", lambda m: m.clamp(max=0))):
        yield f"mask {name}", f"the float mask {name}", lambda p, change=change: _mask_by(p, change, bias=True)  # type: ignore[misc]
    yield (
        "mask divided by the scale", "the float mask divided by the scale",
        lambda p: _mask_by(p, lambda m: m / call_of(p).scale, bias=True),
    )  # fmt: skip
    yield (
        "mask only hides", "a float mask that only hides: its finite numbers are not added",
        lambda p: _mask_by(p, lambda m: m.masked_fill(m.isfinite(), 0.0), bias=True),
    )  # fmt: skip
    for name, to in list(WIDTHS.items())[:2]:
        yield f"mask in {name}", f"the float mask rounded to {name}", lambda p, to=to: _mask_by(p, to, bias=True)  # type: ignore[misc]
    yield "scale ignored", "the scale argument ignored: 1/sqrt(D) always", lambda p: replace(p, scale=None)
    yield "scale missing", "no scale at all", lambda p: _scale_by(p, lambda s: 1.0)
    yield "scale squared", "the scale applied twice", lambda p: _scale_by(p, lambda s: s * abs(s))
    yield "scale positive", "the absolute value of the scale", lambda p: _scale_by(p, abs)
    yield (
        "scale beside the default", "the scale argument on top of 1/sqrt(D)",
        lambda p: p if p.scale is None else replace(p, scale=p.scale * p.q.shape[-1] ** -0.5),
    )  # fmt: skip
    yield (
        "scale 0 as none", "a scale of 0 taken for none given",
        lambda p: replace(p, scale=p.scale or None),
    )  # fmt: skip
    yield "scale 1/D", "1/D for 1/sqrt(D)", lambda p: p if p.scale is not None else replace(p, scale=1 / p.q.shape[-1])
    for name, power in (("exp2 without log2 e", 1 / LOG2_E), ("log2 e without exp2", LOG2_E)):
        yield name, f"{name} in the scale", lambda p, power=power: _scale_by(p, lambda s: s * power)  # type: ignore[misc]
    of_width: tuple[tuple[str, Callable[[Problem], int]], ...] = (
        ("D_v", lambda p: p.v.shape[-1]),
        ("H * D", lambda p: p.q.shape[1] * p.q.shape[-1]),
        ("S", lambda p: p.k.shape[2]),
        ("L", lambda p: p.q.shape[2]),
        ("D rounded up to a power of two", lambda p: 1 << (p.q.shape[-1] - 1).bit_length()),
        ("D rounded up to a multiple of 8", lambda p: -(-p.q.shape[-1] // 8) * 8),
    )  # fmt: skip
    for name, width in of_width:
        yield (
            f"scale of {name}", f"1/sqrt({name}) for 1/sqrt(D)",
            lambda p, width=width: p if p.scale is not None else replace(p, scale=width(p) ** -0.5),  # type: ignore[misc]
        )  # fmt: skip
    yield from _key_readings()
    yield from _head_readings()
    for name in ("q", "k", "v"):
        for width_name, to in WIDTHS.items():
            yield f"{name} in {width_name}", f"{name} rounded to {width_name}", lambda p, n=name, to=to: _tensor_by(p, n, to)  # type: ignore[misc]
    for width_name, to in WIDTHS.items():
        yield (
            f"inputs in {width_name}", f"q, k and v rounded to {width_name}",
            lambda p, to=to: replace(p, q=to(p.q), k=to(p.k), v=to(p.v)),  # type: ignore[misc]
        )  # fmt: skip
        yield (
            f"keys and values in {width_name}", f"k and v rounded to {width_name}",
            lambda p, to=to: replace(p, k=to(p.k), v=to(p.v)),  # type: ignore[misc]
        )  # fmt: skip
        yield (
            f"scaled q in {width_name}", f"the scaled queries rounded to {width_name}",
            lambda p, to=to: replace(p, q=to(p.q * call_of(p).scale), scale=1.0),  # type: ignore[misc]
        )  # fmt: skip


def _key_readings() -> Iterator[tuple[str, str, Reading]]:
    """Keys that are left out of a sum."""
    yield "first key missing", "the first key left out", lambda p: _hides(p, lambda j, S: j > 0)
    yield "last key missing", "the last key left out", lambda p: _hides(p, lambda j, S: j < S - 1)
    for T in TILES:
        yield (
            f"last partial tile of {T} missing", f"the keys of the last, partial tile of {T} left out",
            lambda p, T=T: _hides(p, lambda j, S: (j < S // T * T) | (S < T)),  # type: ignore[misc]
        )  # fmt: skip
        yield (
            f"first tile of {T} missing", f"the first tile of {T} keys left out where there are more",
            lambda p, T=T: _hides(p, lambda j, S: (j >= T) | (S <= T)),  # type: ignore[misc]
        )  # fmt: skip
        yield (
            f"keys beyond {T} missing", f"the keys beyond the first {T} left out",
            lambda p, T=T: _hides(p, lambda j, S: j < T),  # type: ignore[misc]
        )  # fmt: skip
        yield (
            f"first key of tiles of {T} missing", f"the first key of every further tile of {T} left out",
            lambda p, T=T: _hides(p, lambda j, S: (j % T > 0) | (j == 0)),  # type: ignore[misc]
        )  # fmt: skip
        yield (
            f"last key of tiles of {T} missing", f"the last key of every tile of {T} left out",
            lambda p, T=T: _hides(p, lambda j, S: (j % T < T - 1) | (j == S - 1)),  # type: ignore[misc]
        )  # fmt: skip
    for W in (*TILES, 2048, 4096):
        yield f"window of {W}", f"a window that nobody asked for: only the last {W} keys are seen", lambda p, W=W: _window(p, W)  # type: ignore[misc]


def _window(problem: Problem, W: int) -> Problem:
    i, j = _places(problem)
    kept = j > i - W
    return problem if bool(kept.all()) else _bool_of(problem, kept)


def _head_readings() -> Iterator[tuple[str, str, Reading]]:
    orders: tuple[tuple[str, str, Callable[[int, int], list[int]]], ...] = (
        ("kv heads tiled", "key heads tiled instead of repeated: query head h reads key head h mod H_kv",
         lambda H, K: [h % K for h in range(H)]),
        ("kv head 0 for all", "key head 0 for all query heads", lambda H, K: [0] * H),
        ("kv head h clamped", "query head h reading key head min(h, H_kv - 1)", lambda H, K: [min(h, K - 1) for h in range(H)]),
        ("kv heads reversed", "key heads in reverse order", lambda H, K: [K - 1 - h * K // H for h in range(H)]),
        ("kv heads one further", "each query head reading the next key head", lambda H, K: [(h * K // H + 1) % K for h in range(H)]),
    )  # fmt: skip
    for name, words, order in orders:
        yield name, words, lambda p, order=order: _in_groups(p, order)  # type: ignore[misc]
    for name in ("q", "k", "v"):
        for dim, axis in ((1, "heads"), (0, "batch entries"), (2, "rows" if name == "q" else "keys"), (3, "channels")):
            for by in (1, -1):
                yield (
                    f"{name} {axis} rotated by {by:+}", f"the {axis} of {name} rotated by {by:+}",
                    lambda p, n=name, d=dim, by=by: _tensor_by(p, n, lambda t: t.roll(by, d)),  # type: ignore[misc]
                )  # fmt: skip
            yield (
                f"{name} {axis} reversed", f"the {axis} of {name} in reverse order",
                lambda p, n=name, d=dim: _tensor_by(p, n, lambda t: t.flip(d)),  # type: ignore[misc]
            )  # fmt: skip
            if dim < 2:
                yield (
                    f"{name} of the first of its {axis}", f"the first of the {axis} of {name} for all",
                    lambda p, n=name, d=dim: _tensor_by(p, n, lambda t: t.narrow(d, 0, 1).expand(t.shape)),  # type: ignore[misc]
                )  # fmt: skip
        yield f"{name} viewed", f"{name} as (B, L, H, D) viewed as (B, H, L, D)", lambda p, n=name: _tensor_by(p, n, _viewed)  # type: ignore[misc]
        yield f"{name} transposed", f"{name} with length and channels exchanged", lambda p, n=name: _tensor_by(p, n, lambda t: t.mT.reshape(t.shape))  # type: ignore[misc]
        yield f"{name} zero", f"{name} taken for zeros", lambda p, n=name: _tensor_by(p, n, torch.zeros_like)  # type: ignore[misc]
    yield "q and k exchanged", "q and k exchanged", lambda p: replace(p, q=p.k, k=p.q) if p.q.shape == p.k.shape else p
    yield "k and v exchanged", "k and v exchanged", lambda p: replace(p, k=p.v, v=p.k) if p.k.shape == p.v.shape else p


# ---- steps ----------------------------------------------------------------------------------------------------------


def _steps() -> Iterator[tuple[str, str, Run]]:
    yield "weights not normalised", "weights that are not divided by their sum", lambda p: attended(p, normalise=exponentials)
    yield "sigmoid", "a sigmoid for the softmax", lambda p: attended(p, normalise=torch.sigmoid)
    yield "product added to q", "the queries added to the output", lambda p: attended(p) + p.q if p.q.shape[-1] == p.v.shape[-1] else attended(p)
    for name, to in list(WIDTHS.items())[:3]:
        yield (
            f"scores in {name}", f"scores rounded to {name}",
            lambda p, to=to: attended(p, score=lambda q, k, c: to(core.score(q, k, c))),  # type: ignore[misc]
        )  # fmt: skip
        yield (
            f"products in {name}", f"q k^T rounded to {name} before it is scaled",
            lambda p, to=to: attended(p, score=lambda q, k, c: _masked(to(q @ k.mT) * c.scale, c)),  # type: ignore[misc]
        )  # fmt: skip
        yield (
            f"weights in {name}", f"weights rounded to {name}",
            lambda p, to=to: attended(p, normalise=lambda s: to(core.normalise(s))),  # type: ignore[misc]
        )  # fmt: skip
        yield (
            f"exponentials in {name}", f"exponentials rounded to {name} before they are summed",
            lambda p, to=to: attended(p, normalise=lambda s: _divided(to(exponentials(s)))),  # type: ignore[misc]
        )  # fmt: skip
        yield f"output in {name}", f"the output rounded to {name}", lambda p, to=to: to(attended(p))  # type: ignore[misc]
    for dim, axis in ((1, "heads"), (0, "batch entries"), (2, "rows"), (3, "channels")):
        yield f"output {axis} reversed", f"the output's {axis} in reverse order", lambda p, d=dim: attended(p).flip(d)  # type: ignore[misc]
        for by in (1, -1):
            yield f"output {axis} rotated by {by:+}", f"the output's {axis} rotated by {by:+}", lambda p, d=dim, by=by: attended(p).roll(by, d)  # type: ignore[misc]
        for one, end in ((0, "first"), (-1, "last")):
            yield f"{end} of the output's {axis} zero", f"the {end} of the output's {axis} never written (0)", lambda p, d=dim, o=one: _zeroed(attended(p), d, o)  # type: ignore[misc]
    yield "output transposed", "the output's rows and channels exchanged", lambda p: (o := attended(p)).mT.reshape(o.shape)
    for T in TILES:
        yield (
            f"partial row tile of {T} unwritten", f"the rows of the last, partial tile of {T} never written (0)",
            lambda p, T=T: _cut_rows(attended(p), T),  # type: ignore[misc]
        )  # fmt: skip
        for what in ("sum", "output", "sum and output"):
            yield (
                f"{what} not rescaled, tiles of {T}", f"{what} not rescaled when a tile of {T} keys brings a new maximum",
                lambda p, T=T, what=what: attended(p, normalise=lambda s: _not_rescaled(s, T, what)),  # type: ignore[misc]
            )  # fmt: skip
        yield (
            f"last tile of {T} overlaps", f"the last tile of {T} keys moved back to fit, and keys counted twice",
            lambda p, T=T: attended(p, normalise=lambda s: _overlapping(s, T)),  # type: ignore[misc]
        )  # fmt: skip
        yield (
            f"zero keys up to a multiple of {T}", f"keys padded with zeros to a multiple of {T}, and the padding attended",
            lambda p, T=T: attended(p, normalise=lambda s: _padded(s, T)),  # type: ignore[misc]
        )  # fmt: skip
        yield (
            f"last tile of {T} alone", f"the sum and output of the last tile of {T} keys alone",
            lambda p, T=T: attended(p, normalise=lambda s: core.normalise(s.masked_fill(_before_last(s, T), -INF))),  # type: ignore[misc]
        )  # fmt: skip


def _masked(scores: Tensor, call: AttentionCall) -> Tensor:
    return scores if call.bias is None else scores + call.bias.to(scores.dtype)


def _divided(raised: Tensor) -> Tensor:
    return raised / raised.sum(-1, keepdim=True)


def _zeroed(out: Tensor, dim: int, index: int) -> Tensor:
    kept = torch.ones(out.shape[dim], dtype=out.dtype)
    kept[index] = 0
    return out * kept.view([-1 if d == dim else 1 for d in range(out.ndim)])


def _cut_rows(out: Tensor, T: int) -> Tensor:
    L = out.shape[2]
    kept = (torch.arange(L) < L // T * T) | (L < T)
    return out * kept[:, None].to(out.dtype)


def _tiled_max(scores: Tensor, T: int) -> Tensor:
    """exp(final max - running max) for each key, by its tile."""
    S = scores.shape[-1]
    padded = torch.nn.functional.pad(scores.detach(), (0, -S % T), value=-INF)
    running = padded.unflatten(-1, (-1, T)).amax(-1).cummax(-1).values
    excess = (running[..., -1:] - running).exp().masked_fill(running == -INF, 1.0)
    return excess.repeat_interleave(T, dim=-1)[..., :S]


def _not_rescaled(scores: Tensor, T: int, what: str) -> Tensor:
    weights = core.normalise(scores)
    if scores.shape[-1] <= T:
        return weights
    excess = _tiled_max(scores, T)
    total = (weights * excess).sum(-1, keepdim=True) if "sum" in what else 1.0
    return weights * (excess if "output" in what else 1.0) / total


def _overlapping(scores: Tensor, T: int) -> Tensor:
    S = scores.shape[-1]
    weights = core.normalise(scores)
    if S <= T or not S % T:
        return weights
    times = torch.ones(S, dtype=weights.dtype)
    times[S - T : S // T * T] = 2
    return _divided(weights * times)


def _padded(scores: Tensor, T: int) -> Tensor:
    S = scores.shape[-1]
    padded = torch.nn.functional.pad(scores, (0, -S % T), value=0.0)
    return core.normalise(padded)[..., :S]


def _before_last(scores: Tensor, T: int) -> Tensor:
    S = scores.shape[-1]
    return torch.arange(S) < (S - 1) // T * T


# ---- families -------------------------------------------------------------------------------------------------------


def _plus(uncertainty: float) -> str:
    return f"(+-{uncertainty:.1g})"


def _capped(problem: Problem, inverse: float) -> Tensor:
    def score(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
        raw = (q * call.scale) @ k.mT
        return _masked(torch.tanh(raw * inverse) / inverse if inverse else raw, call)

    return attended(problem, score=score)


def _with_sink(problem: Problem, weight: float) -> Tensor:
    """exp(0 + log weight) joins the sum."""

    def normalise(scores: Tensor) -> Tensor:
        total = torch.logsumexp(scores, -1, keepdim=True)
        return core.normalise(scores) / (1 + weight * (-total).exp())

    return attended(problem, normalise=normalise)


def _with_epsilon(problem: Problem, epsilon: float) -> Tensor:
    def normalise(scores: Tensor) -> Tensor:
        raised = exponentials(scores)
        return raised / (raised.sum(-1, keepdim=True) + epsilon)

    return attended(problem, normalise=normalise)


FAMILIES = (
    Family(
        "scale", lambda p, a: attended(_scale_by(p, lambda s: s * a)),
        lambda a, d: f"a scale that is {a:.5g} {_plus(d)} times what it should be", (1.0, 0.3, 3.0, 10.0, 0.05),
    ),
    Family(
        "mask weight", lambda p, a: attended(_mask_by(p, lambda m: m * a, bias=True)),
        lambda a, d: f"the mask added {a:.5g} {_plus(d)} times", (1.0, 0.3, 3.0, 0.05),
    ),
    Family("size", lambda p, a: attended(p) * a, lambda a, d: f"an output {a:.5g} {_plus(d)} times as large", (1.0,)),
    Family(
        "softcap", _capped, lambda a, d: f"scores capped at {1 / a if a else INF:.4g} (tanh)", (1e-2, 0.1, 0.5), 0.0,
    ),
    Family(
        "sink", _with_sink, lambda a, d: f"a sink of weight {a:.4g} {_plus(d)} in every softmax", (0.1, 1.0), 0.0,
    ),
    Family(
        "epsilon", _with_epsilon, lambda a, d: f"{a:.3g} {_plus(d)} added to the sum of exponentials", (1e-3, 0.1), 0.0,
    ),
)  # fmt: skip


def of_family(family: Family, number: float, uncertainty: float, base: Guess | None = None) -> Guess:
    """With the number that was found, perhaps before another reading."""
    words = family.words(number, uncertainty)

    def run(problem: Problem) -> Tensor:
        if base is not None and base.reading is not None:
            problem = base.reading(problem)
        return family.run(problem, number)

    if base is None:
        return Guess(family.name, words, lambda: run, rank=WITH_NUMBER)
    return Guess(f"{base.name} + {family.name}", f"both {base.words} and {words}", lambda: run, rank=WITH_NUMBER)
