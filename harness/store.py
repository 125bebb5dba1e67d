"""The run's folder. `records.jsonl` is the truth, appended and synced case by case; tables are derived from it."""

import io
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import UTC, datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pandas as pd

from harness.environment import Environment
from harness.errors import BadInput
from harness.record import COLUMNS, STATUSES, Record

RECORDS, CONFIG, ENVIRONMENT = "records.jsonl", "config.yaml", "environment.json"
CSV, PARQUET, LATEST = "results.csv", "results.parquet", "latest"
# Strict JSON knows no non-finite number, yet an infinite error is a result.
NON_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
# Nullable, so that one missing count neither becomes 0 nor turns its column into floats.
DTYPES = {int: "Int64", float: "float64", str: "string", bool: "boolean"}

log = logging.getLogger(__name__)


class StoreError(BadInput):
    """A run folder that cannot be used or read as asked; the message names the file and what to do."""


def _plain_type(hint: Any) -> Any:
    """int of `int | None`; a container stays what it is."""
    options = [option for option in get_args(hint) if option is not type(None)]
    return options[0] if len(options) == 1 and type(None) in get_args(hint) else hint


HINTS = get_type_hints(Record)
TYPES = {name: _plain_type(hint) for name, hint in HINTS.items()}
OPTIONAL = frozenset(name for name, hint in HINTS.items() if type(None) in get_args(hint))
REQUIRED = frozenset(f.name for f in fields(Record) if f.default is MISSING and f.default_factory is MISSING)


def dtype(column: str) -> str:
    return DTYPES[TYPES[column]]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that belongs to this run alone: its records file did not exist before `create`."""

    path: Path

    @classmethod
    def create(cls, out: Path | None, suite_name: str, results_root: Path = Path("results")) -> "RunFolder":
        if out is None:
            latest = results_root / LATEST
            if latest.exists() and not latest.is_symlink():
                raise StoreError(f"{latest} is not a symlink; move it away, it must point to the latest run")
            path = new_folder(results_root, slug(suite_name))
        else:
            path = Path(out)
        claim(path, RECORDS)
        _sync_folder(path)
        if out is None:
            _point(results_root / LATEST, path.name)
        return cls(path)

    def append(self, record: Record) -> None:
        """On disk when this returns: one line, one write, synced."""
        line = (_dumps(record) + "\n").encode()
        with (self.path / RECORDS).open("ab", buffering=0) as file:
            written = file.write(line)
            if written != len(line):  # a full disk may take a part
                raise OSError(f"{self.path / RECORDS}: only {written} of {len(line)} bytes could be written")
            os.fsync(file.fileno())


def read_records(folder: Path) -> list[Record]:
    """All finished cases, in the order they finished. A broken line is an error; a torn last one is only skipped."""
    path = Path(folder) / RECORDS
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{folder} is not a run's folder: it has no {RECORDS}") from None
    # Not splitlines(): a message may hold U+2028 or \x85, which are no line ends in JSON lines.
    *lines, rest = data.split(b"\n")
    records = [_loads(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]
    if rest:
        place = f"{path}:{len(lines) + 1}"
        try:
            # A whole object cannot be the torn beginning of a longer one, so only its newline is missing.
            records.append(_loads(rest, place))
        except StoreError:
            log.warning("%s: torn last line of %d bytes skipped: its case was not finished", place, len(rest))
    return records


def table(records: Sequence[Record]) -> pd.DataFrame:
    return pd.DataFrame(
        {name: pd.Series([getattr(r, name) for r in records], dtype=dtype(name)) for name in COLUMNS},
        columns=list(COLUMNS),
    )


def load(folder: Path) -> pd.DataFrame:
    return table(read_records(folder))


def write_tables(folder: Path, records: Sequence[Record]) -> pd.DataFrame:
    frame = table(records)
    write_atomically(Path(folder) / CSV, frame.to_csv(index=False, lineterminator="\n").encode())
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    write_atomically(Path(folder) / PARQUET, buffer.getvalue())
    return frame


def write_config(folder: Path, text: str) -> None:
    write_atomically(Path(folder) / CONFIG, text.encode())


def write_environment(folder: Path, environment: Environment) -> None:
    write_atomically(Path(folder) / ENVIRONMENT, environment.to_json().encode())


def read_environment(folder: Path) -> Environment:
    path = Path(folder) / ENVIRONMENT
    try:
        return Environment.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist") from None
    except ValueError as error:
        raise StoreError(f"{path}: {error}") from error


def slug(name: str) -> str:
    """A suite's name as a file name: it can neither leave the folder nor hide."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"


def write_atomically(path: Path, data: bytes) -> None:
    """A reader sees the old file or the new one, whenever the power fails."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp gives 0600, which a CI's artifact step may not read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def claim(path: Path, records: str) -> None:
    """Makes the folder if need be, and its records file: of two runs started at once, one is refused."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path} is a file; --out needs a folder")
    path.mkdir(parents=True, exist_ok=True)
    try:
        (path / records).open("xb").close()
    except FileExistsError:
        raise StoreError(f"{path} already holds {records} of another run; give another --out or move it") from None


def new_folder(root: Path, name: str) -> Path:
    """A folder of this second, which nobody else has."""
    stamp = f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    root.mkdir(parents=True, exist_ok=True)
    attempt = 1
    while True:
        path = root / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            path.mkdir()
            return path
        except FileExistsError:  # another run of this second
            attempt += 1


def _point(link: Path, target: str) -> None:
    # Relative, so that the results folder can be moved; made aside and renamed, so that it always points somewhere.
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target, target_is_directory=True)
    os.replace(temporary, link)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _dumps(record: Record) -> str:
    data = {f.name: _encode(getattr(record, f.name), f.name) for f in fields(Record)}
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _encode(value: object, name: str) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        # A lone surrogate (an undecodable file name in a message) is no UTF-8; its escape is.
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Integral):  # numpy's too
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, dict):
        return {str(key): _encode(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item, name) for item in value]
    raise StoreError(f"record field {name} holds a {type(value).__name__}, which JSON cannot keep")


def _restore(value: object) -> object:
    """Inside lists and dicts the three words always mean numbers: nothing else there has such a name."""
    if isinstance(value, str):
        return NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restore(item) for key, item in value.items()}
    return [_restore(item) for item in value] if isinstance(value, list) else value


def _loads(line: bytes, place: str) -> Record:
    try:
        data = json.loads(line.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{place}: broken record: {error}") from None
    if not isinstance(data, dict):
        raise StoreError(f"{place}: a record must be a JSON object, not {type(data).__name__}")
    if unknown := sorted(set(data) - set(TYPES)):
        raise StoreError(f"{place}: unknown fields {', '.join(unknown)}; written by another version?")
    if missing := sorted(REQUIRED - set(data)):
        raise StoreError(f"{place}: missing fields {', '.join(missing)}")
    if data["status"] not in STATUSES:
        raise StoreError(f"{place}: unknown status {data['status']!r}; known: {', '.join(STATUSES)}")
    return Record(**{name: _decode(name, value, place) for name, value in data.items()})


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _decode(name: str, value: Any, place: str) -> Any:
    kind = TYPES[name]
    if value is None and name in OPTIONAL:
        return None
    if kind not in DTYPES:
        if isinstance(value, get_origin(kind)):
            return _restore(value)
    elif kind is float:
        if isinstance(value, str) and value in NON_FINITE:
            return NON_FINITE[value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif type(value) is kind:  # exactly: True is no count
        return value
    raise StoreError(f"{place}: field {name} must be {kind}, not {value!r}")
