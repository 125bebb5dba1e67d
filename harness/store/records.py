"""records.jsonl: the truth about a run. One sealed line a finished case, appended and synced."""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.record import Record
from harness.store.errors import StoreError
from harness.store.line import dumps, loads

RECORDS = "records.jsonl"

log = logging.getLogger(__name__)


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
        data = path.read_bytes()
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
                told = f"{self._path}: cannot be written: {reason}; cut back to its last whole line"
                raise StoreError(told) from error
            self._size += len(data)
        finally:
            os.close(handle)
