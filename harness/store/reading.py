"""A run's folder as its readers see it: one record a cell, and what is missing said aloud.

`read` gives the records and the manifest, `load` (which is `harness.load`) the table of one run or of several.
"""

import io
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.errors import BadInput
from harness.record import COLUMNS, Record
from harness.store.files import write_atomically
from harness.store.manifest import MANIFEST, Manifest, read_about
from harness.store.records import TYPES, latest, read_lines
from harness.text import plain

CSV, PARQUET = "results.csv", "results.parquet"  # derived: they can be written again at any time
# Nullable, so that one missing count neither becomes 0 nor turns its column into floats.
DTYPES = {int: "Int64", float: "float64", str: "string", bool: "boolean"}
NAMED = 5  # missing cells that a message names

FolderPath = str | os.PathLike[str]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    records: list[Record]  # one for every finished case, in the suite's order
    manifest: Manifest | None
    missing: tuple[str, ...]  # cells that the run should have and has not

    @property
    def lack(self) -> str | None:
        """What is missing, in words; None where nothing is."""
        if not self.missing or self.manifest is None:
            return None
        return f"incomplete: {len(self.records)} of {len(self.manifest.planned)} cells"


def read(folder: Path) -> Stored:
    lines = read_lines(folder)
    about = read_about(folder)
    if about is None:
        log.warning("%s has no %s: whether cells are missing is not known", folder, MANIFEST)
        return Stored(latest(lines, None), None, ())
    planned = about.manifest.planned
    records = latest(lines, planned)
    known = {record.case_id for record in records}
    return Stored(records, about.manifest, tuple(case_id for case_id in planned if case_id not in known))


def read_records(folder: Path) -> list[Record]:
    """Where what is missing does not matter."""
    return read(folder).records


def load(folders: FolderPath | Sequence[FolderPath]) -> pd.DataFrame:
    """One row a cell, a missing measurement is missing. Of a list, with the run's name in a first column `run`.

    `frame.attrs["missing"]` names the cells that a run should have and has not.
    """
    if isinstance(folders, str | os.PathLike):
        return _load_one(Path(folders))
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise BadInput("no folder is given: there is nothing to load")
    refuse_twice(paths)
    frames = [_load_one(path) for path in paths]
    for name, frame in zip(labels(paths), frames, strict=True):
        frame.insert(0, "run", pd.Series(name, index=frame.index, dtype="string"))
    missing = [case_id for frame in frames for case_id in frame.attrs.pop("missing")]
    whole = pd.concat(frames, ignore_index=True)
    whole.attrs["missing"] = missing
    return whole


def _load_one(folder: Path) -> pd.DataFrame:
    stored = read(folder)
    if stored.lack:
        log.warning("%s is %s; missing: %s", folder, stored.lack, some(stored.missing))
    frame = table(stored.records)
    frame.attrs["missing"] = list(stored.missing)
    return frame


def some(case_ids: tuple[str, ...]) -> str:
    more = f" and {len(case_ids) - NAMED} more" if len(case_ids) > NAMED else ""
    return ", ".join(case_ids[:NAMED]) + more


def refuse_twice(folders: Sequence[Path]) -> None:
    """One run under two names would count its cells twice."""
    seen: dict[Path, Path] = {}
    for folder in folders:
        first = seen.setdefault(folder.resolve(), folder)
        if first is not folder:
            same = "" if first == folder else f", as {first} and as {folder}"
            raise BadInput(f"{folder.resolve()}: the same folder is given twice{same}")


def labels(folders: Sequence[Path]) -> list[str]:
    """The folders' names, or their paths where two have the same name."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def dtype(column: str) -> str:
    return DTYPES[TYPES[column]]


def table(records: Sequence[Record]) -> pd.DataFrame:
    columns = {name: pd.Series([getattr(r, name) for r in records], dtype=dtype(name)) for name in COLUMNS}
    return pd.DataFrame(columns, columns=list(COLUMNS))


FORMULA = ("=", "+", "-", "@")  # a spreadsheet runs a cell that begins with one of these


def csv_text(frame: pd.DataFrame) -> str:
    """For people and spreadsheets: a kernel's message stays one line, and a message."""
    shown = frame.copy()
    for name in shown.columns:
        if pd.api.types.is_string_dtype(shown[name].dtype) or shown[name].dtype == object:
            shown[name] = shown[name].map(_harmless, na_action="ignore")
    return shown.to_csv(index=False, lineterminator="\n")


def _harmless(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.startswith(FORMULA) else text


def write_tables(folder: Path, records: Sequence[Record]) -> pd.DataFrame:
    frame = table(records)
    write_atomically(Path(folder) / CSV, csv_text(frame).encode())
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    write_atomically(Path(folder) / PARQUET, buffer.getvalue())
    return frame
