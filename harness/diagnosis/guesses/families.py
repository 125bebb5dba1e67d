"""Right attention but for one number."""

import torch
from torch import Tensor

from harness.cell.golden import Problem
from harness.diagnosis.guesses.guess import INF, WITH_NUMBER, Family, Guess, attended
from harness.diagnosis.guesses.readings import masked_by, scaled_by
from harness.diagnosis.guesses.steps import masked
from harness.kernels.call import AttentionCall
from harness.mutants.saboteurs import saboteur as core
from harness.mutants.saboteurs.softmax import exponentials


def _plus(uncertainty: float) -> str:
    return f"(+-{uncertainty:.1g})"


def _capped(problem: Problem, inverse: float) -> Tensor:
    def score(q: Tensor, k: Tensor, call: AttentionCall) -> Tensor:
        raw = (q * call.scale) @ k.mT
        return masked(torch.tanh(raw * inverse) / inverse if inverse else raw, call)

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
        "scale",
        lambda p, a: attended(scaled_by(p, lambda s: s * a)),
        lambda a, d: f"a scale that is {a:.5g} {_plus(d)} times what it should be",
        (1.0, 0.3, 3.0, 10.0, 0.05),
    ),
    Family(
        "mask weight",
        lambda p, a: attended(masked_by(p, lambda m: m * a, bias=True)),
        lambda a, d: f"the mask added {a:.5g} {_plus(d)} times",
        (1.0, 0.3, 3.0, 0.05),
    ),
    Family("size", lambda p, a: attended(p) * a, lambda a, d: f"an output {a:.5g} {_plus(d)} times as large", (1.0,)),
    Family(
        "softcap",
        _capped,
        lambda a, d: f"scores capped at {1 / a if a else INF:.4g} (tanh)",
        (1e-2, 0.1, 0.5),
        0.0,
    ),
    Family(
        "sink",
        _with_sink,
        lambda a, d: f"a sink of weight {a:.4g} {_plus(d)} in every softmax",
        (0.1, 1.0),
        0.0,
    ),
    Family(
        "epsilon",
        _with_epsilon,
        lambda a, d: f"{a:.3g} {_plus(d)} added to the sum of exponentials",
        (1e-3, 0.1),
        0.0,
    ),
)


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
