"""Two runs, cell by cell: what changed from one to the other, the largest change first. Floats here, text elsewhere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.gate.exact import is_farther
from harness.gate.findings import METRICS, CellRow
from harness.record import STATUS_SEVERITY

WEIGHTS = ("params", "kv_cache_bytes", "kv_bytes_per_token")


@dataclass(frozen=True, slots=True)
class Difference:
    """One cell in both runs, or in one; then the other's row is None."""

    case_id: str
    before: CellRow | None
    after: CellRow | None

    @property
    def in_both(self) -> bool:
        return self.before is not None and self.after is not None

    @property
    def worse(self) -> bool:
        return self._step > 0

    @property
    def better(self) -> bool:
        return self._step < 0

    @property
    def _step(self) -> int:
        if self.before is None or self.after is None:
            return 0
        return STATUS_SEVERITY[self.after["status"]] - STATUS_SEVERITY[self.before["status"]] or self._drift

    @property
    def _drift(self) -> int:
        """Of an approximate kernel in two runs of one status: whether its relative L1 moved by more than rounding."""
        pair = self.pair("rel_l1")
        return 0 if pair is None or None in pair else is_farther(*pair) - is_farther(*reversed(pair))

    @property
    def speed_apart(self) -> bool:
        """Whether the two intervals of x ref share no number: only then is the change more than noise. One that others
        disturbed is no measurement."""
        if self.before is None or self.after is None or "disturbed" in (self.before["timing"], self.after["timing"]):
            return False
        ends = [row[f"latency_ratio_{end}"] for row in (self.before, self.after) for end in ("lo", "hi")]
        lo_a, hi_a, lo_b, hi_b = ends
        return not any(map(pd.isna, ends)) and bool(hi_a < lo_b or hi_b < lo_a)

    @property
    def found(self) -> bool:
        """Whether there is anything to tell; a speed within both intervals is not."""
        columns = ("status", "err_ratio", "max_abs_err", *METRICS, *WEIGHTS)
        return not self.in_both or self.speed_apart or bool(self.pairs(columns))

    def pair(self, column: str) -> tuple[Any, Any] | None:
        """Both values where they differ; a missing one is None."""
        if self.before is None or self.after is None:
            return None
        values: list[Any] = [None if pd.isna(row[column]) else row[column] for row in (self.before, self.after)]
        a, b = values
        return None if a == b else (a, b)

    def pairs(self, columns: Sequence[str]) -> dict[str, tuple[Any, Any]]:
        """Of those columns that differ."""
        return {name: pair for name in columns if (pair := self.pair(name)) is not None}

    def factor(self, column: str) -> float | None:
        """After over before; None where equal, or where one has none. Of x ref (`latency_ratio`) it has no machine in
        it: each run is measured by its own reference."""
        pair = self.pair(column)
        if pair is None or None in pair:
            return None
        a, b = float(pair[0]), float(pair[1])
        if math.isinf(a):  # so b is finite, or they would be equal
            return 0.0
        return b / a if a > 0 else math.inf

    @property
    def order(self) -> tuple[float, ...]:
        """Worse, other status, cells of one run alone, weights, then the largest factor either way."""
        judged = ("err_ratio", "rel_l1", *(["latency_ratio"] if self.speed_apart else []))
        factors = [factor for column in judged if (factor := self.factor(column)) is not None]
        # x2 and x0.5 are changes of one size.
        sizes = [abs(math.log(factor)) if 0 < factor < math.inf else math.inf for factor in factors]
        kinds = (self.worse, self.pair("status") is not None, not self.in_both, bool(self.pairs(WEIGHTS)))
        return (*(not kind for kind in kinds), -max(sizes, default=0.0))


def compare_runs(before: pd.DataFrame, after: pd.DataFrame) -> list[Difference]:
    """Every cell of either run, the largest difference first; equal ones last, in the order of the runs.

    Two runs of one kernel each, and not of the same, are matched without it: they were made to compare the two.
    """
    column = "case_id" if other_kernel(before, after) is None else "stem"
    a, b = ({row[column]: row for row in _with_stem(frame).to_dict("records")} for frame in (before, after))
    cells = [Difference(case_id, a.get(case_id), b.get(case_id)) for case_id in dict.fromkeys([*a, *b])]
    return sorted(cells, key=lambda cell: (not cell.found, *cell.order))


def other_kernel(before: pd.DataFrame, after: pd.DataFrame) -> tuple[str, str] | None:
    """The kernels of two runs that have one each, where these differ."""
    kernels = [list(dict.fromkeys(frame["kernel"])) for frame in (before, after)]
    if kernels[0] == kernels[1] or any(len(names) != 1 for names in kernels):
        return None
    return kernels[0][0], kernels[1][0]


def _with_stem(frame: pd.DataFrame) -> pd.DataFrame:
    """A cell's id ends with its kernel."""
    pairs = zip(frame["case_id"], frame["kernel"], strict=True)
    return frame.assign(stem=[case_id.removesuffix(f"-{kernel}") for case_id, kernel in pairs])
