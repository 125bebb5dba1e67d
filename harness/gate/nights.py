"""results/history/<suite>/: one Parquet file a night, one row a cell, with where and of which commit it was.

A night is only ever added, so no fault can lose an older one.
"""

import hashlib
import io
import json
import logging
import math
import re
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from harness import store
from harness.errors import BadInput
from harness.gate.baseline import GatedRun, read_gated_run

# Times of unlike machines do not make one series. Versions of software do: what they change is worth finding.
MACHINE = ("cpu", "cores", "threads")
SOFTWARE = ("torch", "python", "numpy", "platform")
TIMES = ("latency_ratio", "latency_ratio_lo", "latency_ratio_hi", "latency_ms", "ref_latency_ms")
KEPT = (
    *TIMES, "err_ratio", "params",
    "kv_cache_bytes", "kv_bytes_per_token", "peak_bytes", "flops",
)  # fmt: skip
COLUMNS = (
    "suite", "time", "run", "commit", "dirty", "machine", *MACHINE, *SOFTWARE, "case_id", "status", *KEPT
)  # fmt: skip
# As harness names a run's folder. It stays the same when the folder is copied, which a file's own time does not.
STAMP = re.compile(r"-(\d{8}T\d{6}Z)(-\d+)?")

log = logging.getLogger(__name__)


class HistoryError(BadInput):
    """A history, or a run, that cannot be used as asked; the message names the file and what to do."""


def add(folder: Path, history: Path) -> tuple[Path, bool]:
    """The run's file, and whether it is new: a run that is there already is not added again."""
    run = read_gated_run(Path(folder))
    if run.stored.lack:
        raise HistoryError(f"{folder} is {run.stored.lack}; only whole runs make a night: resume it first")
    if not run.stored.records:
        raise HistoryError(f"{folder} has no cells, so there is nothing to keep")
    # What tells runs apart, wherever their folders are.
    checksum = hashlib.sha256(store.read_regular(run.folder / store.RECORDS)).hexdigest()[:12]
    into = Path(history) / store.slug(run.suite)
    into.mkdir(parents=True, exist_ok=True)
    time = _time(run.folder)
    for path in sorted(into.glob(f"*-{checksum}.parquet")):
        return path, False
    buffer = io.BytesIO()
    _table(run, time, checksum).to_parquet(buffer, index=False)
    # Sorts by time; two runs never share a name.
    path = into / f"{time:%Y%m%dT%H%M%SZ}-{(run.environment.commit or 'nocommit')[:8]}-{checksum}.parquet"
    store.write_atomically(path, buffer.getvalue())
    return path, True


def _table(run: GatedRun, time: datetime, checksum: str) -> pd.DataFrame:
    environment = run.environment
    frame = store.table(run.stored.records)
    frame.loc[frame["timing"] == "disturbed", list(TIMES)] = math.nan  # no measurement, and no step
    frame = frame[["case_id", "status", *KEPT]]
    machine = hashlib.sha256(json.dumps([getattr(environment, name) for name in MACHINE]).encode()).hexdigest()[:8]
    about = {"suite": run.suite, "run": checksum, "commit": environment.commit, "machine": machine}
    about |= {name: getattr(environment, name) for name in (*MACHINE, *SOFTWARE)}
    for name, value in about.items():
        frame[name] = pd.Series(value, index=frame.index, dtype="Int64" if isinstance(value, int) else "string")
    frame["dirty"] = pd.Series(environment.dirty, index=frame.index, dtype="boolean")
    frame["time"] = pd.Series(time, index=frame.index).astype("datetime64[us, UTC]")
    return frame[list(COLUMNS)]


def _time(folder: Path) -> datetime:
    """When the run began, by its folder's name; else when its records were written, if they were not copied since."""
    if stamp := STAMP.search(folder.resolve().name):
        try:
            return datetime.strptime(stamp[1], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        except ValueError:
            pass  # digits that are no date, as in the name of a folder that somebody chose
    written = datetime.fromtimestamp(int((folder / store.RECORDS).stat().st_mtime), UTC)
    log.warning(
        "%s: no time in the folder's name, so %s counts, when %s was written; a copy would have another",
        folder, f"{written:%Y-%m-%d %H:%M:%S} UTC", store.RECORDS,
    )  # fmt: skip
    return written


def suites(history: Path) -> tuple[str, ...]:
    """Folder names of the suites that have nights."""
    if not Path(history).is_dir():
        return ()
    return tuple(sorted(path.name for path in Path(history).iterdir() if any(path.glob("*.parquet"))))


def read(suite: str, history: Path) -> pd.DataFrame:
    """All nights of a suite, the oldest first. A bad file stops it: a gap would move the steps around it."""
    folder = Path(history) / store.slug(suite)
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        known = ", ".join(suites(history)) or "none"
        raise HistoryError(
            f"{folder} has no nights (suites that have: {known}); add one with: harness trend --add results/latest"
        )
    nights = [_night(path) for path in paths]
    # Two names may make one folder's name: `a b` and `a/b`. Given the folder's, the oldest night's counts.
    name = suite if suite != folder.name else nights[0]["suite"].iloc[0]
    for path, night in zip(paths, nights, strict=True):
        if others := sorted(set(night["suite"]) - {name}):
            problem = f"{path} is a night of suite {others[0]!r}, not of {name!r}"
            raise HistoryError(f"{problem}; rename one suite and move it")
    frame = pd.concat(nights, ignore_index=True)
    return frame.drop_duplicates(["run", "case_id"]).sort_values("time", kind="stable", ignore_index=True)


def _night(path: Path) -> pd.DataFrame:
    remedy = f"move it away (the other nights are whole), or put it back from its artifact: {path}"
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise HistoryError(f"a night of the history cannot be read: {error}; {remedy}") from error
    for name in KEPT:
        if name not in frame.columns:  # kept before there was such a metric
            frame[name] = pd.Series(None, index=frame.index, dtype=store.dtype(name))
    if lost := [name for name in COLUMNS if name not in frame.columns]:
        raise HistoryError(f"a night of the history has no column {', '.join(lost)}; {remedy}")
    if frame.empty:
        raise HistoryError(f"a night of the history has no rows; {remedy}")
    return frame[list(COLUMNS)]
