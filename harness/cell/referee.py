"""Runs both sides and the golden over all regimes and hands every tensor to the acceptance rule."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from harness.case import HALF
from harness.cell import self_checks
from harness.cell.build import Pair
from harness.cell.draws import Draws, Jitter, draw, fast_path_off, plain_and_jittered, torch_threads
from harness.cell.regimes import Inputs, make_inputs
from harness.cell.rule import JITTER_DRAWS, TensorVerdict, Yardstick
from harness.cell.side import Side, run_steps, train_step
from harness.cell.timing import Stopwatch
from harness.kernels.call import ContractBroken, WrongDtype
from harness.swaps.weights import WeightSource

S = TypeVar("S")
T = TypeVar("T")

# The most sensitive regime: a scale wrong by 1e-3 stands at 450 N and more in it, at 30 N in peaked and offset.
SHADOW_REGIME = "plain"
REFERENCES, GOLDENS, JITTERING = "reference", "golden", "jittered copies"  # parts of a cell's work
CANDIDATE, VERDICTS, CHECKS = "candidate", "floors and verdicts", "kernel against itself"
IN_FLOAT32 = " (in float32)"  # ends the name of a shadow's tensor


def one_thread() -> AbstractContextManager[None]:
    """Many small operations: two threads gain little, and on a busy machine each would wait for the other."""
    return torch_threads(1)


@dataclass(frozen=True)
class Part:
    """Some of a tensor that is judged apart, and what its name then ends in."""

    label: str = ""
    of: Callable[[Any], Any] = lambda tensor: tensor


WHOLE = Part()


@dataclass(frozen=True)
class Expected:
    """One regime: its inputs, and what reference and golden made of them."""

    inputs: Inputs
    cotangent: Tensor
    draws: Draws[dict[str, Any]]  # every tensor by name
    rows: Tensor | None = None  # of a large cell: the queries that have a golden
    whole: Tensor | None = None  # and what the reference gives for all
    held: tuple[Tensor, ...] = ()  # what a cache is given to hold before a single step
    _yardsticks: dict[tuple[str, WeightSource], Yardstick] = field(default_factory=dict)  # made when first asked for

    def tensor(self, name: str, source: WeightSource, part: Part = WHOLE) -> Draws[Tensor]:
        """What `part` of a candidate's tensor `name` is compared with, which is `source` of the reference's."""
        key = f"grad {source.name}" if name.startswith("grad ") else name
        return self.draws.map(lambda outputs: part.of(source.of(outputs[key])))

    def yardstick(self, name: str, source: WeightSource, part: Part = WHOLE) -> Yardstick:
        if (name + part.label, source) not in self._yardsticks:
            draws, may_differ, poisoned = self.tensor(name, source, part), None, self.inputs.poisoned
            if poisoned is not None:
                poisoned = poisoned if self.rows is None else poisoned[:, self.rows]
                rows = poisoned[..., None] if name == "out" else poisoned[:, None, :, None]
                may_differ = rows.expand(draws.references[0].shape)
            made = Yardstick.of(*draws, may_differ=may_differ, is_gradient=name.startswith("grad "))
            self._yardsticks[name + part.label, source] = made
        return self._yardsticks[name + part.label, source]


def parts_of(pair: Pair, name: str) -> tuple[Part, ...]:
    """The gradient of the bias that decompresses MLA's keys and values is two things.

    The keys' half is 0 in exact arithmetic, for the softmax takes out what all keys share: nothing but rounding, whose
    size depends on the order of the sums. The values' half is a gradient like any other.
    """
    case = pair.case
    if case.kv_lora_rank is None or not (name.startswith("grad ") and name.endswith("kv_b_proj.bias")):
        return (WHOLE,)

    def half(at: slice) -> Callable[[Tensor], Tensor]:
        return lambda bias: bias.unflatten(0, (case.heads, -1))[:, at].flatten()

    return Part(", keys", half(slice(case.head_dim))), Part(", values", half(slice(case.head_dim, None)))


class Referee:
    """The reference's half of a comparison, made once per cell and regime for any number of candidates.

    Regimes are drawn in their order: a later one asked for first draws those before it, so that no number depends on
    who asks.
    """

    jittered = JITTER_DRAWS

    def __init__(
        self, pair: Pair, regimes: Sequence[str], *, seed: int, poison: float | None, stopwatch: Stopwatch | None = None
    ) -> None:
        self.regimes, self._poison = tuple(regimes), poison
        self._pair, self._stopwatch = pair, stopwatch or Stopwatch()
        self._seed, self._generator = seed, torch.Generator().manual_seed(seed)
        self._jitter = Jitter(getattr(torch, pair.case.dtype), self._generator)
        with self._stopwatch.part(JITTERING):
            self._sides = self._drawn_sides()
        self._expected: list[Expected | None] = []

    def clock(self, stopwatch: Stopwatch) -> None:
        """What follows is clocked by this one."""
        self._stopwatch = stopwatch
        if "_shadow" in vars(self) and self._shadow is not None:
            self._shadow.clock(stopwatch)

    def _drawn_sides(self) -> list[tuple[Side, Side]]:
        """Of each draw, for all regimes: reference and golden."""
        sides = self._plain_and_jittered(self._pair.reference, lambda side: side.jittered(self._jitter))
        return [(side, side.in_float64()) for side in sides]

    def _plain_and_jittered(self, plain: T, shake: Callable[[T], T]) -> Iterator[T]:
        return plain_and_jittered(plain, shake, jittered=self.jittered)

    def expected(self, regime: str) -> Expected | None:
        """None where the regime does not apply to the cell."""
        place = self.regimes.index(regime)
        while len(self._expected) <= place:
            self._expected.append(self._draw(self.regimes[len(self._expected)]))
        return self._expected[place]

    def judge(self, pair: Pair, regime: str) -> Iterator[TensorVerdict]:
        """Every tensor of `pair`'s candidate, one by one; none where the regime does not apply."""
        expected = self.expected(regime)
        if expected is None:
            return
        yield from self.judge_outputs(pair, expected, self.run_candidate(pair, expected))

    def run_candidate(self, pair: Pair, expected: Expected) -> dict[str, Any]:
        """Everything that its phase compares, by name."""
        with fast_path_off(), self._stopwatch.running(), self._stopwatch.part(CANDIDATE):
            return outputs(pair, pair.candidate, expected.inputs.candidate_x, expected.cotangent)

    def judge_outputs(self, pair: Pair, expected: Expected, candidate: dict[str, Any]) -> Iterator[TensorVerdict]:
        for name, tensor in candidate.items():
            with one_thread(), self._stopwatch.part(VERDICTS):
                verdicts = list(self._judge_tensor(pair, expected, name, tensor))
            yield from verdicts

    def _judge_tensor(self, pair: Pair, expected: Expected, name: str, tensor: Any) -> Iterator[TensorVerdict]:
        for part in parts_of(pair, name):
            yardstick = expected.yardstick(name, source_of(pair, name), part)
            yield yardstick.judge(name + part.label, part.of(tensor), regime=expected.inputs.regime)

    def examine(self, pair: Pair, *, checks: bool = True) -> Iterator[TensorVerdict]:
        """Everything that is compared, one by one: who looks for the first failure alone may stop there.

        The cheap checks without a reference come early for that reason; without `checks` they are left out.
        """
        for place, regime in enumerate(self.regimes):
            yield from self.judge(pair, regime)
            if place == 0 and checks:
                yield from checks_of(pair, seed=self._seed, stopwatch=self._stopwatch)
        if self._shadow is not None:
            yield from self._shadow.examine(pair.in_float32())

    def glance(self, pair: Pair) -> Iterator[TensorVerdict]:
        """The most sensitive part: the first regime, and in half precision its shadow."""
        yield from self.judge(pair, self.regimes[0])
        if self._shadow is not None:
            yield from self._shadow.examine(pair.in_float32())

    @cached_property
    def _shadow(self) -> "ShadowReferee | None":
        return ShadowReferee(self) if self._pair.case.dtype in HALF else None

    def _as(self, part: str, run: Callable[[S], T]) -> Callable[[S], T]:
        """The same, clocked as this part."""

        def clocked(subject: S) -> T:
            with self._stopwatch.part(part):
                return run(subject)

        return clocked

    def _inputs(self, regime: str) -> Inputs | None:
        return make_inputs(self._pair.case, regime, self._generator, poison=self._poison)

    def _draw(self, regime: str) -> Expected | None:
        inputs = self._inputs(regime)
        if inputs is None:
            return None
        with self._stopwatch.part(JITTERING):
            xs = list(self._plain_and_jittered(inputs.x, self._jitter.tensor))
        cotangent = torch.randn(inputs.x.shape, generator=self._generator).to(inputs.x.dtype)
        return self._of(inputs, xs, cotangent)

    def of_inputs(self, inputs: Inputs, cotangent: Tensor) -> Expected:
        """Reference and golden on given inputs."""
        return self._of(inputs, list(self._plain_and_jittered(inputs.x, self._jitter.tensor)), cotangent)

    def _of(self, inputs: Inputs, xs: list[Tensor], cotangent: Tensor) -> Expected:
        pair = self._pair
        with self._stopwatch.running():
            draws = draw(
                [(reference, golden, x) for (reference, golden), x in zip(self._sides, xs, strict=True)],
                reference=self._as(REFERENCES, lambda drawn: outputs(pair, drawn[0], drawn[2], cotangent)),
                golden=self._as(GOLDENS, lambda drawn: outputs(pair, drawn[1], drawn[2].double(), cotangent.double())),
                dtype=self._jitter.dtype,
            )
            if pair.case.phase == "train":
                self._add_other_backend(draws, xs, cotangent)
        return Expected(inputs, cotangent, draws)

    def _add_other_backend(self, draws: Draws[dict[str, Any]], xs: Sequence[Tensor], cotangent: Tensor) -> None:
        """Beside the same goldens: the noise of a reference with two ways is the larger of both."""
        others = [reference.by_other_backend() for reference, _ in self._sides]
        for other, golden, x in zip(others, list(draws.goldens), xs, strict=True):
            if other is not None:
                with fast_path_off(), self._stopwatch.part(REFERENCES):
                    draws.references.append(outputs(self._pair, other, x, cotangent))
                draws.goldens.append(golden)


class ShadowReferee(Referee):
    """The same cell in float32, on copies of the rounded weights, masks and inputs, by float32's rule.

    In half precision the modules round q, k and v, and that hides a scale wrong by 1 %.
    """

    def __init__(self, half: Referee) -> None:
        regime = SHADOW_REGIME if SHADOW_REGIME in half.regimes else half.regimes[0]
        pair = half._pair.in_float32()
        super().__init__(pair, [regime], seed=half._seed, poison=half._poison, stopwatch=half._stopwatch)
        self._half = half

    def examine(self, pair: Pair, *, checks: bool = True) -> Iterator[TensorVerdict]:
        """In its one regime; the checks without a reference are the cell's own."""
        return self.judge(pair, self.regimes[0])

    def judge(self, pair: Pair, regime: str) -> Iterator[TensorVerdict]:
        expected = self.expected(regime)
        if expected is None:
            return
        try:
            candidate = self.run_candidate(pair, expected)
        except Exception as failure:  # a kernel for half precision alone owes nothing here, however it says so
            is_wrong_dtype = isinstance(failure, WrongDtype)
            if isinstance(failure, ContractBroken) and not is_wrong_dtype:
                raise
            words = str(failure) if is_wrong_dtype else f"{type(failure).__name__}: {failure}"
            reason = f"the kernel does not run in float32: {words}"
            verdicts = [TensorVerdict("out", regime, "skipped", reason)]
        else:
            verdicts = list(self.judge_outputs(pair, expected, candidate))
        yield from [replace(v, tensor=v.tensor + IN_FLOAT32, is_aside=True) for v in verdicts]

    def _inputs(self, regime: str) -> Inputs | None:
        expected = self._half.expected(regime)
        if expected is None:
            return None
        inputs = expected.inputs
        return replace(inputs, x=inputs.x.float(), candidate_x=inputs.candidate_x.float())


def checks_of(pair: Pair, *, seed: int, stopwatch: Stopwatch) -> Iterator[TensorVerdict]:
    """The checks without a reference, clocked one by one."""
    verdicts = self_checks.verdicts(pair, seed=seed)
    while True:
        with stopwatch.part(CHECKS):
            verdict = next(verdicts, None)
        if verdict is None:
            return
        yield verdict


def source_of(pair: Pair, name: str) -> WeightSource:
    """Where the reference has what the candidate calls `name`: of a parameter's gradient, perhaps some rows."""
    if not name.startswith("grad "):
        return WeightSource(name)
    return pair.swap_report.sources().get(name.removeprefix("grad "), WeightSource("x"))


def outputs(pair: Pair, side: Side, x: Tensor, cotangent: Tensor) -> dict[str, Any]:
    """Everything this phase compares, by name."""
    if pair.case.phase == "train":
        out, gradients = train_step(side, x, cotangent)
        names = ["x", *(name for name, _ in side.module.named_parameters())]
        return {"out": out.detach()} | {f"grad {name}": g for name, g in zip(names, gradients, strict=True)}
    with torch.no_grad():
        if pair.case.phase == "decode":
            return {"out": run_steps(side, pair.steps, x)[0]}
        out, weights = side.forward(side.module, x, side.views[0], None, pair.compares_weights)
        return {"out": out} if weights is None else {"out": out, "weights": weights}
