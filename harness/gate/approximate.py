"""Did an approximate kernel get worse? It has no error ratio; its metrics and the share that it skips are gated."""

from collections.abc import Iterator, Mapping

import pandas as pd

from harness.gate.columns import Row, counted, show
from harness.gate.finding import Finding

METRICS = ("rel_l1", "cosine", "sparsity")
# One environment gives the same numbers up to rounding, which at most tips a block here and there.
ERROR_FACTOR = 1.25
ERROR_FLOOR = 1e-3  # of the relative L1: below it, kept blocks' rounding is what moves
WORK_FACTOR = 0.95  # of the baseline's sparsity


def is_approximate(row: Row) -> bool:
    """Judged by metrics; where nothing was skipped the cell has an error ratio as well, and that judges it."""
    return not pd.isna(row["sparsity"]) and bool(pd.isna(row["err_ratio"]))


def has_metrics(row: Row) -> bool:
    return not pd.isna(row["sparsity"])


def compare_approximate(case_id: str, before: Row, after: Row, *, excuse: str = "") -> Iterator[Finding]:
    """`excuse` where another machine may move the numbers: then they are noted alone."""
    if not is_approximate(after):
        return
    if lost := [name for name in METRICS if pd.isna(after[name])]:
        # No machine turns a metric into nothing.
        yield from (Finding(case_id, name, f"{show(before[name])} -> not a number", True) for name in lost)
    elif has_metrics(before):
        for name, message in _drifts(before, after):
            yield Finding(case_id, name, message + excuse, not excuse)


def ungated(before: Mapping[str, Row], after: Mapping[str, Row]) -> list[Finding]:
    """Said once for all cells: a baseline accepted before these columns were gated has none of them."""
    shared = before.keys() & after.keys()
    cells = sum(is_approximate(after[each]) and not has_metrics(before[each]) for each in shared)
    if not cells:
        return []
    message = f"not gated in {counted(cells, 'cell')}: the baseline has none; accept a new one to gate it"
    return [Finding("", "rel_l1", message, False)]


def is_farther(before: float, after: float) -> bool:
    """Whether a relative L1 has drifted away; a NaN has."""
    return not after <= max(ERROR_FACTOR * before, ERROR_FLOOR)


def _drifts(before: Row, after: Row) -> Iterator[tuple[str, str]]:
    if is_farther(before["rel_l1"], after["rel_l1"]):
        yield "rel_l1", f"{before['rel_l1']:.4g} -> {after['rel_l1']:.4g}, beyond {ERROR_FACTOR:g} x the baseline"
    # The cosine falls short of 1 by half the square of the relative error.
    limit = max(ERROR_FACTOR**2 * (1 - before["cosine"]), ERROR_FLOOR**2)
    if not 1 - after["cosine"] <= limit:
        yield "cosine", f"{before['cosine']:.7g} -> {after['cosine']:.7g}, below {1 - limit:.7g}"
    if not after["sparsity"] >= WORK_FACTOR * before["sparsity"]:
        message = f"{before['sparsity']:.4g} -> {after['sparsity']:.4g}: skips less than {WORK_FACTOR:g} x the baseline"
        yield "sparsity", message
