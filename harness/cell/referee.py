"""Runs both sides and the golden over all regimes and hands every tensor to the acceptance rule."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from harness.case import HALF
from harness.cell import self_checks as metamorphic
from harness.cell.build import ContractBroken, Pair, Side, WrongDtype
from harness.cell.draws import Draws, Jitter, draw, fast_path_off, plain_and_jittered
from harness.cell.regimes import Inputs, make_inputs
from harness.cell.rule import Equivalence, TensorVerdict, Yardstick
from harness.cell.timing import Stopwatch
from harness.swaps.weights import WeightSource

# The most sensitive regime: a scale wrong by 1e-3 stands at 450 N and more in it, at 30 N in peaked and offset.
SHADOW_REGIME = "plain"
IN_FLOAT32 = " (in float32)"  # ends the name of a shadow's tensor


@contextmanager
def one_thread() -> Iterator[None]:
    """Many small operations: two threads gain little, and on a busy machine each would wait for the other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Expected:
    """One regime: its inputs, and what reference and golden made of them."""

    inputs: Inputs
    cotangent: Tensor
    draws: Draws[dict[str, Any]]  # every tensor by name
    _yardsticks: dict[tuple[str, WeightSource], Yardstick] = field(default_factory=dict)  # made when first asked for

    def tensor(self, name: str, source: WeightSource) -> Draws[Tensor]:
        """What a candidate's tensor `name` is compared with, which is `source` of the reference's."""
        key = f"grad {source.name}" if name.startswith("grad ") else name
        return self.draws.map(lambda outputs: source.of(outputs[key]))

    def yardstick(self, name: str, source: WeightSource) -> Yardstick:
        if (name, source) not in self._yardsticks:
            draws, may_differ, poisoned = self.tensor(name, source), None, self.inputs.poisoned
            if poisoned is not None:
                rows = poisoned[..., None] if name == "out" else poisoned[:, None, :, None]
                may_differ = rows.expand(draws.references[0].shape)
            made = Yardstick.of(*draws, may_differ=may_differ, is_gradient=name.startswith("grad "))
            self._yardsticks[name, source] = made
        return self._yardsticks[name, source]


class Referee:
    """The reference's half of a comparison, made once per cell and regime for any number of candidates.

    Regimes are drawn in their order: a later one asked for first draws those before it, so that no number depends on
    who asks.
    """

    def __init__(
        self, pair: Pair, regimes: Sequence[str], *, seed: int, poison: float | None, stopwatch: Stopwatch | None = None
    ) -> None:
        self.regimes, self._poison = tuple(regimes), poison
        self._pair, self._stopwatch = pair, stopwatch or Stopwatch()
        self._seed, self._generator = seed, torch.Generator().manual_seed(seed)
        self._jitter = Jitter(getattr(torch, pair.case.dtype), self._generator)
        sides = plain_and_jittered(pair.reference, lambda side: side.jittered(self._jitter))
        self._sides = [(side, side.in_float64()) for side in sides]  # of each draw, for all regimes: reference, golden
        self._expected: list[Expected | None] = []

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
        with fast_path_off(), self._stopwatch.running():
            return outputs(pair, pair.candidate, expected.inputs.candidate_x, expected.cotangent)

    def judge_outputs(self, pair: Pair, expected: Expected, candidate: dict[str, Any]) -> Iterator[TensorVerdict]:
        with one_thread():
            for name, tensor in candidate.items():
                yardstick = expected.yardstick(name, source_of(pair, name))
                yield yardstick.judge(name, tensor, regime=expected.inputs.regime)

    def examine(self, pair: Pair) -> Iterator[TensorVerdict]:
        """Everything that is compared, one by one: who looks for the first failure alone may stop there.

        The cheap checks without a reference come early for that reason.
        """
        for place, regime in enumerate(self.regimes):
            yield from self.judge(pair, regime)
            if place == 0:
                yield from metamorphic.verdicts(pair, seed=self._seed)
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

    def _inputs(self, regime: str) -> Inputs | None:
        return make_inputs(self._pair.case, regime, self._generator, poison=self._poison)

    def _draw(self, regime: str) -> Expected | None:
        pair, inputs = self._pair, self._inputs(regime)
        if inputs is None:
            return None
        xs = list(plain_and_jittered(inputs.x, self._jitter.tensor))
        cotangent = torch.randn(inputs.x.shape, generator=self._generator).to(inputs.x.dtype)

        with self._stopwatch.running():
            draws = draw(
                [(reference, golden, x) for (reference, golden), x in zip(self._sides, xs, strict=True)],
                reference=lambda drawn: outputs(pair, drawn[0], drawn[2], cotangent),
                golden=lambda drawn: outputs(pair, drawn[1], drawn[2].double(), cotangent.double()),
                dtype=self._jitter.dtype,
            )
        return Expected(inputs, cotangent, draws)


class ShadowReferee(Referee):
    """The same cell in float32, on copies of the rounded weights, masks and inputs, by float32's rule.

    In half precision the modules round q, k and v, and that hides a scale wrong by 1 %.
    """

    def __init__(self, half: Referee) -> None:
        regime = SHADOW_REGIME if SHADOW_REGIME in half.regimes else half.regimes[0]
        pair = half._pair.in_float32()
        super().__init__(pair, [regime], seed=half._seed, poison=half._poison, stopwatch=half._stopwatch)
        self._half = half

    def examine(self, pair: Pair) -> Iterator[TensorVerdict]:
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


def compare_pair(pair: Pair, regimes: Sequence[str], *, seed: int, stopwatch: Stopwatch) -> Equivalence:
    referee = Referee(pair, regimes, seed=seed, poison=pair.poison, stopwatch=stopwatch)
    verdicts = tuple(referee.examine(pair))
    if all(verdict.status == "skipped" for verdict in verdicts if not verdict.is_aside):
        raise ArithmeticError(f"none of {', '.join(regimes)} can be judged: the reference overflows, or none applies")
    return Equivalence(verdicts)


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
            return {"out": run_steps(pair, side, x)[0]}
        out, weights = side.forward(side.module, x, side.views[0], None, pair.compares_weights)
        return {"out": out} if weights is None else {"out": out, "weights": weights}


def run_steps(pair: Pair, side: Side, x: Tensor) -> tuple[Tensor, Any]:
    """Prefill into a fresh cache, then one token at a time: all outputs in order, and the filled cache."""
    assert side.new_cache is not None
    cache = side.new_cache(pair.case.kv_len)
    parts = []
    for (queries, _), view in zip(pair.steps, side.views, strict=True):
        out, _ = side.forward(side.module, x[:, queries.start : queries.stop], view, cache, False)
        parts.append(out)
    return torch.cat(parts, dim=1), cache


def train_step(side: Side, x: Tensor, cotangent: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output, and the gradients of x and of every parameter."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        out, _ = side.forward(side.module, leaf, side.views[0], None, False)
        leaves = (leaf, *side.module.parameters())
        # A kernel that cuts the graph gives no gradient: that is a gradient of 0, and judged as one.
        return out, torch.autograd.grad(out, leaves, cotangent, materialize_grads=True)
