"""One run as a night of the history: one row per cell, with where and of which commit it was."""

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from harness import store
from harness.environment import Environment
from harness.errors import BadInput
from harness.gate.baseline import suite_name

# Times of unlike machines do not make one series. Versions of software do: what they change is worth finding.
MACHINE = ("cpu", "cores", "threads")
SOFTWARE = ("torch", "python", "numpy", "platform")
METRICS = (
    "latency_ratio", "latency_ratio_lo", "latency_ratio_hi", "latency_ms", "ref_latency_ms", "err_ratio", "params",
    "kv_cache_bytes", "kv_bytes_per_token", "peak_bytes", "flops",
)  # fmt: skip
COLUMNS = (
    "suite", "time", "run", "commit", "dirty", "machine", *MACHINE, *SOFTWARE, "case_id", "status", *METRICS
)  # fmt: skip


# As harness names a run's folder. It stays the same when the folder is copied, which a file's own time does not.
STAMP = re.compile(r"-(\d{8}T\d{6}Z)(-\d+)?")

log = logging.getLogger(__name__)


class HistoryError(BadInput):
    """A history, or a run, that cannot be used as asked; the message names the file and what to do."""


@dataclass(frozen=True, slots=True)
class Night:
    """`run` tells runs apart, wherever their folders are: the checksum of the records."""

    suite: str
    time: datetime
    run: str
    commit: str | None
    table: pd.DataFrame

    @property
    def file_name(self) -> str:
        """Sorts by time; two runs never share one."""
        return f"{self.time:%Y%m%dT%H%M%SZ}-{(self.commit or 'nocommit')[:8]}-{self.run}.parquet"


def night_of(folder: Path) -> Night:
    folder = Path(folder)
    stored = store.read(folder)
    if stored.lack:
        raise HistoryError(f"{folder} is {stored.lack}; only whole runs make a night: resume it first")
    if not stored.records:
        raise HistoryError(f"{folder} has no cells, so there is nothing to keep")
    records = folder / store.RECORDS
    time = _time(folder)
    run = hashlib.sha256(records.read_bytes()).hexdigest()[:12]
    environment, suite = store.read_environment(folder), suite_name(folder)
    frame = store.table(stored.records)[["case_id", "status", *METRICS]]
    about = {"suite": suite, "run": run, "commit": environment.commit, "machine": machine_key(environment)}
    about |= {name: getattr(environment, name) for name in (*MACHINE, *SOFTWARE)}
    for name, value in about.items():
        frame[name] = pd.Series(value, index=frame.index, dtype="Int64" if isinstance(value, int) else "string")
    frame["dirty"] = pd.Series(environment.dirty, index=frame.index, dtype="boolean")
    frame["time"] = pd.Series(time, index=frame.index).astype("datetime64[us, UTC]")
    return Night(suite, time, run, environment.commit, frame[list(COLUMNS)])


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


def machine_key(environment: Environment) -> str:
    text = json.dumps([getattr(environment, name) for name in MACHINE])
    return hashlib.sha256(text.encode()).hexdigest()[:8]
