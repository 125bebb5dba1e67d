"""The accepted state of a suite: one table for people to review, and what it came from, both committed.

A run's folder comes in as a `GatedRun`, read once; a baseline goes out and comes in as a table and its `Provenance`.
"""

import hashlib
import io
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from harness import store
from harness.environment import Environment
from harness.gate.findings import BASELINE_COLUMNS, GATED, METRICS, PEAK, GateError, changed, lacking, rows_by_id
from harness.record import EQUAL_STATUSES, FAILING, STATUSES
from harness.text import plural
from harness.yaml_lines import YamlError, parse


@dataclass(frozen=True, slots=True)
class GatedRun:
    """All that the gate asks of a run's folder; `suite` and `seed` are its saved config's."""

    folder: Path
    suite: str
    seed: int
    config_sha256: str
    environment: Environment
    stored: store.Stored


def read_gated_run(folder: Path) -> GatedRun:
    config, digest = _read_config(folder)
    stored = store.read(folder)
    return GatedRun(folder, config["name"], config.get("seed", 0), digest, store.read_environment(folder), stored)


def suite_name(folder: Path) -> str:
    """The `name` of the run's saved config."""
    return str(_read_config(folder)[0]["name"])


def _read_config(folder: Path) -> tuple[dict[str, Any], str]:
    """The run's saved config, which has a name, and its hash."""
    path = Path(folder) / store.CONFIG
    try:
        data = store.read_regular(path)
        config = parse(data.decode("utf-8-sig")).plain()
    except FileNotFoundError:
        raise GateError(f"there is no run in {folder}: it has no {store.CONFIG}; `harness run` makes one") from None
    except (YamlError, UnicodeDecodeError) as error:
        raise GateError(f"{path}: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("name"), str) or not config["name"]:
        raise GateError(f"{path} has no `name`, so the run's suite is not known")
    return config, hashlib.sha256(data).hexdigest()


class OtherSuite(GateError):
    """Two names may make one file's name; neither may take the other's place."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a baseline came from; stands beside its table as JSON."""

    suite: str
    commit: str | None
    config_sha256: str
    environment: Environment
    table_sha256: str | None = None  # of the CSV beside it; without it the gate fails

    @property
    def warning(self) -> str | None:
        """`--base` checks out the commit, which is not what was accepted if something else was in the tree."""
        if not self.environment.dirty:
            return None
        commit = (self.commit or "no commit")[:9]
        return (
            f"accepted from {commit} with changes that were not committed, so --base times something else; "
            "commit, run and accept again"
        )


def accept(folder: Path, baseline_dir: Path) -> str:
    """Makes the run the baseline; returns what that changes, to be reviewed with the commit."""
    run = read_gated_run(folder)
    if run.stored.lack:
        raise GateError(f"{folder} is {run.stored.lack}; a baseline must have them all: resume it first")
    if not run.stored.records:
        raise GateError(f"{folder} has no cells; an empty baseline would guard nothing")
    new = _baseline_table(store.table(run.stored.records))
    csv, about = _paths(run.suite, baseline_dir)
    table = new.to_csv(index=False, lineterminator="\n").encode()  # floats as repr: they come back bit for bit
    provenance = Provenance(
        run.suite, run.environment.commit, run.config_sha256, run.environment, table_sha256=_table_hash(table)
    )
    old, before, lost = _replaced(run.suite, baseline_dir) if csv.exists() else (None, None, None)
    lines = [_describe(run.suite, new.iloc[:0] if old is None else old, new, run.environment)]
    lines += [] if before is None else _moved(before, provenance)
    failing = tuple(str(each) for each in new.loc[new["status"].isin(FAILING), "case_id"])
    doubt = f"{plural(len(failing), 'cell', 'cells')} accepted as failing: {store.some(failing)}" if failing else None
    lines += [f"warning: {each}" for each in (doubt, lost, provenance.warning) if each]
    baseline_dir.mkdir(parents=True, exist_ok=True)
    store.write_atomically(csv, table)
    store.write_atomically(about, (json.dumps(asdict(provenance), indent=2, ensure_ascii=False) + "\n").encode())
    return "\n".join(lines)


def _replaced(suite: str, baseline_dir: Path) -> tuple[pd.DataFrame | None, Provenance | None, str | None]:
    """What is to be replaced; or, where it is broken, why nothing can be said of it: accepting mends that."""
    try:
        old, provenance = read_baseline(suite, baseline_dir)
    except OtherSuite:
        raise
    except GateError as error:
        return None, None, f"nothing could be compared: {error}"
    if absent := lacking(old):
        csv = _paths(suite, baseline_dir)[0]
        return None, None, f"nothing could be compared: {csv} has no column {', '.join(absent)}"
    return old, provenance, None


def _moved(before: Provenance, after: Provenance) -> list[str]:
    """Another machine, or config, is a change of what is gated: elsewhere drift and peak memory are only noted."""
    changes = before.environment.differences(after.environment)
    lines = [f"~ {key} {old} -> {new}" for key, (old, new) in changes.items() if key in store.COMPARED]
    return lines + ["~ the config"] * (before.config_sha256 != after.config_sha256)


def read_baseline(suite: str, baseline_dir: Path) -> tuple[pd.DataFrame, Provenance]:
    csv, about = _paths(suite, baseline_dir)
    if not csv.exists() or not about.exists():
        lost = csv if not csv.exists() else about
        raise GateError(f"no baseline {lost}; accept a run as baseline with: harness gate --accept")
    try:
        types = {name: store.dtype(name) for name in BASELINE_COLUMNS}
        absent = {name: [""] for name in BASELINE_COLUMNS}
        table = io.BytesIO(store.read_regular(csv))
        frame = pd.read_csv(table, dtype=types, keep_default_na=False, na_values=absent)
        data = json.loads(store.read_regular(about).decode())
        provenance = Provenance(**{**data, "environment": Environment.from_json(json.dumps(data["environment"]))})
    except (ValueError, TypeError, KeyError) as error:
        raise GateError(f"the baseline {csv} or {about.name} is broken: {error}") from error
    if provenance.suite != suite:
        raise OtherSuite(f"{csv} is the baseline of suite {provenance.suite!r}, not of {suite!r}; rename one of them")
    for name in (*METRICS, PEAK):
        if name not in frame.columns:  # accepted before it was gated
            frame[name] = pd.Series(None, index=frame.index, dtype=store.dtype(name))
    _refuse_nonsense(frame, csv)
    return frame, provenance


def edited(provenance: Provenance, baseline_dir: Path) -> str | None:
    """Whether the table is not what was accepted, in words. A line taken out by hand would come back as a new cell, and
    guard nothing until then."""
    csv, about = _paths(provenance.suite, baseline_dir)
    if provenance.table_sha256 == _table_hash(store.read_regular(csv)):
        return None
    if provenance.table_sha256 is None:
        return f"{about.name} has no hash of {csv}, so nobody knows whether it is what was accepted; accept a run"
    return f"{csv} is not what was accepted (its hash differs from that in {about.name}); accept a run, or put it back"


def _table_hash(data: bytes) -> str:
    return hashlib.sha256(data.replace(b"\r\n", b"\n")).hexdigest()  # a checkout may change line ends


def _refuse_nonsense(frame: pd.DataFrame, csv: Path) -> None:
    """What no run could have left there would loosen the gate without a word."""
    if not {"case_id", "status", "err_ratio"} <= set(frame.columns):
        return  # told by those who need them
    for row in frame[["case_id", "status", "err_ratio"]].to_dict("records"):
        if row["status"] not in STATUSES:
            raise GateError(f"{csv}: {row['case_id']}: status {row['status']!r} must be one of {', '.join(STATUSES)}")
        # An approximate kernel has none; a wrong one may have any.
        if row["status"] in EQUAL_STATUSES and not (pd.isna(row["err_ratio"]) or 0 <= row["err_ratio"] < math.inf):
            raise GateError(f"{csv}: {row['case_id']}: err_ratio {row['err_ratio']} of a cell that is {row['status']}")


def _paths(suite: str, baseline_dir: Path) -> tuple[Path, Path]:
    name = store.slug(suite)
    return Path(baseline_dir) / f"{name}.csv", Path(baseline_dir) / f"{name}.json"


def _baseline_table(run: pd.DataFrame) -> pd.DataFrame:
    frame = run[list(BASELINE_COLUMNS)].sort_values("case_id", ignore_index=True)
    # Four digits: enough for a factor of two, few enough that a diff shows changes and not dust.
    for name, digits in (("err_ratio", 4), ("rel_l1", 4), ("sparsity", 4), ("cosine", 7)):  # a cosine is close to 1
        frame[name] = [float(f"{value:.{digits}g}") for value in frame[name]]
    return frame


def _describe(suite: str, old: pd.DataFrame, new: pd.DataFrame, environment: Environment) -> str:
    before, after = rows_by_id(old), rows_by_id(new)
    lines = []
    for case_id in sorted(before.keys() | after.keys()):
        if case_id not in after:
            lines.append(f"- {case_id}")
        elif case_id not in before:
            lines.append(f"+ {case_id}  {after[case_id]['status']}")
        elif changes := changed(before[case_id], after[case_id], GATED):
            lines.append(f"~ {case_id}  {'; '.join(f'{name} {change}' for name, change in changes.items())}")
    counts = {mark: sum(line.startswith(mark) for line in lines) for mark in "+-~"}
    commit = f"{environment.commit or 'no commit'}{' (dirty)' if environment.dirty else ''}"
    head = f"baseline {suite}: {plural(len(after), 'cell', 'cells')} at {commit}: "
    return "\n".join([f"{head}{counts['+']} new, {counts['-']} removed, {counts['~']} changed", *lines])
