"""Many small operations in a row, done by one thread."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from harness.kernels.threads import spread

T = TypeVar("T")


def alone(make: Callable[[], T]) -> T:
    """What `make` gives, without torch's threads: on a busy machine they wait for each other longer than they work."""
    found: list[T] = []

    def work(_room: Tensor, todo: Iterator[Callable[[], T]]) -> None:
        found.extend(one() for one in todo)

    spread(work, [torch.empty(0)] * torch.get_num_threads(), [make])
    return found[0]
