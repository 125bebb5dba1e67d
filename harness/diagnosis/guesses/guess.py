"""What a guess is: a whole attention that is wrong in one way, or in two."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harness.cell.golden import Problem
from harness.kernels.call import AttentionCall, four_dims
from harness.mutants.saboteurs.saboteur import attend

Run = Callable[[Problem], Tensor]
Reading = Callable[[Problem], Problem]  # from the call that was made to the one that was understood
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
    return AttentionCall(
        scale=scale, mask=mask, causal=problem.is_causal, dropout_p=problem.dropout_p, is_default_scale=not given
    )


def attended(problem: Problem, **steps: Any) -> Tensor:
    return attend(problem.q, problem.k, problem.v, call_of(problem), **steps)[0]


def bound(function: Callable[..., Any], *fixed: Any) -> Callable[[Problem], Any]:
    """A function of the problem alone."""
    return lambda problem: function(problem, *fixed)


def read_first(reading: Reading, run: Run) -> Run:
    return lambda problem: run(reading(problem))


def pair(reading: Guess, other: Guess) -> Guess:
    """Two bugs at once."""
    assert reading.reading is not None
    first = reading.reading

    def make() -> Run:
        return read_first(first, other.make())

    both = None
    if other.reading is not None:
        second = other.reading
        both = lambda problem: second(first(problem))  # noqa: E731
    return Guess(f"{reading.name} + {other.name}", f"both {reading.words} and {other.words}", make, both, other.rank)
