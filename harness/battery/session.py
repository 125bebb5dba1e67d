"""`harness.judge`: the whole battery, in an order in which a wrong kernel is known early."""

import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from harness.battery.design import Design, covering
from harness.battery.plan import opening, remainder
from harness.battery.result import FAILING, Finding, Judgement
from harness.battery.steps import Step
from harness.battery.subject import AnyKernel, examinee_of
from harness.candidate.client import Process
from harness.candidate.examinee import Examinee
from harness.cell.draws import torch_threads

ENOUGH = 5  # failures, after which nothing more is asked
SEEDS = 2**31
ABOUT = 600  # checks, before the design has been made

OnFinding = Callable[[int, int, Finding], None]  # how many are done, of how many, and the last


def judge(
    kernel: AnyKernel,
    *,
    minutes: float = 1.0,
    seed: int | None = None,
    go_on: bool = False,
    strict: bool = False,
    on_finding: OnFinding = lambda done, planned, finding: None,
    **domain: Any,
) -> Judgement:
    """Is this kernel right, over everything that SDPA's signature can be asked?

    kernel   a name, `file.py:function`, `package.module:function`, or a function with SDPA's signature
    minutes  what the battery may take; of two minutes and more, every minute has a design of its own
    seed     of all numbers and choices; by default a fresh one, which the judgement names
    go_on    also after failures
    strict   `degraded` is a failure
    domain   what the kernel is for, as `harness.kernel(...)` declares it: dtypes, head_dims, gradients ...
    """
    started = time.perf_counter()
    chosen = random.SystemRandom().randrange(SEEDS) if seed is None else seed
    examinee = examinee_of(kernel, **domain)
    is_ours = examinee is not kernel
    plan = _Plan(chosen, max(1, round(minutes)))
    findings: list[Finding] = []
    with torch_threads(1):  # many small operations; a request says by itself how many threads the kernel has
        for finding in _asked(plan.steps(), examinee, until=started + 60 * minutes, go_on=go_on):
            findings.append(finding)
            on_finding(len(findings), max(plan.planned, len(findings)), finding)
    replaced = examinee.patched() if isinstance(examinee, Process) else ()
    if is_ours and isinstance(examinee, Process):
        examinee.stop()
    return Judgement(
        kernel=examinee.name,
        seed=chosen,
        design="; ".join(design.words for design in plan.designs),
        findings=tuple(findings),
        planned=plan.planned,
        seconds=time.perf_counter() - started,
        minutes=minutes,
        is_strict=strict,
        replaced=replaced,
    )


class _Plan:
    """The steps in their order. A design is made only when the first calls have passed."""

    def __init__(self, seed: int, rounds: int) -> None:
        self.seed, self.rounds = seed, rounds
        self.designs: list[Design] = []
        self.planned = ABOUT * rounds

    def steps(self) -> Iterator[Step]:
        first = opening(self.seed)
        yield from first
        done = len(first)
        for number in range(self.rounds):
            design = covering(self.seed + number)
            self.designs.append(design)
            steps = remainder(design, self.seed + number, is_first=number == 0)
            self.planned = done + len(steps) * (self.rounds - number)
            done += len(steps)
            yield from steps


def _asked(steps: Iterable[Step], examinee: Examinee, *, until: float, go_on: bool) -> Iterator[Finding]:
    """Until the time is over; after a failure to the end of its group, or to the fifth."""
    failures = 0
    for _, group in itertools.groupby(steps, key=lambda step: step.group):
        for step in group:
            if time.perf_counter() > until:
                return
            finding = step.done(examinee)
            failures += finding.status in FAILING
            yield finding
            if failures >= ENOUGH and not go_on:
                return
        if failures and not go_on:
            return
