"""One call and all that is known of it: what the kernel gave, the golden, and how far rounding goes."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from harness.battery.call import Call, generator_of
from harness.battery.result import Finding
from harness.battery.sampling import sampled_rows
from harness.battery.steps import found_in
from harness.candidate.client import Process
from harness.candidate.examinee import Examinee
from harness.candidate.request import Reply, Request
from harness.cell.bare import Held, Unanswered
from harness.cell.golden import in_float64, outcome, sdpa_math, textbook

MOST_SCORES = 1 << 23  # of one call that is looked at as a whole
LEAST_FINITE = 0.25  # of what came back
CERTAIN = 20.0  # times rounding's own size: below it no pattern of an error is trusted
EXPLAINED = 0.01  # of the error may remain
ROUNDINGS = 0.5  # of the dtype's eps: the least noise that a result has
ROUNDING = 3.0  # times what the reference's rounding leaves
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Evidence:
    """`before` was asked of a fresh kernel before `request`."""

    request: Request
    reply: Reply
    before: tuple[Request, ...] = ()

    @cached_property
    def golden(self) -> dict[str, Tensor]:
        """By name, float64, as it should be."""
        return outcome(in_float64(self.request), textbook)

    @cached_property
    def _rounded(self) -> dict[str, Tensor]:
        return outcome(self.request, sdpa_math)

    @cached_property
    def compared(self) -> dict[str, Tensor]:
        """Of the golden what tells guesses apart: the output alone if that is wrong, for gradients follow from it."""
        out = {"out": self.golden["out"]}
        error = distance(self.reply.tensors, out, out)
        return out if error >= CERTAIN * self._noise_of(out) else self.golden

    def _noise_of(self, golden: Tensors) -> float:
        least = ROUNDINGS * torch.finfo(self.request.q.dtype).eps
        return max(least, distance(self._rounded, golden, golden))

    @cached_property
    def noise(self) -> float:
        """Of a right kernel that rounds: its distance from the golden."""
        return self._noise_of(self.compared)

    @cached_property
    def error(self) -> float:
        return self.distance(self.compared)

    def distance(self, answer: Tensors) -> float:
        """Of what the kernel gave from another answer."""
        return distance(self.reply.tensors, answer, self.compared)

    @property
    def is_plain_mismatch(self) -> bool:
        """Numbers came back, of the right shapes, and they are wrong by more than rounding."""
        return self.has_shapes and self.error >= CERTAIN * self.noise

    @property
    def tells_guesses_apart(self) -> bool:
        """It has finite numbers of its own: whoever gives NaN everywhere gives what every other overflow gives."""
        finite = [self.reply.tensors[name].isfinite() for name in self.compared]
        return all(float(each.double().mean()) > LEAST_FINITE for each in finite if each.numel())

    @property
    def has_shapes(self) -> bool:
        tensors = self.reply.tensors
        return self.reply.failure is None and all(
            name in tensors and tensors[name].shape == golden.shape for name, golden in self.golden.items()
        )

    def residual(self, answer: Tensors) -> float:
        """What a guess leaves of the error, as a share of it; infinite where it is NaN at other places."""
        left = self.distance(answer)
        if not math.isfinite(self.error):
            return 0.0 if left <= ROUNDING * self.noise else math.inf
        return left / self.error if self.error else math.inf

    def is_explained(self, answer: Tensors) -> bool:
        """All of the error but 1 %, or what rounding leaves."""
        left = self.distance(answer)
        return left <= max(EXPLAINED * self.error if math.isfinite(self.error) else 0.0, ROUNDING * self.noise)


def distance(one: Tensors, other: Tensors, golden: Tensors) -> float:
    """||one - other|| over all tensors, each in units of its golden; what is not finite in both is equal."""
    total = 0.0
    for name, true in golden.items():
        if name not in one or name not in other or one[name].shape != other[name].shape:
            return math.inf
        a, b = one[name].double(), other[name].double()
        finite = a.isfinite() & b.isfinite()
        if not bool((finite | (a == b) | (a.isnan() & b.isnan())).all()):
            return math.inf
        size = float(true[true.isfinite()].square().mean().sqrt()) if true.numel() else 0.0
        left = float(torch.where(finite, a - b, 0.0).square().mean().sqrt()) if a.numel() else 0.0
        total += (left / size if size else left) ** 2
    return math.sqrt(total)


class Witness:
    """A kernel that is asked again: anew where memory matters, and only as long as there is time."""

    def __init__(self, examinee: Examinee, until: float) -> None:
        self.examinee, self.until = examinee, until
        self.asks_anew = False  # each time a process that remembers nothing

    @property
    def has_time(self) -> bool:
        return time.perf_counter() < self.until

    def refresh(self) -> None:
        """A process that remembers nothing."""
        if isinstance(self.examinee, Process):
            self.examinee.stop()

    def evidence(self, request: Request, before: Sequence[Request] = ()) -> Evidence:
        self._prepare(before)
        return Evidence(request, self.examinee.ask(request), tuple(before))

    def finding(self, request: Request, before: Sequence[Request] = ()) -> Finding:
        """By the rule, as the battery would find it."""
        call = Call("", request, rows_of(request))
        self._prepare(before)
        answer: Callable[[], Reply] = self.examinee.post(request)
        try:
            held = Held.of(request, generator_of("diagnosis"), rows=call.rows)
        except Unanswered:
            held = None
        reply = answer()
        if held is None and reply.failure is None:
            return Finding("", "", "", "skipped")
        return found_in(reply, held, call, self.examinee.domain.refusal(request.facts))

    def _prepare(self, before: Sequence[Request]) -> None:
        if self.asks_anew:
            self.refresh()
        for earlier in before:
            self.examinee.ask(earlier)


def rows_of(request: Request) -> Tensor | None:
    """Those of a large call that have a golden."""
    return None if scores_of_call(request) <= MOST_SCORES else sampled_rows(request, None, generator_of("rows"))


def scores_of_call(request: Request) -> int:
    B, H, L, _ = request.q.shape
    return B * H * L * max(request.k.shape[2], 1)


def with_tensors(request: Request, **tensors: Tensor | None) -> Request:
    """The same call of other tensors; the cotangent follows the shape of the output."""
    named: dict[str, Any] = dict(tensors)
    changed = replace(request, **named)
    if changed.cotangent is not None:
        shape = (*changed.q.shape[:3], changed.v.shape[3])
        if changed.cotangent.shape != shape:
            drawn = torch.randn(shape, generator=generator_of("cotangent", shape))
            changed = replace(changed, cotangent=drawn.to(changed.q.dtype))
    return changed
