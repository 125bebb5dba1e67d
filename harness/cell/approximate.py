"""How close an approximate kernel comes: metrics over the whole output, and the limits that a suite declares.

Such a kernel leaves work out on purpose, so the acceptance rule, which allows for rounding alone, cannot judge it. What
it gives is compared with the golden: the reference in float64 on the same inputs. Besides, each of its calls must be
attention over the blocks that it kept, however wide the limits; and where it left nothing out in any regime, the
acceptance rule holds for it as for any other kernel.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harness.cell.build import Pair, WatchedKernel
from harness.cell.draws import Draws, Jitter, draw, fast_path_off, golden_backend, plain_and_jittered
from harness.cell.referee import outputs
from harness.cell.regimes import Inputs, make_inputs
from harness.cell.rule import judge
from harness.cell.timing import Ratio, Stopwatch
from harness.kernels import shield
from harness.kernels.call import AttentionCall, BlockCount, Tally
from harness.kernels.front import find_kernel
from harness.suite.schema import Accuracy

DENSE = "tiled"  # the exact kernel beside which an approximate one is timed
AT_LEAST = frozenset({"cosine"})  # limits from below; the others are from above


@contextmanager
def kept_blocks_checked(watch: WatchedKernel) -> Iterator[list[str]]:
    """While open, every call is compared with dense attention over its own kept blocks; the list tells what differs."""
    kernel, differences = watch.kernel, list[str]()

    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        out, weights = kernel.run(q, k, v, call)
        if kernel.tally is not None and (words := difference(kernel.tally, q, k, v, call, out)):
            differences.append(words)
        return out, weights

    watch.kernel = replace(kernel, run=run)
    try:
        yield differences
    finally:
        watch.kernel = kernel


def difference(tally: Tally, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, out: object) -> str | None:
    """In words; None where there is none, or none can be told."""
    count, choice = tally.last, tally.choice
    # Of what is not finite the shield makes a clean call, and that is looked at.
    if not all(bool(t.isfinite().all()) for t in (q, k, v)) or not isinstance(out, Tensor) or not out.numel():
        return None
    if count.pv_skipped and (
        choice is None
        or choice.pv is None
        or k.shape[2] * math.exp(-choice.pv) > torch.finfo(torch.promote_types(q.dtype, torch.float32)).eps
    ):
        return None  # values that count were left out, and the map does not tell which
    if not count.skipped:
        exact, words = call, "although nothing was skipped"
    elif choice is not None:
        exact, words = call.restricted(choice.shown()), "over the blocks that it kept"
    else:
        return None
    verdict = judge("out", out, *dense_draws((q, k, v), exact, jittered=False))
    # Without the jittered draws the noise floor is a low one: only what no rounding explains counts.
    return f"the kernel is not attention {words}: {verdict.reason}" if verdict.status == "mismatch" else None


@torch.no_grad()
def dense_draws(given: Sequence[Tensor], call: AttentionCall, *, jittered: bool) -> Draws[Tensor]:
    """Of dense attention on `given`, which is q, k and v; the plain draw alone, or the jittered ones too."""
    eager, dtype = find_kernel("eager"), given[0].dtype
    jitter = Jitter(dtype, torch.Generator().manual_seed(0))

    def run(given: Sequence[Tensor]) -> Tensor:
        q, k, v = given
        return shield.run(eager, q, k, v, replace(call, need_weights=False))[0]

    return draw(
        plain_and_jittered(given, lambda given: [jitter.tensor(t) for t in given]) if jittered else [given],
        reference=run,
        golden=lambda given: run([t.double() for t in given]),
        dtype=dtype,
    )


@dataclass(frozen=True, slots=True)
class Metrics:
    rel_l1: float  # sum|C - G| / sum|G|
    cosine: float  # of both as one long vector
    rmse: float
    max_abs: float

    @staticmethod
    def of(candidate: Tensor, golden: Tensor) -> "Metrics":
        c, g = candidate.detach().double().flatten(), golden.detach().double().flatten()
        if c.shape != g.shape or not c.numel():
            raise ValueError(f"{tuple(candidate.shape)} and {tuple(golden.shape)}: must be one shape, and not empty")
        error = (c - g).abs()
        size, lengths = g.abs().sum(), c.norm() * g.norm()
        same = bool((error == 0).all())
        return Metrics(
            # Of a golden of zeros any error is infinite, and the right answer none.
            rel_l1=0.0 if same else float(error.sum() / size),
            cosine=1.0 if same else float(torch.dot(c, g) / lengths),
            rmse=float(error.square().mean().sqrt()),
            max_abs=float(error.max()),
        )

    def failures(self, limits: Accuracy) -> list[str]:
        """In words; a NaN is within no limit."""
        beyond = []
        for name, limit in asdict(limits).items():
            value = getattr(self, name)
            if limit is None or (value >= limit if name in AT_LEAST else value <= limit):
                continue
            beyond.append(f"{name} {value:.3g}, must be at {'least' if name in AT_LEAST else 'most'} {limit:g}")
        return beyond


@dataclass(frozen=True, slots=True)
class Closeness:
    """One regime: how close, what was left out, and how long it took on these inputs."""

    regime: str
    metrics: Metrics
    mean_abs: float
    blocks: BlockCount
    latency_ms: float | None = None
    wrong: str | None = None  # what differs from exact attention over the very blocks that it kept
    dense_ratio: Ratio | None = None  # latency over that of the dense kernel on the same inputs, in the same blocks

    def as_dict(self) -> dict[str, Any]:
        """For the record: one level, by the names of the table's columns."""
        ratio = self.dense_ratio
        return {
            "regime": self.regime,
            **asdict(self.metrics),
            "sparsity": self.blocks.sparsity,
            "kept_blocks": self.blocks.kept,
            "visible_blocks": self.blocks.visible,
            "all_blocks": self.blocks.total,
            "skipped_blocks": self.blocks.skipped,
            "pv_skipped_blocks": self.blocks.pv_skipped,
            "latency_ms": self.latency_ms,
            "dense_ratio": None if ratio is None else ratio.value,
            "dense_ratio_lo": None if ratio is None else ratio.lo,
            "dense_ratio_hi": None if ratio is None else ratio.hi,
        }


@dataclass(frozen=True, slots=True)
class Approximation:
    """All regimes of a cell."""

    regimes: tuple[Closeness, ...]
    inputs: Mapping[str, Inputs]

    @property
    def worst(self) -> Closeness:
        """By relative L1; a NaN is worse than any number."""
        return max(self.regimes, key=lambda c: c.metrics.rel_l1 if c.metrics.rel_l1 == c.metrics.rel_l1 else torch.inf)

    @property
    def left_something_out(self) -> bool:
        return any(c.blocks.skipped > 0 or c.blocks.pv_skipped > 0 for c in self.regimes)

    def verdict(self, limits: Accuracy) -> tuple[str, str | None]:
        """Limits are for what was left out: what was kept must be right however wide they are."""
        failed = [
            (c.regime, "; ".join(c.metrics.failures(limits) + ([] if c.wrong is None else [c.wrong])))
            for c in self.regimes
        ]
        reasons = [f"out in regime {regime}: {words}" for regime, words in failed if words]
        return ("mismatch", " | ".join(reasons)) if reasons else ("ok", None)

    def error_columns(self) -> dict[str, Any]:
        """Of the record, where the acceptance rule does not judge and has none to give."""
        worst = self.worst
        return {
            "max_abs_err": worst.metrics.max_abs,
            "mean_abs_err": worst.mean_abs,
            "worst_tensor": "out",
            "worst_regime": worst.regime,
        }

    def columns(self) -> dict[str, Any]:
        """Of the record: what was left out and how close it came, whoever judges."""
        worst = self.worst
        return {
            "sparsity": worst.blocks.sparsity,
            "rel_l1": worst.metrics.rel_l1,
            "cosine": worst.metrics.cosine,
            "rmse": worst.metrics.rmse,
            "skipped_blocks": worst.blocks.skipped,
            "approximation": [closeness.as_dict() for closeness in self.regimes],
        }

    def timed(self, latencies: Mapping[str, tuple[float, Ratio]]) -> "Approximation":
        """With the latency in milliseconds and its ratio to dense, of each regime that was timed."""

        def one(closeness: Closeness) -> Closeness:
            if closeness.regime not in latencies:
                return closeness
            latency, ratio = latencies[closeness.regime]
            return replace(closeness, latency_ms=latency, dense_ratio=ratio)

        return replace(self, regimes=tuple(map(one, self.regimes)))


def approximate(pair: Pair, regimes: Sequence[str], *, seed: int, stopwatch: Stopwatch) -> Approximation:
    """Runs candidate and golden over the regimes, and counts each regime's blocks."""
    tally = pair.watch.kernel.tally
    if tally is None:
        raise ValueError(f"kernel {pair.watch.kernel.name} is approximate and counts nothing: it has no tally")
    golden, generator = pair.reference.in_float64(), torch.Generator().manual_seed(seed)
    closenesses, drawn = [], {}
    for regime in regimes:
        inputs = make_inputs(pair.case, regime, generator, poison=pair.poison)
        if inputs is None:
            continue
        cotangent = torch.randn(inputs.x.shape, generator=generator).to(inputs.x.dtype)
        tally.take()
        with fast_path_off(), stopwatch.running():
            with kept_blocks_checked(pair.watch) as wrong:
                c = outputs(pair, pair.candidate, inputs.candidate_x, cotangent)["out"]
            blocks = tally.take()
            with golden_backend(inputs.x.dtype):
                g = outputs(pair, golden, inputs.x.double(), cotangent.double())["out"]
        if inputs.poisoned is not None:  # what the garbage itself gives is nobody's question
            c, g = c[~inputs.poisoned], g[~inputs.poisoned]
        mean = float((c.double() - g).abs().mean())
        closenesses.append(Closeness(regime, Metrics.of(c, g), mean, blocks, wrong=next(iter(wrong), None)))
        drawn[regime] = inputs
    if not closenesses:
        raise ArithmeticError(f"none of {', '.join(regimes)} applies to this cell")
    return Approximation(tuple(closenesses), drawn)
