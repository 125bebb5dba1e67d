"""Timing of a cell's sides on the machine as it is: on cores that others leave free, and what those did meanwhile."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from harness.cell.timing import SAMPLE_S, Samples, Timed, free_threads, interleave
from harness.environment import Others
from harness.suite.schema import Timing


@contextmanager
def fewer_threads(others: Others) -> Iterator[None]:
    """No more than the cores that `others`, as seen so far, leave free; as before afterwards."""
    asked = torch.get_num_threads()
    torch.set_num_threads(free_threads(asked, others.stop()[1]))
    try:
        yield
    finally:
        torch.set_num_threads(asked)


@dataclass(frozen=True)
class Clocked:
    """All sides of a cell, and what others did meanwhile."""

    samples: dict[str, Samples]
    others_busy: float


def sample(calls: Mapping[str, Timed], timing: Timing, seed: int, sample_s: float = SAMPLE_S) -> Clocked:
    """With as much time for each call as in a cell with two."""
    others = Others()
    samples = interleave(
        calls,
        budget_s=timing.budget_s * len(calls) / 2,
        min_blocks=timing.min_blocks,
        max_blocks=timing.max_blocks,
        seed=seed,
        sample_s=sample_s,
    )
    return Clocked(samples, others.stop()[1])
