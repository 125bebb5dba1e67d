"""Did an approximate kernel get worse? It has no error ratio; its metrics and the share that it skips are gated."""

from collections.abc import Iterator, Mapping

import pandas as pd

from harness.gate.columns import METRICS, Row, counted, show
from harness.gate.finding import Finding

# One environment gives the same numbers up to rounding, which at most tips a block here and there.
ERROR_FACTOR = 1.25
ERROR_FLOOR = 1e-3  # of the relative L1: below it, kept blocks' rounding is what moves
WORK_FACTOR = 0.95  # of the baseline's sparsity


def has_metrics(row: Row) -> bool:
    """The sparsity is counted, so it is a number even where the errors are not."""
    return not pd.isna(row["sparsity"])


def is_without_ratio(before: Row, after: Row) -> bool:
    """Judged by metrics, and before not by a ratio alone: an exact kernel may not call itself approximate unseen."""
    return has_metrics(after) and (has_metrics(before) or bool(pd.isna(before["err_ratio"])))


def compare_approximate(case_id: str, before: Row, after: Row, *, excuse: str = "") -> Iterator[Finding]:
    """`excuse` where another machine may move the numbers: then they are noted alone."""
    if not has_metrics(after):
        if has_metrics(before) and after["status"] in ("ok", "degraded"):  # a failure is told by its status
            yield Finding(case_id, "sparsity", f"{show(before['sparsity'])} -> empty: not judged by metrics now", True)
        return
    for name in METRICS:
        old, new = before[name], after[name]
        if pd.isna(new):
            if after["status"] == "ok" or not pd.isna(old):
                yield Finding(case_id, name, f"{show(old)} -> not a number", True)  # no machine turns one into nothing
        elif not pd.isna(old) and (message := _drift(name, old, new)):
            yield Finding(case_id, name, message + excuse, not excuse)


def ungated(before: Mapping[str, Row], after: Mapping[str, Row]) -> list[Finding]:
    """Said once for all cells: a baseline accepted before these columns were gated has none of them."""
    shared = before.keys() & after.keys()
    cells = sum(has_metrics(after[each]) and not has_metrics(before[each]) for each in shared)
    if not cells:
        return []
    message = f"not gated in {counted(cells, 'cell')}: the baseline has none; accept a new one to gate it"
    return [Finding("", "rel_l1", message, False)]


def is_farther(before: float, after: float) -> bool:
    """Whether a relative L1 has drifted away; a NaN has."""
    return not after <= max(ERROR_FACTOR * before, ERROR_FLOOR)


def _drift(name: str, old: float, new: float) -> str | None:
    if name == "rel_l1":
        wrong = is_farther(old, new)
        return f"{old:.4g} -> {new:.4g}, beyond {ERROR_FACTOR:g} x the baseline" if wrong else None
    if name == "cosine":  # falls short of 1 by half the square of the relative error
        limit = max(ERROR_FACTOR**2 * (1 - old), ERROR_FLOOR**2)
        return None if 1 - new <= limit else f"{old:.7g} -> {new:.7g}, below {1 - limit:.7g}"
    if new >= WORK_FACTOR * old:
        return None
    return f"{old:.4g} -> {new:.4g}: skips less than {WORK_FACTOR:g} x the baseline"
