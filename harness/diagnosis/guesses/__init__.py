"""Ways to be wrong: what a call may be misread as, steps that are done wrongly, and all saboteurs that are kernels."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from harness.cell.golden import Problem
from harness.diagnosis.guesses.guess import SABOTEUR, Guess, Run, attended, call_of, read_first
from harness.diagnosis.guesses.readings import readings
from harness.diagnosis.guesses.steps import steps
from harness.kernels.call import Kernel
from harness.mutants.saboteurs.saboteur import SABOTEURS, load_all


@functools.cache
def all_guesses() -> tuple[Guess, ...]:
    saboteurs = [
        Guess(
            name,
            f"{name.replace('_', ' ')} ({saboteur.stands_for.rstrip('.')})",
            functools.partial(_fresh, saboteur.kernel),
            rank=SABOTEUR,
            kernel=functools.partial(as_function, saboteur.kernel),
        )
        for name, saboteur in ((name, SABOTEURS[name]) for name in load_all())
        if saboteur.kernel is not None
    ]
    misread = [
        Guess(name, words, functools.partial(read_first, reading, attended), reading)
        for name, words, reading in readings()
    ]
    misdone = [Guess(name, words, functools.partial(_same, run)) for name, words, run in steps()]
    return (*misread, *misdone, *saboteurs)


def _fresh(make: Callable[[], Kernel]) -> Run:
    return _of_kernel(make())


def as_function(make: Callable[[], Kernel]) -> Callable[..., Tensor]:
    kernel = make()

    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return kernel.run(q, k, v, call_of(Problem(q, k, v, attn_mask, dropout_p, is_causal, scale)))[0]

    return function


def _same(run: Run) -> Run:
    return run


def _of_kernel(kernel: Kernel) -> Run:
    """On copies: some saboteurs write into their inputs."""

    def run(problem: Problem) -> Tensor:
        q, k, v = (_copied(t) for t in (problem.q, problem.k, problem.v))
        return kernel.run(q, k, v, call_of(problem))[0]

    return run


def _copied(t: Tensor) -> Tensor:
    """With its strides, and what lies around it."""
    if t.requires_grad:
        return t.clone()
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride())
