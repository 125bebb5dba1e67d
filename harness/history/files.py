"""results/history/<suite>/: one file a night. A night is only ever added, so no fault can lose an older one."""

import io
import os
from pathlib import Path

import pandas as pd

from harness import store
from harness.history.night import COLUMNS, METRICS, HistoryError, night_of


def add(folder: Path, history: Path) -> tuple[Path, bool]:
    """The run's file, and whether it is new: a run that is there already is not added again."""
    night = night_of(folder)
    into = Path(history) / store.slug(night.suite)
    into.mkdir(parents=True, exist_ok=True)
    for path in sorted(into.glob(f"*-{night.run}.parquet")):
        return path, False
    buffer = io.BytesIO()
    night.table.to_parquet(buffer, index=False)
    path = into / night.file_name
    store.write_atomically(path, buffer.getvalue())
    return path, True


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
    for path, night in zip(paths, nights, strict=True):
        _refuse_another_suite(path, night, suite if suite != folder.name else nights[0]["suite"].iloc[0])
    frame = pd.concat(nights, ignore_index=True)
    return frame.drop_duplicates(["run", "case_id"]).sort_values("time", kind="stable", ignore_index=True)


def _refuse_another_suite(path: Path, night: pd.DataFrame, suite: str) -> None:
    """Two names may make one folder's name: `a b` and `a/b`. `suite` is the name, or that of the oldest night."""
    if others := sorted(set(night["suite"]) - {suite}):
        raise HistoryError(f"{path} is a night of suite {others[0]!r}, not of {suite!r}; rename one suite and move it")


def _night(path: Path) -> pd.DataFrame:
    remedy = f"move it away (the other nights are whole), or put it back from its artifact: {os.fspath(path)}"
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise HistoryError(f"a night of the history cannot be read: {error}; {remedy}") from error
    for name in METRICS:
        if name not in frame.columns:  # kept before there was such a metric
            frame[name] = pd.Series(None, index=frame.index, dtype=store.dtype(name))
    if lost := [name for name in COLUMNS if name not in frame.columns]:
        raise HistoryError(f"a night of the history has no column {', '.join(lost)}; {remedy}")
    if frame.empty:
        raise HistoryError(f"a night of the history has no rows; {remedy}")
    return frame[list(COLUMNS)]
