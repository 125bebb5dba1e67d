"""Steps of attention that are done wrongly: softmax, roundings, what is written where, walks over tiles."""

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.diagnosis.guesses.guess import INF, TILES, Run, attended, bound
from harness.diagnosis.guesses.readings import WIDTHS
from harness.kernels.call import AttentionCall
from harness.mutants.saboteurs import saboteur as core
from harness.mutants.saboteurs.softmax import exponentials


def steps() -> Iterator[tuple[str, str, Run]]:
    yield (
        "weights not normalised",
        "weights that are not divided by their sum",
        lambda p: attended(p, normalise=exponentials),
    )
    yield "sigmoid", "a sigmoid for the softmax", lambda p: attended(p, normalise=torch.sigmoid)
    yield (
        "product added to q",
        "the queries added to the output",
        lambda p: attended(p) + p.q if p.q.shape[-1] == p.v.shape[-1] else attended(p),
    )
    for name, to in list(WIDTHS.items())[:3]:
        yield (
            f"scores in {name}",
            f"scores rounded to {name}",
            bound(lambda p, to: attended(p, score=lambda q, k, c: to(core.score(q, k, c))), to),
        )
        yield (
            f"products in {name}",
            f"q k^T rounded to {name} before it is scaled",
            bound(lambda p, to: attended(p, score=lambda q, k, c: masked(to(q @ k.mT) * c.scale, c)), to),
        )
        yield (
            f"weights in {name}",
            f"weights rounded to {name}",
            bound(lambda p, to: attended(p, normalise=lambda s: to(core.normalise(s))), to),
        )
        yield (
            f"exponentials in {name}",
            f"exponentials rounded to {name} before they are summed",
            bound(lambda p, to: attended(p, normalise=lambda s: _divided(to(exponentials(s)))), to),
        )
        yield f"output in {name}", f"the output rounded to {name}", bound(lambda p, to: to(attended(p)), to)
    for dim, axis in ((1, "heads"), (0, "batch entries"), (2, "rows"), (3, "channels")):
        yield (
            f"output {axis} reversed",
            f"the output's {axis} in reverse order",
            bound(lambda p, d: attended(p).flip(d), dim),
        )
        for by in (1, -1):
            yield (
                f"output {axis} rotated by {by:+}",
                f"the output's {axis} rotated by {by:+}",
                bound(lambda p, d, by: attended(p).roll(by, d), dim, by),
            )
        for one, end in ((0, "first"), (-1, "last")):
            yield (
                f"{end} of the output's {axis} zero",
                f"the {end} of the output's {axis} never written (0)",
                bound(lambda p, d, o: _zeroed(attended(p), d, o), dim, one),
            )
    yield (
        "output transposed",
        "the output's rows and channels exchanged",
        lambda p: (o := attended(p)).mT.reshape(o.shape),
    )
    for T in TILES:
        yield (
            f"partial row tile of {T} unwritten",
            f"the rows of the last, partial tile of {T} never written (0)",
            bound(lambda p, T: _cut_rows(attended(p), T), T),
        )
        for what in ("sum", "output", "sum and output"):
            yield (
                f"{what} not rescaled, tiles of {T}",
                f"{what} not rescaled when a tile of {T} keys brings a new maximum",
                bound(lambda p, T, what: attended(p, normalise=lambda s: _not_rescaled(s, T, what)), T, what),
            )
        yield (
            f"last tile of {T} overlaps",
            f"the last tile of {T} keys moved back to fit, and keys counted twice",
            bound(lambda p, T: attended(p, normalise=lambda s: _overlapping(s, T)), T),
        )
        yield (
            f"zero keys up to a multiple of {T}",
            f"keys padded with zeros to a multiple of {T}, and the padding attended",
            bound(lambda p, T: attended(p, normalise=lambda s: _padded(s, T)), T),
        )
        yield (
            f"last tile of {T} alone",
            f"the sum and output of the last tile of {T} keys alone",
            bound(
                lambda p, T: attended(p, normalise=lambda s: core.normalise(s.masked_fill(_before_last(s, T), -INF))), T
            ),
        )


def masked(scores: Tensor, call: AttentionCall) -> Tensor:
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
