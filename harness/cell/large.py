"""The referees of a large cell, whose dense golden would take minutes and gigabytes, and who referees which cell.

At its full length a large cell is judged in its first regime, and in as many more as `FULL_WORK` allows: some of the
golden's rows alone, all other rows beside the reference (`sampling.py`); when decoding, single steps after a context
that both sides are given. In the other regimes, and for what has no place there (weights, dense gradients, the
candidate's own prefill, the float32 shadow), it is judged on the same modules at a short length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from harness.case import PLAINEST, Case
from harness.cell.apart import TimedResult
from harness.cell.build import Pair, at_rows
from harness.cell.draws import draw, fast_path_off
from harness.cell.referee import (
    CANDIDATE,
    GOLDENS,
    REFERENCES,
    Expected,
    Referee,
    checks_of,
    one_thread,
    outputs,
    source_of,
)
from harness.cell.regimes import Inputs
from harness.cell.rule import LARGE_DRAWS, Equivalence, Sampled, TensorVerdict, judge
from harness.cell.sampling import (
    ALL_QUERIES,
    FULL_WORK,
    is_large,
    judge_others,
    operations,
    rows_of,
    short_length,
)
from harness.cell.side import Side, Subject, single_steps
from harness.cell.timing import Stopwatch

FLOAT64 = torch.float64
Drawn = tuple[tuple[Side, Side], tuple[Tensor, tuple[Tensor, ...]]]  # reference and golden; tokens, and their context
TIMED = "timed"  # the regime of inputs that a kernel was timed on


class SampledReferee(Referee):
    """Some queries of each regime have a golden: the sides of its draws give those alone. Weights are not compared."""

    jittered = LARGE_DRAWS

    def __init__(self, pair: Pair, *options: Any, rows: Tensor | None = None, seed: int, **named: Any) -> None:
        self.rows = rows_of(pair.case, seed) if rows is None else rows
        super().__init__(pair, *options, seed=seed, **named)

    def _drawn_sides(self) -> list[tuple[Side, Side]]:
        at = at_rows(self._pair, self.rows)
        sides = self._plain_and_jittered(at, lambda side: side.jittered(self._jitter))
        return [(side, side.in_float64()) for side in sides]

    def run_candidate(self, pair: Pair, expected: Expected) -> dict[str, Any]:
        without_weights = replace(pair, candidate=replace(pair.candidate, gives_weights=False))
        return super().run_candidate(without_weights, expected)

    def _of(self, inputs: Inputs, xs: list[Tensor], cotangent: Tensor) -> Expected:
        """The cotangent lives on the sampled rows: gradients are theirs."""
        expected = super()._of(inputs, xs, cotangent[:, self.rows])
        with self._stopwatch.running(), self._stopwatch.part(REFERENCES), fast_path_off(), torch.no_grad():
            side = self._pair.reference
            whole = side.forward(side.module, inputs.x, side.views[0], None, False)[0]
        draws = expected.draws  # the whole reference is one more that rounds in its own way
        draws.references.append(draws.references[0] | {"out": whole[:, self.rows]})
        draws.goldens.append(draws.goldens[0])
        on_rows = torch.zeros_like(cotangent)
        on_rows[:, self.rows] = cotangent[:, self.rows]
        return replace(expected, cotangent=on_rows, rows=self.rows, whole=whole)

    def _judge_tensor(self, pair: Pair, expected: Expected, name: str, tensor: Any) -> Iterator[TensorVerdict]:
        if name != "out" or not isinstance(tensor, Tensor):
            yield from super()._judge_tensor(pair, expected, name, tensor)
            return
        whole, regime, poisoned = expected.whole, expected.inputs.regime, expected.inputs.poisoned
        assert whole is not None
        if tensor.shape != whole.shape:
            reason = f"shape {tuple(tensor.shape)} instead of {tuple(whole.shape)}"
            yield TensorVerdict(name, regime, "mismatch", reason)
            return
        stick = expected.yardstick(name, source_of(pair, name))
        verdict = stick.judge(name, tensor[:, self.rows], regime=regime)
        yield verdict
        if verdict.status == "mismatch":
            return
        known = torch.ones((), dtype=torch.bool) if poisoned is None else ~poisoned[..., None]
        promote = partial(self._promoted, pair, expected, tensor)
        others = judge_others(tensor, whole, stick, known=known, rows=1, promote=promote)
        yield replace(others, regime=regime, is_aside=True)  # of the reference's distance, not of the golden's

    def _promoted(self, pair: Pair, expected: Expected, tensor: Tensor, rows: Tensor) -> TensorVerdict:
        """By the golden on these rows."""
        referee = SampledReferee(
            self._pair, self.regimes, rows=rows, seed=self._seed, poison=self._poison, stopwatch=self._stopwatch
        )
        xs = list(referee._plain_and_jittered(expected.inputs.x, referee._jitter.tensor))
        sides = replace(pair, case=replace(pair.case, phase="prefill"))
        draws = draw(
            [(reference, golden, x) for (reference, golden), x in zip(referee._sides, xs, strict=True)],
            reference=self._as(REFERENCES, lambda drawn: outputs(sides, drawn[0], drawn[2], drawn[2])),
            golden=self._as(GOLDENS, lambda drawn: outputs(sides, drawn[1], drawn[2].double(), drawn[2])),
            dtype=self._jitter.dtype,
        )
        stick = replace(expected, draws=draws, rows=rows, _yardsticks={}).yardstick("out", source_of(pair, "out"))
        return stick.judge(ALL_QUERIES, tensor[:, rows], regime=expected.inputs.regime)


class StepsReferee(Referee):
    """Decode as decode: single steps, each after a context whose keys and values are given, and part of the inputs.

    They are what the reference's projections make of the regime's tokens, in the cell's dtype. The golden works on the
    same numbers in float64; a jittered draw moves them.
    """

    jittered = LARGE_DRAWS

    def _draw(self, regime: str) -> Expected | None:
        inputs = self._inputs(regime)
        return None if inputs is None or inputs.poisoned is not None else self.of_inputs(inputs, inputs.x)

    def of_inputs(self, inputs: Inputs, cotangent: Tensor) -> Expected:
        """Of a whole sequence; the tokens of the steps are what is asked for."""
        streams, places = self._pair.trusted.streams, [queries.start for queries, _ in self._pair.steps]
        assert streams is not None
        with torch.no_grad():
            held = streams(self._pair.reference.module, inputs.x)
        x = inputs.x[:, places]
        inputs = replace(inputs, x=x, candidate_x=x)
        subjects = self._plain_and_jittered(
            (x, held), lambda s: (self._jitter.tensor(s[0]), tuple(map(self._jitter.tensor, s[1])))
        )
        with self._stopwatch.running(), torch.no_grad():
            draws = draw(
                zip(self._sides, subjects, strict=True),
                reference=self._as(REFERENCES, self._reference_steps),
                golden=self._as(GOLDENS, self._golden_steps),
                dtype=self._jitter.dtype,
            )
        return Expected(inputs, x, draws, held=held)

    def _reference_steps(self, drawn: Drawn) -> dict[str, Any]:
        (side, _), (x, held) = drawn
        return self._steps(side, x, tuple(t.clone() for t in held))  # a step writes into its cache

    def _golden_steps(self, drawn: Drawn) -> dict[str, Any]:
        (_, side), (x, held) = drawn
        return self._steps(side, x.double(), tuple(t.double() for t in held))

    def _steps(self, side: Side, x: Tensor, held: tuple[Tensor, ...]) -> dict[str, Any]:
        cache_of = self._pair.trusted.cache_of
        assert cache_of is not None
        return {"out": single_steps(side, self._pair.steps, x, cache_of(side.module, held))}

    def run_candidate(self, pair: Pair, expected: Expected) -> dict[str, Any]:
        side: Any = pair.candidate
        stopwatch = self._stopwatch
        with fast_path_off(), torch.no_grad(), stopwatch.running(), stopwatch.part(CANDIDATE):
            cache = side.new_cache(pair.case.seq_len)
            side.module.hold(cache, *expected.held)
            return {"out": single_steps(side, pair.steps, expected.inputs.candidate_x, cache)}


def full_length_of(case: Case) -> type[Referee]:
    return StepsReferee if case.phase == "decode" else SampledReferee


class ShortLength(Referee):
    """The same draws' modules on shorter sequences."""

    jittered = LARGE_DRAWS

    def __init__(self, full: Referee, *options: Any, **named: Any) -> None:
        self._full = full
        super().__init__(*options, **named)

    def _drawn_sides(self) -> list[tuple[Side, Side]]:
        own = self._pair.reference
        views = self._plain_and_jittered(own.views, lambda views: own.jittered_views(self._jitter))
        sides = [replace(own, views=each) for each in views]
        return [
            (replace(side, module=reference.module), replace(side, module=golden.module, views=side.views_in(FLOAT64)))
            for side, (reference, golden) in zip(sides, self._full._sides, strict=True)
        ]


class LargeReferee:
    """A cell at its full length, and at a short one."""

    def __init__(
        self, pair: Pair, regimes: Sequence[str], *, seed: int, poison: float | None, stopwatch: Stopwatch | None = None
    ) -> None:
        self._seed, self.length = seed, short_length(pair.case)
        self._stopwatch = stopwatch or Stopwatch()
        count = max(1, int(FULL_WORK / operations(pair.case)))
        named: dict[str, Any] = {"seed": seed, "poison": poison, "stopwatch": self._stopwatch}
        self.full = full_length_of(pair.case)(pair, regimes[:count], **named)
        self._short = ShortLength(self.full, pair.at_length(self.length), regimes, **named)

    def clock(self, stopwatch: Stopwatch) -> None:
        for part in (self.full, self._short):
            part.clock(stopwatch)
        self._stopwatch = stopwatch

    def expected(self, regime: str) -> Expected | None:
        return self.full.expected(regime)

    def examine(self, pair: Pair) -> Iterator[TensorVerdict]:
        """The short length first: it costs least, and finds most of what can be found."""
        yield from self._named(self._short.examine(pair.at_length(self.length), checks=False))
        yield from checks_of(pair, seed=self._seed, stopwatch=self._stopwatch)
        for regime in self.full.regimes:
            yield from self.full.judge(pair, regime)

    def glance(self, pair: Pair) -> Iterator[TensorVerdict]:
        yield from self._named(self._short.glance(pair.at_length(self.length)))
        yield from self.full.judge(pair, self.full.regimes[0])

    def _named(self, verdicts: Iterator[TensorVerdict]) -> Iterator[TensorVerdict]:
        for verdict in verdicts:
            yield replace(verdict, tensor=f"{verdict.tensor} (at length {self.length})")

    @property
    def sampled(self) -> Sampled:
        if isinstance(self.full, SampledReferee):
            rows = self.full.rows.tolist()
        else:
            rows = [queries.start for queries, _ in self.full._pair.steps]
        return Sampled(self._seed, tuple(rows), self.full.regimes, self.length)


def referee_of(
    pair: Pair, regimes: Sequence[str], *, seed: int, poison: float | None, stopwatch: Stopwatch | None = None
) -> Referee | LargeReferee:
    kind = LargeReferee if is_large(pair.case) else Referee
    return kind(pair, regimes, seed=seed, poison=poison, stopwatch=stopwatch)


class LatestReferee:
    """Of the cell that was judged last: its reference and golden hold for other kernels in the same cell."""

    def __init__(self) -> None:
        self._key: object = None
        self._referee: Referee | LargeReferee | None = None

    def keep_for(
        self, case: Case, regimes: Sequence[str], *, seed: int, poison: float | None, gives_weights: bool
    ) -> None:
        """Forgets it, before anything is made for another cell: two large ones would not fit into memory.

        Nor does it hold for a kernel that gives weights where the last gave none: the reference was not asked for them.
        """
        cell = replace(case, kernel=PLAINEST)
        key = (cell, tuple(regimes), seed, repr(poison), gives_weights, torch.get_num_threads())
        if key != self._key:
            self._key, self._referee = key, None

    def forget(self) -> None:
        self._key = self._referee = None

    def of(
        self, pair: Pair, regimes: Sequence[str], *, seed: int, poison: float | None, stopwatch: Stopwatch
    ) -> Referee | LargeReferee:
        weights = pair.candidate.gives_weights
        self.keep_for(pair.case, regimes, seed=seed, poison=poison, gives_weights=weights)
        if self._referee is None:
            self._referee = referee_of(pair, regimes, seed=seed, poison=poison, stopwatch=stopwatch)
        self._referee.clock(stopwatch)
        return self._referee


LATEST = LatestReferee()


def compare_pair(pair: Pair, regimes: Sequence[str], *, seed: int, stopwatch: Stopwatch) -> Equivalence:
    referee = LATEST.of(pair, regimes, seed=seed, poison=pair.poison, stopwatch=stopwatch)
    try:
        verdicts = tuple(referee.examine(pair))
    except BaseException:  # amid a draw, perhaps: what came after it would depend on that
        LATEST.forget()
        raise
    if all(verdict.status == "skipped" for verdict in verdicts if not verdict.is_aside):
        raise ArithmeticError(f"none of {', '.join(regimes)} can be judged: the reference overflows, or none applies")
    return Equivalence(verdicts, referee.sampled if isinstance(referee, LargeReferee) else None)


def _judge_timed_large(pair: Pair, subject: Subject, result: TimedResult, *, seed: int) -> list[TensorVerdict]:
    """Of the output alone: gradients are those of a cotangent on all rows."""
    named: dict[str, Any] = {"seed": seed, "poison": None}
    x, kind = result.x, full_length_of(pair.case)
    if subject.phase == "decode":
        x, pair = torch.cat([subject.context[:, :-1], x], dim=1), pair.last_step()
    referee = kind(pair, [TIMED], **named)
    expected = referee.of_inputs(Inputs(TIMED, x, x), subject.cotangent)
    with one_thread():
        verdicts = list(referee._judge_tensor(pair, expected, "out", result.tensors.get("out")))
    return [_of_timed(verdict, verdict.tensor) for verdict in verdicts]


def judge_timed(pair: Pair, subject: Subject, result: TimedResult, *, seed: int) -> list[TensorVerdict]:
    """What a timed call gave, by the rule, on the very input that it was given."""
    if is_large(pair.case):
        return _judge_timed_large(pair, subject, result, seed=seed)
    referee = Referee(pair, [TIMED], seed=seed, poison=None)
    x = result.x
    if subject.phase == "decode":  # the last token of a sequence
        x = torch.cat([subject.context[:, :-1], x], dim=1)
    expected = referee.of_inputs(Inputs(TIMED, x, x), subject.cotangent)
    names = [name for name in expected.draws.references[0] if name in ("out", "grad x")]
    last = slice(-1, None) if subject.phase == "decode" else slice(None)
    draws = expected.draws.map(lambda outputs: {name: outputs[name][:, last] for name in names})
    with one_thread():
        return [
            _of_timed(
                judge(name, result.tensors.get(name), *draws.map(itemgetter(name)), is_gradient=name != "out"), name
            )
            for name in names
        ]


def _of_timed(verdict: TensorVerdict, name: str) -> TensorVerdict:
    return replace(verdict, tensor=f"{name} (of a timed call)", regime=TIMED, is_aside=True)
