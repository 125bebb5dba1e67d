"""The smallest error that a cell sees: the scale of the scores, wrong by ever less.

In the first regime alone, the most sensitive one by far: what the others add is not worth six times the work.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import closing

from torch import Tensor

from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.eager import eager
from harness.sensitivity.cell import Cell
from harness.sensitivity.result import DEGRADED, MISMATCH, Threshold

ERRORS = tuple(float(f"1e-{power}") for power in range(1, 9))  # largest first


def scale_off_by(error: float) -> Kernel:
    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return eager(q, k, v, dataclasses.replace(call, scale=call.scale * (1 + error)))

    return Kernel(f"scale_off_by_{error:g}", run, gives_weights=True, origin="saboteur")


def threshold(cell: Cell) -> Threshold:
    def status(error: float) -> str:
        worst = "ok"
        with closing(cell.glance(cell.pair_with(scale_off_by(error)))) as verdicts:
            for verdict in verdicts:
                if verdict.status == MISMATCH:
                    return MISMATCH
                worst = DEGRADED if verdict.status == DEGRADED else worst
        return worst

    return smallest_seen(status)


def smallest_seen(status_of: Callable[[float], str]) -> Threshold:
    """By bisection: what is seen at one error is seen at every larger one."""
    status = functools.cache(status_of)
    return Threshold(
        mismatch=_last(lambda error: status(error) == MISMATCH),
        seen=_last(lambda error: status(error) in (MISMATCH, DEGRADED)),
    )


def _last(holds: Callable[[float], bool]) -> float | None:
    """The last of ERRORS for which it holds."""
    low, high = 0, len(ERRORS)  # it holds for all before low, and for none from high on
    while low < high:
        middle = (low + high) // 2
        if holds(ERRORS[middle]):
            low = middle + 1
        else:
            high = middle
    return ERRORS[low - 1] if low else None
