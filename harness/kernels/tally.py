"""How much of its work an approximate kernel left out: counted by the call, added up until somebody asks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockCount:
    """Blocks of queries x keys over batch and heads. `visible` are those that exact attention would have to compute."""

    kept: int
    visible: int
    total: int  # with those that causality, a window or a mask hides altogether
    pv_skipped: int = 0  # of the kept ones: scored, but too small to be multiplied with their values

    @property
    def sparsity(self) -> float:
        """The share of the visible blocks that was skipped: 0 is exact attention, causal or not."""
        return 1 - self.kept / self.visible if self.visible else 0.0

    @property
    def skipped(self) -> int:
        return self.visible - self.kept

    def __add__(self, other: "BlockCount") -> "BlockCount":
        return BlockCount(
            self.kept + other.kept,
            self.visible + other.visible,
            self.total + other.total,
            self.pv_skipped + other.pv_skipped,
        )

    def __sub__(self, other: "BlockCount") -> "BlockCount":
        return BlockCount(
            self.kept - other.kept,
            self.visible - other.visible,
            self.total - other.total,
            self.pv_skipped - other.pv_skipped,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What one call kept, so that its output can be checked: `shown` gives the map of elements, (B, H, L, S)."""

    shown: Callable[[], "Tensor"]
    pv: float | None = None  # nats below which values were skipped, too


class Tally:
    """Held by one kernel; `take` gives what was counted since the last time and begins anew.

    `last` and `choice` are those of the latest call, whatever was taken.
    """

    def __init__(self) -> None:
        self.calls, self.count = 0, BlockCount(0, 0, 0)
        self.last = BlockCount(0, 0, 0)
        self.choice: Choice | None = None
        self._spoilt: object | None = None

    def add(
        self, count: BlockCount, *, choice: Choice | None = None, call: object | None = None, is_spoilt: bool = False
    ) -> None:
        """`is_spoilt`: the output of `call` is not finite, and the shield may run the very same call on cleaned inputs.

        Then that run stands in the place of this one, also if this one was taken already.
        """
        is_again = call is not None and call is self._spoilt
        if is_again:
            self.count -= self.last
        else:
            self.calls += 1
        self.count += count
        self.last, self.choice = count, choice
        self._spoilt = call if is_spoilt and not is_again else None

    def take(self) -> BlockCount:
        taken = self.count
        self.calls, self.count = 0, BlockCount(0, 0, 0)
        return taken
