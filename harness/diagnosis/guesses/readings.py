"""What a call may be misread as: each maps the call that was made to the one that was understood."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from harness.cell.golden import Problem
from harness.diagnosis.evidence import with_tensors
from harness.diagnosis.guesses.guess import INF, TILES, Reading, bound, call_of
from harness.kernels.call import four_dims
from harness.mutants.saboteurs.precision import rounded, ten_bits

LOG2_E = math.log2(math.e)


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


def masked_by(problem: Problem, change: Callable[[Tensor], Tensor | None], *, bias: bool | None = None) -> Problem:
    if problem.mask is None or (bias is not None and problem.mask.is_floating_point() != bias):
        return problem
    return replace(problem, mask=change(four_dims(problem.mask)))


def scaled_by(problem: Problem, change: Callable[[float], float]) -> Problem:
    return replace(problem, scale=change(call_of(problem).scale))


def _tensor_by(problem: Problem, name: str, change: Callable[[Tensor], Tensor]) -> Problem:
    return with_tensors(problem, **{name: change(getattr(problem, name))})


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


def readings() -> Iterator[tuple[str, str, Reading]]:
    yield "mask ignored", "the mask ignored", lambda p: replace(p, mask=None)
    yield "causal ignored", "the causal flag ignored", lambda p: replace(p, is_causal=False)
    yield (
        "causal ignored beside a mask",
        "the causal flag ignored where there is a mask",
        lambda p: replace(p, is_causal=p.is_causal and p.mask is None),
    )
    yield (
        "mask ignored beside causal",
        "the mask ignored where the call is causal",
        lambda p: replace(p, mask=None) if p.is_causal else p,
    )
    yield (
        "causal lower right",
        "causal aligned at the lower right corner instead of the upper left one",
        lambda p: _causal_by(p, lambda p: p.k.shape[2] - p.q.shape[2]),
    )
    for n in (-3, -2, -1, 1, 2, 3):
        more = f"{abs(n)} {'keys' if abs(n) > 1 else 'key'} {'more' if n > 0 else 'fewer'}"
        yield (
            f"causal {n:+}",
            f"causal off by {n:+}: each row sees {more}",
            bound(lambda p, n: _causal_by(p, lambda _: n), n),
        )
    yield (
        "always causal",
        "a causal mask that nobody asked for",
        lambda p: p if p.is_causal else replace(p, is_causal=True),
    )
    yield "mask inverted", "the bool mask inverted", lambda p: masked_by(p, torch.logical_not, bias=False)
    yield (
        "mask transposed",
        "the mask transposed",
        lambda p: masked_by(p, lambda m: m.mT if m.shape[-1] == m.shape[-2] else m),
    )
    for dim, name in ((0, "batch entry"), (1, "head"), (2, "row")):
        for end, one in (("first", 0), ("last", -1)):
            yield (
                f"mask of the {end} {name}",
                f"the mask of the {end} {name} for all",
                bound(lambda p, dim, one: masked_by(p, lambda m: m.select(dim, one).unsqueeze(dim)), dim, one),
            )
    for name, change in (
        ("negated", torch.neg),
        ("doubled", lambda m: 2 * m),
        ("clamped at 0", lambda m: m.clamp(max=0)),
    ):
        yield f"mask {name}", f"the float mask {name}", bound(lambda p, change: masked_by(p, change, bias=True), change)
    yield (
        "mask divided by the scale",
        "the float mask divided by the scale",
        lambda p: masked_by(p, lambda m: m / call_of(p).scale, bias=True),
    )
    yield (
        "mask only hides",
        "a float mask that only hides: its finite numbers are not added",
        lambda p: masked_by(p, lambda m: m.masked_fill(m.isfinite(), 0.0), bias=True),
    )
    for name, to in list(WIDTHS.items())[:2]:
        yield (
            f"mask in {name}",
            f"the float mask rounded to {name}",
            bound(lambda p, to: masked_by(p, to, bias=True), to),
        )
    yield "scale ignored", "the scale argument ignored: 1/sqrt(D) always", lambda p: replace(p, scale=None)
    yield "scale missing", "no scale at all", lambda p: scaled_by(p, lambda s: 1.0)
    yield "scale squared", "the scale applied twice", lambda p: scaled_by(p, lambda s: s * abs(s))
    yield "scale positive", "the absolute value of the scale", lambda p: scaled_by(p, abs)
    yield (
        "scale beside the default",
        "the scale argument on top of 1/sqrt(D)",
        lambda p: p if p.scale is None else replace(p, scale=p.scale * p.q.shape[-1] ** -0.5),
    )
    yield (
        "scale 0 as none",
        "a scale of 0 taken for none given",
        lambda p: replace(p, scale=p.scale or None),
    )
    yield "scale 1/D", "1/D for 1/sqrt(D)", lambda p: p if p.scale is not None else replace(p, scale=1 / p.q.shape[-1])
    for name, power in (("exp2 without log2 e", 1 / LOG2_E), ("log2 e without exp2", LOG2_E)):
        yield name, f"{name} in the scale", bound(lambda p, power: scaled_by(p, lambda s: s * power), power)
    of_width: tuple[tuple[str, Callable[[Problem], int]], ...] = (
        ("D_v", lambda p: p.v.shape[-1]),
        ("H * D", lambda p: p.q.shape[1] * p.q.shape[-1]),
        ("S", lambda p: p.k.shape[2]),
        ("L", lambda p: p.q.shape[2]),
        ("D rounded up to a power of two", lambda p: 1 << (p.q.shape[-1] - 1).bit_length()),
        ("D rounded up to a multiple of 8", lambda p: -(-p.q.shape[-1] // 8) * 8),
    )
    for name, width in of_width:
        yield (
            f"scale of {name}",
            f"1/sqrt({name}) for 1/sqrt(D)",
            bound(lambda p, width: p if p.scale is not None else replace(p, scale=width(p) ** -0.5), width),
        )
    yield from _key_readings()
    yield from _head_readings()
    for name in ("q", "k", "v"):
        for width_name, to in WIDTHS.items():
            yield (
                f"{name} in {width_name}",
                f"{name} rounded to {width_name}",
                bound(lambda p, n, to: _tensor_by(p, n, to), name, to),
            )
    for width_name, to in WIDTHS.items():
        yield (
            f"inputs in {width_name}",
            f"q, k and v rounded to {width_name}",
            bound(lambda p, to: replace(p, q=to(p.q), k=to(p.k), v=to(p.v)), to),
        )
        yield (
            f"keys and values in {width_name}",
            f"k and v rounded to {width_name}",
            bound(lambda p, to: replace(p, k=to(p.k), v=to(p.v)), to),
        )
        yield (
            f"scaled q in {width_name}",
            f"the scaled queries rounded to {width_name}",
            bound(lambda p, to: replace(p, q=to(p.q * call_of(p).scale), scale=1.0), to),
        )


def _key_readings() -> Iterator[tuple[str, str, Reading]]:
    """Keys that are left out of a sum."""
    yield "first key missing", "the first key left out", lambda p: _hides(p, lambda j, S: j > 0)
    yield "last key missing", "the last key left out", lambda p: _hides(p, lambda j, S: j < S - 1)
    for T in TILES:
        yield (
            f"last partial tile of {T} missing",
            f"the keys of the last, partial tile of {T} left out",
            bound(lambda p, T: _hides(p, lambda j, S: (j < S // T * T) | (S < T)), T),
        )
        yield (
            f"first tile of {T} missing",
            f"the first tile of {T} keys left out where there are more",
            bound(lambda p, T: _hides(p, lambda j, S: (j >= T) | (S <= T)), T),
        )
        yield (
            f"keys beyond {T} missing",
            f"the keys beyond the first {T} left out",
            bound(lambda p, T: _hides(p, lambda j, S: j < T), T),
        )
        yield (
            f"first key of tiles of {T} missing",
            f"the first key of every further tile of {T} left out",
            bound(lambda p, T: _hides(p, lambda j, S: (j % T > 0) | (j == 0)), T),
        )
        yield (
            f"last key of tiles of {T} missing",
            f"the last key of every tile of {T} left out",
            bound(lambda p, T: _hides(p, lambda j, S: (j % T < T - 1) | (j == S - 1)), T),
        )
    for W in (*TILES, 2048, 4096):
        yield (
            f"window of {W}",
            f"a window that nobody asked for: only the last {W} keys are seen",
            bound(lambda p, W: _window(p, W), W),
        )


def _window(problem: Problem, W: int) -> Problem:
    i, j = _places(problem)
    kept = j > i - W
    return problem if bool(kept.all()) else _bool_of(problem, kept)


def _head_readings() -> Iterator[tuple[str, str, Reading]]:
    orders: tuple[tuple[str, str, Callable[[int, int], list[int]]], ...] = (
        (
            "kv heads tiled",
            "key heads tiled instead of repeated: query head h reads key head h mod H_kv",
            lambda H, K: [h % K for h in range(H)],
        ),
        ("kv head 0 for all", "key head 0 for all query heads", lambda H, K: [0] * H),
        (
            "kv head h clamped",
            "query head h reading key head min(h, H_kv - 1)",
            lambda H, K: [min(h, K - 1) for h in range(H)],
        ),
        ("kv heads reversed", "key heads in reverse order", lambda H, K: [K - 1 - h * K // H for h in range(H)]),
        (
            "kv heads one further",
            "each query head reading the next key head",
            lambda H, K: [(h * K // H + 1) % K for h in range(H)],
        ),
    )
    for name, words, order in orders:
        yield name, words, bound(lambda p, order: _in_groups(p, order), order)
    for name in ("q", "k", "v"):
        for dim, axis in ((1, "heads"), (0, "batch entries"), (2, "rows" if name == "q" else "keys"), (3, "channels")):
            for by in (1, -1):
                yield (
                    f"{name} {axis} rotated by {by:+}",
                    f"the {axis} of {name} rotated by {by:+}",
                    bound(lambda p, n, d, by: _tensor_by(p, n, lambda t: t.roll(by, d)), name, dim, by),
                )
            yield (
                f"{name} {axis} reversed",
                f"the {axis} of {name} in reverse order",
                bound(lambda p, n, d: _tensor_by(p, n, lambda t: t.flip(d)), name, dim),
            )
            if dim < 2:
                yield (
                    f"{name} of the first of its {axis}",
                    f"the first of the {axis} of {name} for all",
                    bound(lambda p, n, d: _tensor_by(p, n, lambda t: t.narrow(d, 0, 1).expand(t.shape)), name, dim),
                )
        yield (
            f"{name} viewed",
            f"{name} as (B, L, H, D) viewed as (B, H, L, D)",
            bound(lambda p, n: _tensor_by(p, n, _viewed), name),
        )
        yield (
            f"{name} transposed",
            f"{name} with length and channels exchanged",
            bound(lambda p, n: _tensor_by(p, n, lambda t: t.mT.reshape(t.shape)), name),
        )
        yield f"{name} zero", f"{name} taken for zeros", bound(lambda p, n: _tensor_by(p, n, torch.zeros_like), name)
    yield "q and k exchanged", "q and k exchanged", lambda p: replace(p, q=p.k, k=p.q) if p.q.shape == p.k.shape else p
    yield "k and v exchanged", "k and v exchanged", lambda p: replace(p, k=p.v, v=p.k) if p.k.shape == p.v.shape else p
