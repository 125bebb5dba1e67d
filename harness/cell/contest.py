"""A contest: cells that differ in one axis alone, built side by side and sampled in the same rounds.

Their candidates alone run, and a decode cell's cache is filled directly: nothing is prefilled to time one step.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from harness.case import Case
from harness.cell import record_of
from harness.cell.build import build_reference, steps_of, variant_view
from harness.cell.clock import fewer_threads, sample
from harness.cell.side import OwnCaches, Side, Subject, run_variant
from harness.cell.timing import Stopwatch
from harness.environment import Others
from harness.kernels.call import Kernel
from harness.kernels.front import find_kernel
from harness.record import Record
from harness.suite.schema import Timing
from harness.swaps import VARIANT, swap
from harness.variants.cache import KVCache
from harness.variants.specs import VARIANTS

FILLED_AT_ONCE = 1024  # tokens


class Rival(Subject):
    """A candidate by itself, as it is timed in a contest."""

    def warm_up(self) -> None:
        if self.phase == "decode":
            self._cache = full_cache(self)
            fill(self._cache, self.steps[-1][0].start)
        self.call(self.example)

    def of_size(self, case: Case) -> "Rival":
        """The same module for a case of another length or batch; for its cache, not for a call."""
        return replace(self, steps=steps_of(case)[-1:], context=self.context.new_zeros(case.batch, 1, case.embed_dim))


def full_cache(own: Rival) -> Any:
    """Room for all tokens of the case, of which one is there."""
    side = own.side
    assert side.new_cache is not None
    cache = side.new_cache(own.steps[-1][1].stop)
    with torch.no_grad():
        side.forward(side.module, own.context[:, :1], {}, cache, False)
    return cache


def fill(cache: Any, length: int) -> None:
    """With random numbers, as if so many tokens had been appended. A state, which tokens do not lengthen, stays."""
    if not isinstance(cache, KVCache):
        return
    like = cache.streams()
    with torch.no_grad():
        while cache.length < length:
            tokens = min(FILLED_AT_ONCE, length - cache.length)
            cache.append(*(t.new_empty((*t.shape[:2], tokens, t.shape[3])).normal_() for t in like))


def rival(case: Case, kernel: Kernel, seed: int) -> Rival:
    spec, dtype = VARIANTS[case.variant], getattr(torch, case.dtype)
    seed = case.seed(seed)
    module, _ = swap(build_reference(case, seed)[1], to=VARIANT, kernel=kernel, **spec.swap_options)
    S, step = case.seq_len, steps_of(case)[-1]
    tokens = 1 if case.phase == "decode" else S
    side = Side(
        module=module,
        forward=run_variant,
        views=(variant_view(case, *step, dtype),),
        new_cache=OwnCaches(module) if spec.keeps_cache else None,
        gives_weights=False,
    )
    generator = torch.Generator().manual_seed(seed)
    x, cotangent = (torch.randn(case.batch, tokens, case.embed_dim, generator=generator).to(dtype) for _ in range(2))
    return Rival(side, case.phase, (step,), x, cotangent)


def compete(cases: Sequence[Case], *, seed: int, timing: Timing) -> Record:
    """The record of the first, with the samples of all by case id: `harness.cell.contested` makes records of them."""
    others, stopwatch, started = Others(), Stopwatch(), time.perf_counter()
    calls: dict[str, Any] = {}
    for case in cases:
        own = rival(case, find_kernel(case.kernel), seed)
        own.warm_up()
        calls[case.case_id] = lambda own=own, x=own.example: own.call(x)
    with fewer_threads(others), stopwatch.running():
        timed = sample(calls, timing, cases[0].seed(seed))
        threads = torch.get_num_threads()
    return replace(
        record_of(cases[0], status="ok"),
        seconds=time.perf_counter() - started,
        measured_seconds=stopwatch.seconds,
        threads=threads,
        others_busy=round(timed.others_busy, 2),
        samples_s={name: samples.seconds for name, samples in timed.samples.items()},
        waited={name: samples.waited for name, samples in timed.samples.items()},
    )
