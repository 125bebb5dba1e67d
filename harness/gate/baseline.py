"""The accepted state of a suite: one table for people to review, and what it came from, both committed."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import yaml

from harness import store
from harness.environment import Environment
from harness.gate.findings import BASELINE_COLUMNS, GATED, METRICS, PEAK, GateError, counted, rows, same, show
from harness.record import FAILING, STATUSES


class OtherSuite(GateError):
    """Two names may make one file's name; neither may take the other's place."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a baseline came from; stands beside its table as JSON."""

    suite: str
    commit: str | None
    config_sha256: str
    environment: Environment
    table_sha256: str | None = None  # of the CSV beside it; none in those accepted before it was kept

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
    new = _baseline_table(run)
    csv, _ = _paths(suite, baseline_dir)
    text_of_table = _csv(new)
    provenance = Provenance(
        suite, environment.commit, config_hash(run_folder), environment, _table_hash(text_of_table.encode())
    )
    old, before, lost = _replaced(suite, baseline_dir) if csv.exists() else (None, None, None)
    lines = [_describe(suite, new.iloc[:0] if old is None else old, new, environment)]
    lines += [] if before is None else _moved(before, provenance)
    lines += [f"warning: {each}" for each in (*_doubts(new), lost, provenance.warning) if each]
    baseline_dir.mkdir(parents=True, exist_ok=True)
    for path, data in zip(_paths(suite, baseline_dir), (text_of_table, _json(provenance)), strict=True):
        store.write_atomically(path, data.encode())
    return "\n".join(lines)


def _replaced(suite: str, baseline_dir: Path) -> tuple[pd.DataFrame | None, Provenance | None, str | None]:
    """What is to be replaced; or, where it is broken, why it cannot be compared: accepting mends that."""
    try:
        old, provenance = read_baseline(suite, baseline_dir)
    except OtherSuite:
        raise
    except GateError as error:
        return None, None, f"nothing could be compared: {error}"
    if absent := [name for name in BASELINE_COLUMNS if name not in old.columns]:
        csv = _paths(suite, baseline_dir)[0]
        return None, None, f"nothing could be compared: {csv} has no column {', '.join(absent)}"
    return old, provenance, None


def _moved(before: Provenance, after: Provenance) -> list[str]:
    """Another machine, or config, is a change of what is gated: elsewhere drift and peak memory are only noted."""
    changes = before.environment.differences(after.environment)
    lines = [f"~ {key} {old} -> {new}" for key, (old, new) in changes.items() if key in store.COMPARED]
    return lines + ["~ the config"] * (before.config_sha256 != after.config_sha256)


def _doubts(table: pd.DataFrame) -> list[str]:
    failing = tuple(str(each) for each in table.loc[table["status"].isin(FAILING), "case_id"])
    return [f"{counted(len(failing), 'cell')} accepted as failing: {store.some(failing)}"] if failing else []


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
        raise OtherSuite(f"{csv} is the baseline of suite {provenance.suite!r}, not of {suite!r}; rename one of them")
    for name in (*METRICS, PEAK):
        if name not in frame.columns:  # accepted before it was gated
            frame[name] = pd.Series(None, index=frame.index, dtype=store.dtype(name))
    _refuse_nonsense(frame, csv)
    return frame, provenance


def edited(provenance: Provenance, baseline_dir: Path) -> str | None:
    """A line taken out by hand would come back as a new cell, and guard nothing until then."""
    csv, about = _paths(provenance.suite, baseline_dir)
    if provenance.table_sha256 in (None, _table_hash(csv.read_bytes())):
        return None
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
        if row["status"] in ("ok", "degraded") and not (pd.isna(row["err_ratio"]) or 0 <= row["err_ratio"] < math.inf):
            raise GateError(f"{csv}: {row['case_id']}: err_ratio {row['err_ratio']} of a cell that is {row['status']}")


def suite_name(folder: Path) -> str:
    """The `name` of the run's saved config."""
    path = Path(folder) / store.CONFIG
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise GateError(f"there is no run in {folder}: it has no {store.CONFIG}; `harness run` makes one") from None
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
    for name, digits in (("err_ratio", 4), ("rel_l1", 4), ("sparsity", 4), ("cosine", 7)):  # a cosine is close to 1
        frame[name] = [float(f"{value:.{digits}g}") for value in frame[name]]
    return frame


def _csv(frame: pd.DataFrame) -> str:
    return frame.to_csv(index=False, lineterminator="\n")  # floats as repr: they come back bit for bit


def _json(provenance: Provenance) -> str:
    return json.dumps(asdict(provenance), indent=2, ensure_ascii=False) + "\n"


def _describe(suite: str, old: pd.DataFrame, new: pd.DataFrame, environment: Environment) -> str:
    before, after = rows(old), rows(new)
    lines = []
    for case_id in sorted(before.keys() | after.keys()):
        if case_id not in after:
            lines.append(f"- {case_id}")
        elif case_id not in before:
            lines.append(f"+ {case_id}  {after[case_id]['status']}")
        else:
            pairs = ((column, before[case_id][column], after[case_id][column]) for column in GATED)
            changes = [f"{name} {show(a)} -> {show(b)}" for name, a, b in pairs if not same(a, b)]
            if changes:
                lines.append(f"~ {case_id}  {'; '.join(changes)}")
    counts = {mark: sum(line.startswith(mark) for line in lines) for mark in "+-~"}
    commit = f"{environment.commit or 'no commit'}{' (dirty)' if environment.dirty else ''}"
    head = f"baseline {suite}: {counted(len(after), 'cell')} at {commit}: {counts['+']} new, {counts['-']} removed, "
    return "\n".join([f"{head}{counts['~']} changed", *lines])
