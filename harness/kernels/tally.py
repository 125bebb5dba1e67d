"""How much of its work an approximate kernel left out: counted by the call, added up until somebody asks."""

from dataclasses import dataclass


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


class Tally:
    """Held by one kernel; `take` gives what was counted since the last time and begins anew."""

    def __init__(self) -> None:
        self.calls, self.count = 0, BlockCount(0, 0, 0)

    def add(self, count: BlockCount) -> None:
        self.calls, self.count = self.calls + 1, self.count + count

    def take(self) -> BlockCount:
        taken = self.count
        self.calls, self.count = 0, BlockCount(0, 0, 0)
        return taken
