"""The directions in which bugs move a result: what hides in each element's rounding shows in all of them together.

In bfloat16 a scale wrong by 1e-3 moves no element by more than half of what rounding may. But it moves all of them
together, along the derivative of the result by the scale, and rounding does not. So the error is projected on such
derivatives; each projection is measured in units of what rounding alone gives there, z.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.cell.golden import Problem, in_float64, scores_of
from harness.cell.rule import TensorVerdict

# 71 right kernels reached 6.5 (bench/exam/right); a scale wrong by 1e-3 stands at 22 and more in either half type.
Z_LIMIT = 12.0
LEAST_ELEMENTS = 1024  # fewer do not average rounding out
NAME = "out (in the directions of bugs)"


@dataclass(frozen=True, eq=False)
class Direction:
    """The derivative of the output by something that a bug may change, and what that is in words."""

    name: str
    tangent: Tensor  # (B, H, L, D_v), float64
    words: Callable[[float], str]  # of the change that explains the error best
    is_rounding: bool = False  # rounding always to one side moves along it, too


@dataclass(frozen=True, eq=False)
class Compass:
    """Directions for one call, with the noise of each."""

    golden: Tensor
    directions: tuple[Direction, ...]
    noise: tuple[float, ...]  # of the projection on each

    @classmethod
    def of(cls, problem: Problem, golden: Tensor, errors: Sequence[Sequence[Tensor]]) -> "Compass | None":
        """`errors`: of each reference in its draws, R - G. None where there are too few elements."""
        if golden.numel() < LEAST_ELEMENTS:
            return None
        directions = [d for d in directions_of(in_float64(problem), golden) if float(d.tangent.abs().max()) > 0]
        noise = [max(_noise(d.tangent, [e.double() for e in side]) for side in errors) for d in directions]
        kept = [(d, n) for d, n in zip(directions, noise, strict=True) if n > 0]
        return cls(golden, tuple(d for d, _ in kept), tuple(n for _, n in kept))

    def z_of(self, candidate: Tensor) -> dict[str, tuple[float, float]]:
        """By direction: the change that explains the error best, and its size in units of rounding's."""
        error = candidate.double() - self.golden
        found = {}
        for direction, noise in zip(self.directions, self.noise, strict=True):
            change = _projection(error, direction.tangent)
            found[direction.name] = (change, abs(change) / noise)
        return found

    def judge(self, candidate: Tensor, *, worse: float = 1.0) -> TensorVerdict:
        """`ok` within Z_LIMIT in every direction; beyond it the direction that explains most speaks.

        `worse`: how many times the reference's noise the candidate's own may be, because it is rounded worse.
        """
        found, limit = self.z_of(candidate), worse * Z_LIMIT
        beyond = [direction for direction in self.directions if not found[direction.name][1] <= limit]
        if not beyond:
            return TensorVerdict(NAME, "", "ok")
        worst = max(beyond, key=lambda d: found[d.name][0] ** 2 * float(d.tangent.square().sum()))
        change, z = found[worst.name]
        reason = (
            f"together the elements move as if {worst.words(change)}: {z:.0f} times what "
            f"rounding does, at most {limit:.3g}"
        )
        return TensorVerdict(NAME, "", "degraded" if worst.is_rounding else "mismatch", reason)


def _projection(error: Tensor, tangent: Tensor) -> float:
    return float((error * tangent).sum() / (tangent * tangent).sum())


def _noise(tangent: Tensor, errors: Sequence[Tensor]) -> float:
    """The larger of what the draws show, and of what elements that err independently would give."""
    drawn = math.sqrt(sum(_projection(error, tangent) ** 2 for error in errors) / len(errors))
    square = sum(float((error * tangent).square().sum()) for error in errors) / len(errors)
    return max(drawn, math.sqrt(square) / float((tangent * tangent).sum()))


def directions_of(problem: Problem, out: Tensor) -> Iterator[Direction]:
    """Of a problem in float64 whose output is `out`."""
    groups = problem.q.shape[1] // problem.k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (problem.k, problem.v))
    scores = scores_of(problem, k)  # (B, H, L, S), -inf where hidden
    hidden = scores == float("-inf")
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    dead = hidden.all(-1, keepdim=True)
    weights = (scores - total.masked_fill(dead, 0.0)).exp()
    raw = problem.q @ k.mT * (problem.q.shape[-1] ** -0.5 if problem.scale is None else problem.scale)

    def by_scores(moved: Tensor) -> Tensor:
        """d out if every score moves by `moved`."""
        pulled = weights * moved
        return pulled @ v - pulled.sum(-1, keepdim=True) * out

    yield Direction("scale", by_scores(raw), lambda a: f"the scale were {1 + a:.5g} times what it is")
    yield Direction("softcap", by_scores(-(raw**3)), lambda a: f"scores were capped at {_cap(a)}")
    yield Direction("sink", -out * (-total).exp().masked_fill(dead, 0.0), lambda a: f"a sink of weight {a:.2g} joined")
    yield Direction("size", out, lambda a: f"all were {1 + a:.5g} times as large", is_rounding=True)
    mean = v.mean(dim=2, keepdim=True)
    yield Direction("mean", (mean - out).masked_fill(dead, 0.0), lambda a: f"{a:.2g} of each were the values' mean")
    if problem.mask is not None and problem.mask.is_floating_point():
        mask = problem.mask.expand(scores.shape)
        mask = mask.masked_fill(mask.abs() > 1e3, 0.0)
        yield Direction("mask", by_scores(mask), lambda a: f"the mask were {1 + a:.5g} times what it is")
    for name, index in (("first", _first(~hidden)), ("last", _last(~hidden))):
        moved = torch.zeros_like(scores).scatter_(-1, index, 1.0)
        yield Direction(f"{name} key", by_scores(moved), lambda a, n=name: f"the {n} key weighed {1 + a:.3g} times")  # type: ignore[misc]
    if bool(hidden.any()):  # the first that is hidden after the last that is seen
        index = (_last(~hidden) + 1).clamp(max=scores.shape[-1] - 1)
        beyond = hidden.gather(-1, index) & ~dead
        weight = (raw.gather(-1, index) - total.masked_fill(dead, 0.0)).exp().masked_fill(~beyond, 0.0)
        one = torch.zeros_like(scores).scatter_(-1, index, weight)
        moved_out = one @ v - weight * out
        yield Direction("next key", moved_out, lambda a: f"{100 * a:.2g} % of a hidden key were seen")


def _cap(inverse: float) -> str:
    """c of c tanh(s / c), whose first term is -s^3 / (3 c^2)."""
    return f"{math.sqrt(1 / (3 * inverse)):.3g}" if inverse > 0 else "something that makes them larger"


def _first(seen: Tensor) -> Tensor:
    return seen.int().argmax(-1, keepdim=True)


def _last(seen: Tensor) -> Tensor:
    return seen.shape[-1] - 1 - seen.flip(-1).int().argmax(-1, keepdim=True)
