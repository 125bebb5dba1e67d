"""Did it get worse than the accepted baseline? The exact part: what must not change by chance on any machine."""

import hashlib
import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from harness import store
from harness.case import CASE_FIELDS
from harness.environment import Environment
from harness.errors import BadInput
from harness.record import FAILING

EXACT = ("params", "ref_params", "kv_cache_bytes", "kv_bytes_per_token", "flops")
GATED = ("status", *EXACT, "err_ratio")
BASELINE_COLUMNS = ("case_id", *CASE_FIELDS, *GATED)
# An error ratio may move with torch's version or the CPU, but correct code stays below 1.8 N (SPEC's calibration):
# growing twofold is drift, unless it still ends below the noise floor itself.
DRIFT_FACTOR = 2.0
DRIFT_FLOOR = 1.0
Row = Mapping[Hashable, Any]


class GateError(BadInput):
    """Nothing to judge by; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`case_id` is empty where the finding is about the whole run."""

    case_id: str
    kind: str
    message: str
    fails: bool


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a baseline came from; stands beside its table as JSON."""

    suite: str
    commit: str | None
    config_sha256: str
    environment: Environment


def compare_exact(run: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Finding, ...]:
    """Every cell of either table; the failing findings first."""
    for name, frame in (("run", run), ("baseline", baseline)):
        if lost := [column for column in ("case_id", *GATED) if column not in frame.columns]:
            raise GateError(f"the {name}'s table has no column {', '.join(lost)}; accept a new baseline")
    if run.empty:
        return (Finding("", "empty_run", "the run has no cells", True),)
    findings: list[Finding] = []
    for name, frame in (("run", run), ("baseline", baseline)):
        for case_id, times in frame["case_id"].value_counts().items():
            if times != 1:
                findings.append(Finding(str(case_id), "duplicate", f"{times} times in the {name}", True))
    before, after = _rows(baseline), _rows(run)
    for case_id in sorted(before.keys() | after.keys()):
        if case_id not in after:
            findings.append(Finding(case_id, "missing", "in the baseline, not in this run: removed or renamed", True))
        elif case_id not in before:
            findings.append(_new(case_id, after[case_id]))
        else:
            findings += _compare_cell(case_id, before[case_id], after[case_id])
    return tuple(sorted(findings, key=lambda finding: not finding.fails))


def _rows(frame: pd.DataFrame) -> dict[str, Row]:
    columns = ["case_id", *GATED]
    return {row["case_id"]: row for row in frame[columns].to_dict("records")}


def _rank(status: str) -> int:
    # A declared limit is no failure, yet a cell that leaves it for a failure got worse.
    return {"ok": 0, "degraded": 1, "unsupported": 2}.get(status, 3)


def _new(case_id: str, row: Row) -> Finding:
    fails = row["status"] in FAILING
    return Finding(case_id, "new", f"not in the baseline; its status is {row['status']}", fails)


def _compare_cell(case_id: str, before: Row, after: Row) -> list[Finding]:
    findings = []
    if before["status"] != after["status"]:
        worse = not _rank(after["status"]) <= _rank(before["status"])
        findings.append(Finding(case_id, "status", f"status {before['status']} -> {after['status']}", worse))
    for column in EXACT:
        if not _same(before[column], after[column]):
            message = f"{column} {_show(before[column])} -> {_show(after[column])}"
            findings.append(Finding(case_id, column, message, True))
    if drift := _drift(before, after):
        findings.append(Finding(case_id, "err_ratio", drift, True))
    return findings


def _drift(before: Row, after: Row) -> str | None:
    old, new = before["err_ratio"], after["err_ratio"]
    if pd.isna(new):
        if pd.isna(old) and _rank(after["status"]) >= _rank("unsupported"):
            return None  # a cell that never compared anything has no ratio
        return f"err_ratio {_show(old)} -> not a number"
    if pd.isna(old):
        return None  # nothing to drift from; the status has judged it
    limit = max(DRIFT_FACTOR * old, DRIFT_FLOOR)
    return None if new <= limit else f"err_ratio {old:.4g} -> {new:.4g}, beyond {DRIFT_FACTOR:g} x the baseline"


def _same(before: Any, after: Any) -> bool:
    if pd.isna(before) or pd.isna(after):
        return bool(pd.isna(before) and pd.isna(after))
    return bool(before == after)


def _show(value: Any) -> str:
    return "empty" if pd.isna(value) else str(value)


def gate(run_folder: Path, baseline_dir: Path, *, suite: str | None = None) -> tuple[Finding, ...]:
    """`suite` is the name in the run's config unless given."""
    suite = suite or suite_name(run_folder)
    table, provenance = read_baseline(suite, baseline_dir)
    notes = []
    if config_hash(run_folder) != provenance.config_sha256:
        notes.append(Finding("", "config", "the config differs from the baseline's", False))
    changes = provenance.environment.differences(store.read_environment(run_folder))
    for key in store.COMPARED:
        if key in changes:
            notes.append(Finding("", "environment", f"{key} {changes[key][0]} -> {changes[key][1]}", False))
    stored = store.read(run_folder)
    lacking = []
    if stored.lack:
        lacking.append(Finding("", "incomplete", f"{stored.lack}; missing: {store.some(stored.missing)}", True))
    return (*lacking, *compare_exact(store.table(stored.records), table), *notes)


def accept(run_folder: Path, baseline_dir: Path, *, suite: str | None = None) -> str:
    """Makes the run the baseline; returns what that changes, to be reviewed with the commit."""
    suite = suite or suite_name(run_folder)
    stored = store.read(run_folder)
    if stored.lack:
        raise GateError(f"{run_folder} is {stored.lack}; a baseline must have them all: resume it first")
    run = store.table(stored.records)
    if run.empty:
        raise GateError(f"{run_folder} has no cells; an empty baseline would guard nothing")
    environment = store.read_environment(run_folder)
    provenance = Provenance(suite, environment.commit, config_hash(run_folder), environment)
    new = _baseline_table(run)
    csv, _ = _paths(suite, baseline_dir)
    old = read_baseline(suite, baseline_dir)[0] if csv.exists() else new.iloc[:0]
    text = _describe(suite, old, new, environment)
    baseline_dir.mkdir(parents=True, exist_ok=True)
    for path, data in zip(_paths(suite, baseline_dir), (_csv(new), _json(provenance)), strict=True):
        store.write_atomically(path, data.encode())
    return text


def read_baseline(suite: str, baseline_dir: Path) -> tuple[pd.DataFrame, Provenance]:
    csv, about = _paths(suite, baseline_dir)
    if not csv.exists() or not about.exists():
        absent = csv if not csv.exists() else about
        raise GateError(f"no baseline {absent}; accept a run as baseline with: harness gate --accept")
    try:
        frame = pd.read_csv(csv, dtype={name: store.dtype(name) for name in BASELINE_COLUMNS}, keep_default_na=False,
                            na_values={name: [""] for name in BASELINE_COLUMNS})  # fmt: skip
        data = json.loads(about.read_text(encoding="utf-8"))
        provenance = Provenance(**{**data, "environment": Environment.from_json(json.dumps(data["environment"]))})
    except (ValueError, TypeError, KeyError) as error:
        raise GateError(f"the baseline {csv} or {about.name} is broken: {error}") from error
    if provenance.suite != suite:
        raise GateError(f"{csv} is the baseline of suite {provenance.suite!r}, not of {suite!r}; rename one of them")
    return frame, provenance


def suite_name(folder: Path) -> str:
    """The `name` of the run's saved config."""
    path = Path(folder) / store.CONFIG
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise GateError(f"{path} does not exist, so the run's suite is not known") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise GateError(f"{path}: {error}") from error
    name = config.get("name") if isinstance(config, dict) else None
    if not isinstance(name, str) or not name:
        raise GateError(f"{path} has no `name`, so the run's suite is not known")
    return name


def config_hash(folder: Path) -> str:
    return hashlib.sha256((Path(folder) / store.CONFIG).read_bytes()).hexdigest()


def _paths(suite: str, baseline_dir: Path) -> tuple[Path, Path]:
    name = store.slug(suite)
    return Path(baseline_dir) / f"{name}.csv", Path(baseline_dir) / f"{name}.json"


def _baseline_table(run: pd.DataFrame) -> pd.DataFrame:
    frame = run[list(BASELINE_COLUMNS)].sort_values("case_id", ignore_index=True)
    # Four digits: enough for a factor of two, few enough that a diff shows changes and not dust.
    frame["err_ratio"] = [float(f"{value:.4g}") for value in frame["err_ratio"]]
    return frame


def _csv(frame: pd.DataFrame) -> str:
    return frame.to_csv(index=False, lineterminator="\n")  # floats as repr: they come back bit for bit


def _json(provenance: Provenance) -> str:
    return json.dumps(asdict(provenance), indent=2, ensure_ascii=False) + "\n"


def _describe(suite: str, old: pd.DataFrame, new: pd.DataFrame, environment: Environment) -> str:
    before, after = _rows(old), _rows(new)
    lines = []
    for case_id in sorted(before.keys() | after.keys()):
        if case_id not in after:
            lines.append(f"- {case_id}")
        elif case_id not in before:
            lines.append(f"+ {case_id}  {after[case_id]['status']}")
        else:
            pairs = ((column, before[case_id][column], after[case_id][column]) for column in GATED)
            changes = [f"{name} {_show(a)} -> {_show(b)}" for name, a, b in pairs if not _same(a, b)]
            if changes:
                lines.append(f"~ {case_id}  {'; '.join(changes)}")
    counts = {mark: sum(line.startswith(mark) for line in lines) for mark in "+-~"}
    commit = f"{environment.commit or 'no commit'}{' (dirty)' if environment.dirty else ''}"
    head = f"baseline {suite}: {len(after)} cells at {commit}: {counts['+']} new, {counts['-']} removed, "
    return "\n".join([f"{head}{counts['~']} changed", *lines])
