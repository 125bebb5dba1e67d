"""records.jsonl: the truth about a run. One sealed line a finished case, appended and synced.

A line is a JSON object whose last key, `crc32`, is the checksum of all bytes before it.
"""

import json
import logging
import math
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from harness.errors import StoreError
from harness.record import STATUSES, Record
from harness.store.files import read_regular

RECORDS = "records.jsonl"
# Strict JSON knows no non-finite number, yet an infinite error is a result.
NON_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
CRC = "crc32"
REMEDY = "remove this line, and --resume measures its case again"
SEAL_BYTES = len(',"crc32":"00000000"}')

log = logging.getLogger(__name__)


def _plain_type(hint: Any) -> Any:
    """int of `int | None`; a container stays what it is."""
    options = [option for option in get_args(hint) if option is not type(None)]
    return options[0] if len(options) == 1 and type(None) in get_args(hint) else hint


HINTS = get_type_hints(Record)
TYPES = {name: _plain_type(hint) for name, hint in HINTS.items()}
OPTIONAL = frozenset(name for name, hint in HINTS.items() if type(None) in get_args(hint))
REQUIRED = frozenset(f.name for f in fields(Record) if f.default is MISSING and f.default_factory is MISSING)


def dumps(record: Record) -> bytes:
    data = {f.name: _encode(getattr(record, f.name), f.name) for f in fields(Record)}
    return seal(json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())


def seal(plain: bytes) -> bytes:
    """The checksum goes inside the object, so that any reader of JSON lines still reads it."""
    body = plain[:-1]
    return body + _seal_of(body) + b"\n"


def _seal_of(body: bytes) -> bytes:
    return f',"{CRC}":"{zlib.crc32(body):08x}"}}'.encode()


def loads(line: bytes, place: str) -> Record:
    """Without its newline. `place` is the file and line for the message of a line that cannot be trusted."""
    body, found = line[:-SEAL_BYTES], line[-SEAL_BYTES:]
    if found != _seal_of(body):
        raise StoreError(f"{place}: {_why_unsealed(line, body)}")
    data = _parse(line, place)
    if missing := sorted(REQUIRED - set(data)):
        raise StoreError(f"{place}: missing fields {', '.join(missing)}")
    if data["status"] not in STATUSES:
        raise StoreError(f"{place}: unknown status {data['status']!r}; known: {', '.join(STATUSES)}")
    return Record(**{name: _decode(name, value, place) for name, value in data.items() if name in TYPES})


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        data = json.loads(line.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{place}: broken record: {error}") from None
    if not isinstance(data, dict):
        raise StoreError(f"{place}: a record must be a JSON object, not {type(data).__name__}")
    return data


def _why_unsealed(line: bytes, body: bytes) -> str:
    try:
        data = _parse(line, "")
    except StoreError:
        return f"broken record: not one whole JSON object with a {CRC} at its end; {REMEDY}"
    if CRC not in data:
        return f"written by an older version of harness, without a {CRC}: run it again, or read it with that version"
    return f"broken record: its {CRC} is {data[CRC]!r}, but its bytes give '{zlib.crc32(body):08x}'; {REMEDY}"


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


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


def _decode(name: str, value: Any, place: str) -> Any:
    kind = TYPES[name]
    if value is None and name in OPTIONAL:
        return None
    if (container := get_origin(kind)) is not None:
        if isinstance(value, container):
            return _restore(value)
    elif kind is float:
        if isinstance(value, str) and value in NON_FINITE:
            return NON_FINITE[value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif type(value) is kind:  # exactly: True is no count
        return value
    raise StoreError(f"{place}: field {name} must be {kind}, not {value!r}")


@dataclass(frozen=True, slots=True)
class Line:
    record: Record
    place: str  # file:line


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows the last newline: nothing, a line that only lacks its newline, or a torn one."""

    at: int  # the byte it starts at
    size: int
    whole: bool


def read_lines(folder: Path) -> list[Line]:
    """Every line, in the order they were written. A broken line is an error; a torn last one is only announced."""
    return _read(folder)[0]


def _read(folder: Path) -> tuple[list[Line], Tail]:
    path = Path(folder) / RECORDS
    try:
        data = read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{folder} is not a run's folder: it has no {RECORDS}") from None
    # Not splitlines(): a message may hold U+2028 or \x85, which are no line ends in JSON lines.
    *complete, rest = data.split(b"\n")
    found = []
    for number, line in enumerate(complete, start=1):
        place = f"{path}:{number}"
        found.append(Line(loads(line, place), place))
    whole = True
    if rest:
        place = f"{path}:{len(complete) + 1}"
        try:
            # Its checksum holds, so only its newline is missing.
            found.append(Line(loads(rest, place), place))
        except StoreError:
            whole = False
            log.warning("%s: torn last line of %d bytes left out: its case was not finished", place, len(rest))
    return found, Tail(len(data) - len(rest), len(rest), whole)


def latest(lines: Sequence[Line], planned: Sequence[str] | None) -> list[Record]:
    """One record a case, its last attempt; in the order of the plan, or of writing where there is none."""
    attempts: dict[str, dict[int, Line]] = {}
    for line in lines:
        case_id, attempt = line.record.case_id, line.record.attempt
        before = attempts.setdefault(case_id, {})
        if attempt in before:
            raise StoreError(f"{line.place}: {case_id} is recorded twice; the other is {before[attempt].place}")
        before[attempt] = line
    for case_id, found in attempts.items():
        if lost := sorted(set(range(1, max(found) + 1)) - set(found)):
            last = found[max(found)]
            raise StoreError(f"{last.place}: attempt {max(found)} of {case_id}, but attempt {lost[0]} is not there")
    newest = {case_id: found[max(found)] for case_id, found in attempts.items()}
    if planned is None:
        return [line.record for line in newest.values()]
    known = set(planned)
    for case_id, line in newest.items():
        if case_id not in known:
            raise StoreError(f"{line.place}: {case_id} is not a cell of this run")
    return [newest[case_id].record for case_id in planned if case_id in newest]


def repair(folder: Path) -> None:
    """Before anything is appended: a torn last line is cut off, a missing last newline added."""
    path = Path(folder) / RECORDS
    _, tail = _read(folder)
    if not tail.size:
        return
    with path.open("r+b", buffering=0) as file:
        if tail.whole:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(tail.at)
            log.warning("%s: the torn last line was cut off", path)
        os.fsync(file.fileno())


class Writer:
    """Knows where the file must end: a line of somebody else's would make both unreadable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = path.stat().st_size

    def append(self, records: Iterable[Record]) -> None:
        """On disk when this returns. If they cannot all be written, none is: the file is cut back to what it was."""
        data = b"".join(map(dumps, records))
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            if (size := os.fstat(handle).st_size) != self._size:
                raise StoreError(
                    f"{self._path}: has {size} bytes where this run left {self._size}: something else wrote into it"
                )
            try:
                left = memoryview(data)
                while left:  # a full disk may take a part, and refuse the next
                    left = left[os.write(handle, left) :]
                os.fsync(handle)
            except OSError as error:
                os.ftruncate(handle, size)
                reason = error.strerror or error
                message = f"{self._path}: cannot be written: {reason}; cut back to its last whole line"
                raise StoreError(message) from error
            self._size += len(data)
        finally:
            os.close(handle)
