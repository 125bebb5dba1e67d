"""The exact part of the gate: a run and its suite's baseline in, findings out. Only what must not change by chance."""

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path

import pandas as pd

from harness import store
from harness.case import CASE_FIELDS
from harness.gate.baseline import GatedRun, edited, read_baseline
from harness.gate.findings import EXACT, METRICS, PEAK, CellRow, Finding, GateError, changed, lacking, rows_by_id, show
from harness.record import EQUAL_STATUSES, FAILING, STATUS_SEVERITY
from harness.text import plural

# An error ratio moves with the code that computes it, and correct code stays below 1.8 N (docs/acceptance-rule.md):
# growing twofold is drift, unless it still ends below the noise floor itself.
DRIFT_FACTOR = 2.0
DRIFT_FLOOR = 1.0
# An approximate kernel has metrics in its place. One environment gives the same ones up to rounding, which at most tips
# a block here and there.
ERROR_FACTOR = 1.25
ERROR_FLOOR = 1e-3  # of the relative L1: below it, kept blocks' rounding is what moves
WORK_FACTOR = 0.95  # of the baseline's sparsity
# Where these are the same, rounding and allocations are, too; where one differs, both may move without a fault.
SAME_NUMBERS = ("torch", "cpu", "threads")
MOST_TOLD = 300  # characters of a cell's own words


def gate(run: GatedRun, baseline_dir: Path) -> tuple[Finding, ...]:
    """Everything about the run, failing findings before notes; empty where it is as accepted."""
    table, provenance = read_baseline(run.suite, baseline_dir)
    faults = []
    if message := edited(provenance, baseline_dir):
        faults.append(Finding("", "edited_baseline", message, True))
    if run.stored.lack:
        what = run.stored.lack.removeprefix("incomplete: ")  # the finding's kind says it
        faults.append(Finding("", "incomplete", f"{what}; missing: {store.some(run.stored.missing)}", True))
    changes = provenance.environment.differences(run.environment)
    notes = []
    if provenance.warning:
        notes.append(Finding("", "baseline", provenance.warning, False))
    if run.config_sha256 != provenance.config_sha256:
        notes.append(Finding("", "config", "the config differs from the baseline's", False))
    shown = {key: "{} -> {}".format(*changes[key]) for key in store.COMPARED if key in changes}
    notes += [Finding("", "environment", f"{key} {change}", False) for key, change in shown.items()]
    moved = tuple(key for key in SAME_NUMBERS if key in changes)
    return (*faults, *exact_findings(store.table(run.stored.records), table, moved=moved), *notes)


def exact_findings(run: pd.DataFrame, baseline: pd.DataFrame, *, moved: tuple[str, ...] = ()) -> tuple[Finding, ...]:
    """Of every cell of either table; the failing findings first.

    `moved` names what differs between the two environments. Then the error ratio and the peak memory may move by
    themselves, and are noted; statuses and counts may not.
    """
    for name, frame in (("run", run), ("baseline", baseline)):
        if lost := lacking(frame):
            raise GateError(f"the {name}'s table has no column {', '.join(lost)}; accept a new baseline")
    if run.empty:
        return (Finding("", "empty_run", "the run has no cells", True),)
    if baseline.empty:
        message = "the baseline has no cells, so it guards nothing; put it back, or accept a run"
        return (Finding("", "empty_baseline", message, True),)
    findings = [
        Finding(str(case_id), "duplicate", f"{times} times in the {name}", True)
        for name, frame in (("run", run), ("baseline", baseline))
        for case_id, times in frame["case_id"].value_counts().items()
        if times != 1
    ]
    before, after = rows_by_id(baseline), rows_by_id(run)
    renamed = renames(
        {case_id: row for case_id, row in before.items() if case_id not in after},
        {case_id: row for case_id, row in after.items() if case_id not in before},
    )
    for case_id in sorted(before.keys() | after.keys()):
        if case_id not in after:
            hint = f"; renamed to {renamed[case_id]}?" if case_id in renamed else ": removed or renamed"
            findings.append(Finding(case_id, "missing", f"in the baseline, not in this run{hint}", True))
        elif case_id not in before:
            status = after[case_id]["status"]
            message = f"not in the baseline; its status is {status}{_reason(after[case_id])}"
            findings.append(Finding(case_id, "new", message, status in FAILING))
        else:
            findings += _cell(case_id, before[case_id], after[case_id], moved)
    findings += _not_gated([(before[case_id], after[case_id]) for case_id in before.keys() & after.keys()])
    return tuple(sorted(findings, key=lambda finding: not finding.fails))


def renames(missing: Mapping[str, CellRow], new: Mapping[str, CellRow]) -> dict[str, str]:
    """A guess: old id -> new id of the same counts, and of all axes but at most one; each stands for one other."""
    old_axes, new_axes = ({each: _shown(row, CASE_FIELDS) for each, row in rows.items()} for rows in (missing, new))
    counts = {each: _shown(row, EXACT) for rows in (missing, new) for each, row in rows.items()}
    pairs = []
    for before, axes in old_axes.items():
        for after, others in new_axes.items():
            apart = sum(a != b for a, b in zip(axes, others, strict=True))
            if apart <= 1 and counts[before] == counts[after]:
                pairs.append((apart, -SequenceMatcher(None, before, after).ratio(), before, after))
    guessed: dict[str, str] = {}
    for _, _, before, after in sorted(pairs):
        if before not in guessed and after not in guessed.values():
            guessed[before] = after
    return guessed


def _shown(row: CellRow, columns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(show(row[column]) for column in columns)


def _reason(row: CellRow) -> str:
    """Its own words, in one line."""
    error = row.get("error")
    return "" if error is None or pd.isna(error) or not str(error) else f": {' '.join(str(error).split())[:MOST_TOLD]}"


def _cell(case_id: str, before: CellRow, after: CellRow, moved: tuple[str, ...]) -> Iterator[Finding]:
    """Of one cell that is in both tables."""
    if before["status"] != after["status"]:
        worse = STATUS_SEVERITY[after["status"]] > STATUS_SEVERITY[before["status"]]
        yield Finding(case_id, "status", f"{before['status']} -> {after['status']}{_reason(after)}", worse)
        if worse and STATUS_SEVERITY[after["status"]] > STATUS_SEVERITY["mismatch"]:
            return  # that it has no numbers now is no news
    for column, change in changed(before, after, EXACT).items():
        yield Finding(case_id, column, change, True)
    excuse = f" (noted only: {', '.join(moved)} changed)" if moved else ""
    if pd.isna(after["err_ratio"]):
        if _lost_ratio(before, after):  # no machine turns a ratio into nothing
            yield Finding(case_id, "err_ratio", f"{show(before['err_ratio'])} -> not a number", True)
    elif drift := _drift(before["err_ratio"], after["err_ratio"]):
        yield Finding(case_id, "err_ratio", drift + excuse, not moved)
    yield from _metrics(case_id, before, after, excuse)
    if growth := _growth(before, after):
        yield Finding(case_id, PEAK, growth + excuse, not moved)
    elif not pd.isna(after[PEAK]) and not pd.isna(before[PEAK]) and after[PEAK] < before[PEAK]:
        yield Finding(case_id, PEAK, f"{before[PEAK]} -> {after[PEAK]}: less; accept it to keep it", False)


def _lost_ratio(before: CellRow, after: CellRow) -> bool:
    """Whether a cell without an error ratio should have one."""
    if pd.isna(before["err_ratio"]) and STATUS_SEVERITY[after["status"]] >= STATUS_SEVERITY["unsupported"]:
        return False  # it never had one
    # Judged by metrics, and before not by a ratio alone: an exact kernel may not call itself approximate unseen.
    return not (_has_metrics(after) and (_has_metrics(before) or pd.isna(before["err_ratio"])))


def _drift(old: float, new: float) -> str | None:
    if pd.isna(old):
        return None  # nothing to drift from; the status has judged it
    limit = max(DRIFT_FACTOR * old, DRIFT_FLOOR)
    return None if new <= limit else f"{old:.4g} -> {new:.4g}, beyond {DRIFT_FACTOR:g} x the baseline"


def _has_metrics(row: CellRow) -> bool:
    """An approximate kernel's. The sparsity is counted, so it is a number even where the errors are not."""
    return not pd.isna(row["sparsity"])


def _metrics(case_id: str, before: CellRow, after: CellRow, excuse: str) -> Iterator[Finding]:
    """Of an approximate kernel. `excuse` where another machine may move the numbers: then they are noted alone."""
    if not _has_metrics(after):
        if _has_metrics(before) and after["status"] in EQUAL_STATUSES:  # a failure is told by its status
            yield Finding(case_id, "sparsity", f"{show(before['sparsity'])} -> empty: not judged by metrics now", True)
        return
    for name in METRICS:
        old, new = before[name], after[name]
        if pd.isna(new):
            if after["status"] == "ok" or not pd.isna(old):
                yield Finding(case_id, name, f"{show(old)} -> not a number", True)  # no machine turns one into nothing
        elif not pd.isna(old) and (message := _metric_drift(name, old, new)):
            yield Finding(case_id, name, message + excuse, not excuse)


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


def _growth(before: CellRow, after: CellRow) -> str | None:
    """Without tolerance: the allocator's events are counted, and were the same to the byte in all repeated runs."""
    old, new = before[PEAK], after[PEAK]
    if pd.isna(old) or (pd.isna(new) and not _was_timed(after)):
        return None  # said once for all cells
    if pd.isna(new):
        return f"{show(old)} -> empty, although the cell was timed"
    return None if new <= old else f"{old} -> {new} ({plural(new - old, 'byte', 'bytes')} more)"


def _was_timed(row: CellRow) -> bool:
    """Peak memory is measured where latency is."""
    return not pd.isna(row.get("latency_ms"))


def _not_gated(shared: list[tuple[CellRow, CellRow]]) -> Iterator[Finding]:
    """Columns that one of two cells lacks, said once for all of them: a baseline may be older than their gating."""
    older = "the baseline has none; accept a new one to gate it"
    untimed = "not timed in this run, so it was not measured"
    for column, cells, why in (
        (PEAK, sum(bool(pd.isna(old[PEAK])) and not pd.isna(new[PEAK]) for old, new in shared), older),
        (PEAK, sum(not pd.isna(old[PEAK]) and _is_untimed(new) for old, new in shared), untimed),
        ("rel_l1", sum(_has_metrics(new) and not _has_metrics(old) for old, new in shared), older),
    ):
        if cells:
            yield Finding("", column, f"not gated in {plural(cells, 'cell', 'cells')}: {why}", False)


def _is_untimed(row: CellRow) -> bool:
    return bool(pd.isna(row[PEAK])) and not _was_timed(row) and row["status"] not in FAILING
