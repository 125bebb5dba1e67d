"""The acceptance rule on one bare call of a kernel, no module around it: what its answer is held to, and the verdict.

The golden is the textbook in float64. The noise is the largest of several references in the call's own dtype, for each
of them rounds in a way that the field calls right. Of a large call some queries have a golden; the others are held to
torch's own answer, within what those show.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.candidate.request import Request
from harness.cell.directions import Compass
from harness.cell.draws import Jitter
from harness.cell.golden import (
    Problem,
    Reference,
    at_rows,
    in_float64,
    largest_log_sum,
    lost_rows,
    outcome,
    references_of,
    sdpa_math,
    sdpa_padded,
    textbook,
    textbook_autocast,
    uncancelled,
)
from harness.cell.rule import JITTER_DRAWS, TensorVerdict, Term, Yardstick
from harness.cell.sampling import ALL_QUERIES, judge_others

LARGEST_JITTERED = 1e3  # of a mask's numbers: beyond that they stand for "hidden", and must not change places
FEW_DRAWS = 2
BELIEVED = 100.0  # times the smallest noise of any reference
USUAL_LOG_SUM = 16.0  # beyond it the rounding of a kept log of the sum counts, u |log sum exp|


class Unanswered(Exception):
    """torch itself does not do this call."""


@dataclass(frozen=True, eq=False)
class Held:
    """What the answer to one request is held to: a yardstick for each tensor, torch's whole answer where rows are
    sampled, and, where that was asked for, the directions in which bugs move the output.
    """

    request: Request
    rows: Tensor | None
    yardsticks: dict[str, Yardstick]
    whole: Tensor | None
    compass: Compass | None = None

    @classmethod
    def of(
        cls,
        request: Request,
        generator: torch.Generator,
        *,
        rows: Tensor | None = None,
        others: bool = True,
        directions: bool = False,
        dropped: Tensor | None = None,
    ) -> "Held":
        """Raises Unanswered where torch has no answer.

        rows        (n,), the queries that have a golden; None: all
        others      those that have none are held to torch's own answer
        directions  the output is also judged in the directions in which bugs move it
        dropped     (B, H, L, S), what each weight is multiplied by, where the request has dropout
        """
        problem = at_rows(request, rows)
        try:
            draws = list(_draws(problem, generator, dropped))
        except (RuntimeError, ValueError) as error:
            raise Unanswered(str(error).splitlines()[0]) from error
        # Of every reference, its draws: the first has them all, the others have fewer.
        count = len(draws[0].references)
        sides = [[draw.references[at] for draw in draws if at < len(draw.references)] for at in range(count)]
        exact = in_float64(problem)
        largest = uncancelled(exact, dropped) if problem.cotangent is not None else {}
        rounded = max(1.0, largest_log_sum(exact) / USUAL_LOG_SUM)
        sticks = {}
        for name in draws[0].golden:
            goldens = [_spread(name, draw.golden[name], request, rows) for draw in draws]
            spread = [[_spread(name, outputs[name], request, rows) for outputs in side] for side in sides]
            size = _spread(name, largest[name], request, rows) if name in largest else goldens[0]
            lost = lost_rows(problem) if name == "out" else None
            left_open = None if lost is None else lost[..., None].expand(goldens[0].shape)
            sticks[name] = _stick(name, spread, goldens, rounded * size, left_open)
        compass = None
        if directions:
            errors = [[r["out"] - draw.golden["out"] for r, draw in zip(side, draws, strict=False)] for side in sides]
            compass = Compass.of(problem, draws[0].golden["out"], errors)
        whole = None if rows is None or not others else _whole(request, rows, sticks["out"])
        return cls(request, rows, sticks, whole, compass)

    def judge(self, tensors: dict[str, Tensor]) -> list[TensorVerdict]:
        """Of everything that was asked for."""
        request = self.request
        verdicts = []
        for name, stick in self.yardsticks.items():
            answer = tensors.get(name)
            if answer is None:
                verdicts.append(TensorVerdict(name, "", "mismatch", "not returned"))
                continue
            if not bool(answer.isfinite().all()) and lost_rows(request) is not None:
                verdicts.append(
                    TensorVerdict(name, "", "mismatch", "not finite where a mask hides all keys by a number")
                )
                continue
            if request.mode == "autocast" and answer.dtype in (torch.bfloat16, request.q.dtype):
                answer = answer.float()
            if name != "out" or self.rows is None:
                verdicts.append(stick.judge(name, answer))
                continue
            if answer.shape != (whole := self.whole_shape):
                reason = f"shape {tuple(answer.shape)} instead of {tuple(whole)}"
                verdicts.append(TensorVerdict(name, "", "mismatch", reason))
                continue
            verdicts.append(stick.judge(name, answer[:, :, self.rows]))
            if self.whole is not None:
                verdicts.append(self._others(stick, answer))
        if self.compass is not None and all(verdict.status in ("ok", "degraded") for verdict in verdicts):
            out = tensors["out"]
            worse = max(1.0, *(verdict.err_ratio or 0.0 for verdict in verdicts))
            verdicts.append(self.compass.judge(out if self.rows is None else out[:, :, self.rows], worse=worse))
        return verdicts

    @property
    def whole_shape(self) -> torch.Size:
        q, v = self.request.q, self.request.v
        return torch.Size((*q.shape[:3], v.shape[3]))

    def _others(self, stick: Yardstick, answer: Tensor) -> TensorVerdict:
        """Every query against torch's own answer."""
        assert self.whole is not None
        known = torch.ones((), dtype=torch.bool)
        if (lost := lost_rows(self.request)) is not None:
            known = ~lost[..., None]
        promote = partial(self._of_queries, answer=answer)
        return judge_others(answer, self.whole, stick, known=known, rows=2, promote=promote)

    def _of_queries(self, rows: Tensor, *, answer: Tensor) -> TensorVerdict:
        """These alone, each with a golden."""
        asked = replace(self.request, cotangent=None, directions=(), gradients=())
        held = Held.of(asked, torch.Generator().manual_seed(0), rows=rows, others=False)
        return held.yardsticks["out"].judge(ALL_QUERIES, answer[:, :, rows])


@dataclass(frozen=True, eq=False)
class _Draw:
    golden: dict[str, Tensor]
    references: list[dict[str, Tensor]]


def _draws(problem: Problem, generator: torch.Generator, dropped: Tensor | None) -> Iterator[_Draw]:
    """As it is, and jittered by the dtype's eps."""
    is_autocast = problem.mode == "autocast"
    dtype = torch.bfloat16 if is_autocast else problem.q.dtype
    jitter = Jitter(dtype, generator)
    for number in range(1 + JITTER_DRAWS):
        subject = problem if number == 0 else _jittered(problem, jitter)
        if is_autocast:
            golden = outcome(in_float64(_rounded(subject)), textbook)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                references = [outcome(subject, run) for run in (sdpa_padded, textbook_autocast)]
            references = [{name: t.float() for name, t in each.items()} for each in references]
        else:
            plain = partial(textbook, dropped=dropped)
            golden = outcome(in_float64(subject), plain)
            first, *others = references_of(subject) if dropped is None else (Reference("the textbook", plain),)
            # One reference shows how much the draws scatter; of the others a few say how large their noise is.
            runs = (first, *others) if number < FEW_DRAWS else (first,)
            references = [outcome(subject, reference.run) for reference in runs]
        yield _Draw(golden, references)
    if is_autocast:  # a kernel may as well leave the inputs as they are
        exact = outcome(in_float64(problem), textbook)
        yield _Draw(exact, [{name: t.float() for name, t in exact.items()} for _ in range(2)])


def _jittered(problem: Problem, jitter: Jitter) -> Problem:
    mask = problem.mask
    if mask is not None and mask.is_floating_point():
        mask = torch.where(mask.abs() < LARGEST_JITTERED, jitter.tensor(mask), mask)
    return replace(
        problem, q=jitter.tensor(problem.q), k=jitter.tensor(problem.k), v=jitter.tensor(problem.v), mask=mask
    )


def _rounded(problem: Problem) -> Problem:
    """To bfloat16, as autocast hands everything to SDPA."""
    tensors: dict[str, Any] = {}
    for name, t in problem.tensors.items():
        tensors[name] = t.bfloat16().to(t.dtype) if t.is_floating_point() else t
    return replace(problem, **tensors)


def _whole(request: Request, rows: Tensor, stick: Yardstick) -> Tensor | None:
    """torch's answer for all queries, by the first of its ways that is right where there is a golden; None: by none.

    Its fused kernel has bugs of its own: a negative scale beside a causal mask, for instance.
    """
    around: AbstractContextManager[object] = nullcontext()
    if request.mode == "autocast":
        around = torch.autocast("cpu", dtype=torch.bfloat16)
    for run in (sdpa_padded, sdpa_math):
        try:
            with around:
                whole = outcome(replace(request, cotangent=None, directions=()), run)["out"]
        except (RuntimeError, ValueError):  # not every way takes a mask beside is_causal
            continue
        sampled = whole[:, :, rows]
        if stick.judge("out", sampled.float() if request.mode == "autocast" else sampled).status == "ok":
            return whole
    return None


def _spread(name: str, tensor: Tensor, request: Request, rows: Tensor | None) -> Tensor:
    """The gradient of some queries among all: those of the others are 0."""
    if rows is None or name not in ("grad q", "grad mask"):
        return tensor
    like = request.q if name == "grad q" else request.mask
    assert like is not None
    if like.shape[-2] == 1 and tensor.shape[-2] == 1:
        return tensor
    full = torch.zeros(like.shape, dtype=tensor.dtype)
    full[..., rows, :] = tensor
    return full


def _stick(
    name: str, sides: Sequence[Sequence[Tensor]], goldens: Sequence[Tensor], size: Tensor, left_open: Tensor | None
) -> Yardstick:
    """By the noisiest of the references; one that overflows where another does not is left out.

    `size`: of which one rounding is part of the noise: the tensor itself, or what its terms come to before they cancel.
    """
    finite = [side for side in sides if all(bool(t.isfinite().all()) for t in side)]
    sticks = [
        _of_size(
            Yardstick.of(list(side), list(goldens[: len(side)]), may_differ=left_open, is_gradient=name != "out"), size
        )
        for side in finite or sides
    ]
    sticks = _believed(sticks)
    first = max(sticks, key=lambda stick: stick.floor.jitter.total)  # of the one with all draws
    rows = torch.stack([stick.floor.r.rows for stick in sticks]).amax(0)
    total = max(stick.floor.r.total for stick in sticks)
    ref_max_abs_err = max(stick.ref_max_abs_err for stick in sticks)
    return replace(first, floor=replace(first.floor, r=Term(rows, total)), ref_max_abs_err=ref_max_abs_err)


def _of_size(stick: Yardstick, size: Tensor) -> Yardstick:
    if not size.numel():
        return stick
    size = size.double().abs().reshape(stick.golden.shape)
    size = size.masked_fill(~size.isfinite(), 0.0)
    if stick.floor.open_places is not None:
        size = size.masked_fill(stick.floor.open_places, 0.0)
    return replace(stick, floor=replace(stick.floor, size=Term.of(size)))


def _believed(sticks: Sequence[Yardstick]) -> list[Yardstick]:
    """Without references that are wrong themselves: torch has bugs, too, and an error of theirs would excuse all."""
    least = min(stick.floor.r.total for stick in sticks)
    first = sticks[0]
    rounding = torch.finfo(first.dtype).eps * first.floor.size.total
    limit = BELIEVED * (least + max(stick.floor.jitter.total for stick in sticks) + rounding)
    return [stick for stick in sticks if stick.floor.r.total <= limit or stick.floor.r.total == least]


def answered(request: Request) -> bool:
    """Whether torch does this call."""
    try:
        outcome(request, sdpa_padded)
    except (RuntimeError, ValueError):
        return False
    return True
