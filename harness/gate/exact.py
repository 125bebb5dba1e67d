"""Did it get worse than the accepted baseline? The exact part: what must not change by chance."""

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path

import pandas as pd

from harness import store
from harness.case import CASE_FIELDS
from harness.gate.baseline import Provenance, accept, config_hash, edited, read_baseline, suite_name
from harness.gate.findings import (
    BASELINE_COLUMNS,
    EXACT,
    GATED,
    METRICS,
    PEAK,
    Finding,
    GateError,
    Row,
    counted,
    rows,
    same,
    show,
)
from harness.record import FAILING

# ----------------------------------------------------------------------------------------------------------------------
# Which missing cell is which new one under another name? A guess, to be shown with a question mark.


def renames(missing: Mapping[str, Row], new: Mapping[str, Row]) -> dict[str, str]:
    """Old id -> new id: the same counts, and all axes but at most one; each new cell stands for one old one."""
    old_axes, new_axes = ({each: _shown(row, CASE_FIELDS) for each, row in rows.items()} for rows in (missing, new))
    counts = {each: _shown(row, EXACT) for rows in (missing, new) for each, row in rows.items()}
    pairs = []
    for before, axes in old_axes.items():
        for after, others in new_axes.items():
            apart = sum(a != b for a, b in zip(axes, others, strict=True))
            if apart <= 1 and counts[before] == counts[after]:
                pairs.append((apart, -SequenceMatcher(None, before, after).ratio(), before, after))
    found: dict[str, str] = {}
    for _, _, before, after in sorted(pairs):
        if before not in found and after not in found.values():
            found[before] = after
    return found


def _shown(row: Row, columns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(show(row[column]) for column in columns)


# ----------------------------------------------------------------------------------------------------------------------
# Did an approximate kernel get worse? It has no error ratio; its metrics and the share that it skips are gated.


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
        elif not pd.isna(old) and (message := _metric_drift(name, old, new)):
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


def _metric_drift(name: str, old: float, new: float) -> str | None:
    if name == "rel_l1":
        wrong = is_farther(old, new)
        return f"{old:.4g} -> {new:.4g}, beyond {ERROR_FACTOR:g} x the baseline" if wrong else None
    if name == "cosine":  # falls short of 1 by half the square of the relative error
        limit = max(ERROR_FACTOR**2 * (1 - old), ERROR_FLOOR**2)
        return None if 1 - new <= limit else f"{old:.7g} -> {new:.7g}, below {1 - limit:.7g}"
    if new >= WORK_FACTOR * old:
        return None
    return f"{old:.4g} -> {new:.4g}: skips less than {WORK_FACTOR:g} x the baseline"


# ----------------------------------------------------------------------------------------------------------------------


__all__ = [
    "EXACT",
    "GATED",
    "Finding",
    "GateError",
    "Provenance",
    "accept",
    "compare_exact",
    "config_hash",
    "gate",
    "read_baseline",
    "suite_name",
]

# An error ratio moves with the code that computes it, and correct code stays below 1.8 N (SPEC's calibration): growing
# twofold is drift, unless it still ends below the noise floor itself.
DRIFT_FACTOR = 2.0
DRIFT_FLOOR = 1.0
# Where these are the same, rounding and allocations are, too; where one differs, both may move without a fault.
SAME_NUMBERS = ("torch", "cpu", "threads")
MOST_TOLD = 300  # characters of a cell's own words


def gate(run_folder: Path, baseline_dir: Path, *, suite: str | None = None) -> tuple[Finding, ...]:
    """`suite` is the name in the run's config unless given."""
    suite = suite or suite_name(run_folder)
    table, provenance = read_baseline(suite, baseline_dir)
    notes = []
    if provenance.warning:
        notes.append(Finding("", "baseline", provenance.warning, False))
    if config_hash(run_folder) != provenance.config_sha256:
        notes.append(Finding("", "config", "the config differs from the baseline's", False))
    changes = provenance.environment.differences(store.read_environment(run_folder))
    for key in store.COMPARED:
        if key in changes:
            notes.append(Finding("", "environment", f"{key} {changes[key][0]} -> {changes[key][1]}", False))
    stored = store.read(run_folder)
    lacking = []
    if message := edited(provenance, baseline_dir):
        lacking.append(Finding("", "edited_baseline", message, True))
    if stored.lack:
        what = stored.lack.removeprefix("incomplete: ")  # the finding's kind says it
        lacking.append(Finding("", "incomplete", f"{what}; missing: {store.some(stored.missing)}", True))
    moved = tuple(key for key in SAME_NUMBERS if key in changes)
    return (*lacking, *compare_exact(store.table(stored.records), table, moved=moved), *notes)


def compare_exact(run: pd.DataFrame, baseline: pd.DataFrame, *, moved: tuple[str, ...] = ()) -> tuple[Finding, ...]:
    """Every cell of either table; the failing findings first.

    `moved` names what differs between the two environments. Then the error ratio and the peak memory may move by
    themselves, and are noted; statuses and counts may not.
    """
    for name, frame in (("run", run), ("baseline", baseline)):
        if lost := [column for column in BASELINE_COLUMNS if column not in frame.columns]:
            raise GateError(f"the {name}'s table has no column {', '.join(lost)}; accept a new baseline")
    if run.empty:
        return (Finding("", "empty_run", "the run has no cells", True),)
    if baseline.empty:
        message = "the baseline has no cells, so it guards nothing; put it back, or accept a run"
        return (Finding("", "empty_baseline", message, True),)
    findings: list[Finding] = []
    for name, frame in (("run", run), ("baseline", baseline)):
        for case_id, times in frame["case_id"].value_counts().items():
            if times != 1:
                findings.append(Finding(str(case_id), "duplicate", f"{times} times in the {name}", True))
    before, after = rows(baseline), rows(run)
    renamed = renames(
        {case_id: row for case_id, row in before.items() if case_id not in after},
        {case_id: row for case_id, row in after.items() if case_id not in before},
    )
    for case_id in sorted(before.keys() | after.keys()):
        if case_id not in after:
            hint = f"; renamed to {renamed[case_id]}?" if case_id in renamed else ": removed or renamed"
            findings.append(Finding(case_id, "missing", f"in the baseline, not in this run{hint}", True))
        elif case_id not in before:
            findings.append(_new(case_id, after[case_id]))
        else:
            findings += _compare_cell(case_id, before[case_id], after[case_id], moved)
    findings += [*_no_peak(before, after), *ungated(before, after)]
    return tuple(sorted(findings, key=lambda finding: not finding.fails))


def _rank(status: str) -> int:
    # A declared limit is no failure, yet a cell that leaves it for a failure got worse; so did a wrong answer that
    # became none at all (error, timeout, oom).
    return {"ok": 0, "degraded": 1, "unsupported": 2, "mismatch": 3}.get(status, 4)


def _new(case_id: str, row: Row) -> Finding:
    fails = row["status"] in FAILING
    return Finding(case_id, "new", f"not in the baseline; its status is {row['status']}{_reason(row)}", fails)


def _reason(row: Row) -> str:
    """Its own words, in one line."""
    error = row.get("error")
    return "" if error is None or pd.isna(error) or not str(error) else f": {' '.join(str(error).split())[:MOST_TOLD]}"


def _compare_cell(case_id: str, before: Row, after: Row, moved: tuple[str, ...]) -> list[Finding]:
    findings = []
    if before["status"] != after["status"]:
        worse = not _rank(after["status"]) <= _rank(before["status"])
        message = f"{before['status']} -> {after['status']}{_reason(after)}"
        findings.append(Finding(case_id, "status", message, worse))
        if worse and _rank(after["status"]) > _rank("mismatch"):
            return findings  # that it has no numbers now is no news
    for column in EXACT:
        if not same(before[column], after[column]):
            message = f"{show(before[column])} -> {show(after[column])}"
            findings.append(Finding(case_id, column, message, True))
    excuse = f" (noted only: {', '.join(moved)} changed)" if moved else ""
    if pd.isna(after["err_ratio"]):
        if lost := _lost_ratio(before, after):
            findings.append(Finding(case_id, "err_ratio", lost, True))  # no machine turns a ratio into nothing
    elif drift := _drift(before["err_ratio"], after["err_ratio"]):
        findings.append(Finding(case_id, "err_ratio", drift + excuse, not moved))
    findings += compare_approximate(case_id, before, after, excuse=excuse)
    if growth := _growth(before, after):
        findings.append(Finding(case_id, PEAK, growth + excuse, not moved))
    elif not pd.isna(after[PEAK]) and not pd.isna(before[PEAK]) and after[PEAK] < before[PEAK]:
        message = f"{before[PEAK]} -> {after[PEAK]}: less; accept it to keep it"
        findings.append(Finding(case_id, PEAK, message, False))
    return findings


def _lost_ratio(before: Row, after: Row) -> str | None:
    if pd.isna(before["err_ratio"]) and _rank(after["status"]) >= _rank("unsupported"):
        return None  # a cell that never compared anything has no ratio
    if is_without_ratio(before, after):
        return None
    return f"{show(before['err_ratio'])} -> not a number"


def _drift(old: float, new: float) -> str | None:
    if pd.isna(old):
        return None  # nothing to drift from; the status has judged it
    limit = max(DRIFT_FACTOR * old, DRIFT_FLOOR)
    return None if new <= limit else f"{old:.4g} -> {new:.4g}, beyond {DRIFT_FACTOR:g} x the baseline"


def _growth(before: Row, after: Row) -> str | None:
    """Without tolerance: the allocator's events are counted, and were the same to the byte in all repeated runs."""
    old, new = before[PEAK], after[PEAK]
    if pd.isna(old) or (pd.isna(new) and not _was_timed(after)):
        return None  # said once for all cells
    if pd.isna(new):
        return f"{show(old)} -> empty, although the cell was timed"
    return None if new <= old else f"{old} -> {new} ({counted(new - old, 'byte')} more)"


def _was_timed(row: Row) -> bool:
    """Peak memory is measured where latency is."""
    return not pd.isna(row.get("latency_ms"))


def _no_peak(before: Mapping[str, Row], after: Mapping[str, Row]) -> list[Finding]:
    shared = before.keys() & after.keys()
    ungated = sum(bool(pd.isna(before[each][PEAK])) and not pd.isna(after[each][PEAK]) for each in shared)
    unmeasured = sum(not pd.isna(before[each][PEAK]) and _is_untimed(after[each]) for each in shared)
    findings = []
    if ungated:
        message = f"not gated in {counted(ungated, 'cell')}: the baseline has none; accept a new one to gate it"
        findings.append(Finding("", PEAK, message, False))
    if unmeasured:
        message = f"not gated in {counted(unmeasured, 'cell')}: not timed in this run, so it was not measured"
        findings.append(Finding("", PEAK, message, False))
    return findings


def _is_untimed(row: Row) -> bool:
    return bool(pd.isna(row[PEAK])) and not _was_timed(row) and row["status"] not in FAILING
