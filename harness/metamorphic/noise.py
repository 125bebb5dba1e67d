"""How far two results that should be equal may be apart: the acceptance rule's noise floor, for a relation.

A relation compares the kernel with itself, f(changed inputs) with changed f(inputs). Each of the two may be off by what
the acceptance rule allows one result, so the floor of their difference is the sum of both floors; the factors are the
rule's own. The floors need an attention to be measured with, and take `eager`; no value is compared with it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.build import jitter
from harness.equivalence import JITTER_DRAWS, OK_FACTOR, decide, ratio_to
from harness.metamorphic.question import Question


@dataclass(frozen=True)
class Noise:
    """Per row of a result, the terms of N: rounding of the plain kernel, conditioning, one rounding of the result."""

    terms: Tensor  # (3, B, H, L)

    def __add__(self, other: "Noise") -> "Noise":
        return Noise(self.terms + other.terms)

    def times(self, factor: float) -> "Noise":
        return Noise(factor * self.terms)

    def rows(self, start: int, stop: int) -> "Noise":
        return Noise(self.terms[..., start:stop])

    def batch(self, index: Tensor) -> "Noise":
        return Noise(self.terms[:, index])


@dataclass(frozen=True)
class Finding:
    """What a check found; its figures are absent where it asks for exactness."""

    status: str
    reason: str = ""
    max_abs_err: float | None = None
    err_budget: float | None = None
    err_ratio: float | None = None
    block_ratio: float | None = None


OK = Finding("ok")


def noise_of(question: Question, generator: torch.Generator) -> Noise:
    """All draws in one call, side by side in the batch."""
    dtype, B = question.q.dtype, question.q.shape[0]
    u, draws = torch.finfo(dtype).eps, 1 + JITTER_DRAWS

    def drawn(t: Tensor) -> Tensor:
        return torch.cat([t, *(jitter(t, u, generator) for _ in range(JITTER_DRAWS))])

    mask = question.mask
    if mask is not None:
        mask = mask.expand(B, *mask.shape[1:])
        mask = drawn(mask) if mask.is_floating_point() else mask.repeat(draws, 1, 1, 1)
    stack = question.but(q=drawn(question.q), k=drawn(question.k), v=drawn(question.v), mask=mask)
    # In float64 the exact result is eager's own: that its rounding is seen, it is compared with another order of sums.
    r = stack.ask("sdpa" if dtype == torch.float64 else "eager").double().unflatten(0, (draws, B))
    g = stack.in_float64().ask("eager").unflatten(0, (draws, B))
    # As in the acceptance rule: half types are scored in float32, and a jitter of their own eps would excuse more.
    conditioning = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / u
    moved = (g[1:] - g[0]).abs().amax(dim=(0, -1))
    return Noise(torch.stack([(r - g).abs().amax(dim=(0, -1)), conditioning * moved, u * g[0].abs().amax(-1)]))


def judge_relation(found: Tensor, expected: Tensor, noise: Noise, *, rows: Tensor | None = None) -> Finding:
    """`noise` is that of both sides together; `rows` (B, H, L), if given, are the ones that are compared."""
    error = (found.detach().double() - expected.detach().double()).abs().amax(-1)  # (B, H, L)
    terms = noise.terms.expand(3, *error.shape)
    if rows is not None:
        error, terms = error.masked_fill(~rows, 0.0), terms.masked_fill(~rows, 0.0)
    if not bool(error.isfinite().all()):
        return Finding("mismatch", "not finite")
    worst, floor = error.max(), terms.amax(dim=(1, 2, 3)).sum()
    ratio = float(ratio_to(worst, floor))
    block_ratio = float(ratio_to(error.amax(-1), terms.amax(-1).sum(0)).max())
    status = decide(ratio, block_ratio)
    reason = "" if status == "ok" else f"the two results differ by {ratio:.3g} N (worst block {block_ratio:.3g} N)"
    return Finding(status, reason, float(worst), OK_FACTOR * float(floor), ratio, block_ratio)
