"""A record as one line: a JSON object whose last key, `crc32`, is the checksum of all bytes before it."""

import json
import math
import zlib
from dataclasses import MISSING, fields
from numbers import Integral, Real
from typing import Any, get_args, get_origin, get_type_hints

from harness.record import STATUSES, Record
from harness.store.errors import StoreError

# Strict JSON knows no non-finite number, yet an infinite error is a result.
NON_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
# The types that are columns of a table; the others are containers.
SCALARS = (int, float, str, bool)
CRC = "crc32"
REMEDY = "remove this line, and --resume measures its case again"
SEAL_BYTES = len(',"crc32":"00000000"}')


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
    if unknown := sorted(set(data) - {*TYPES, CRC}):
        raise StoreError(f"{place}: unknown fields {', '.join(unknown)}; written by another version?")
    if missing := sorted(REQUIRED - set(data)):
        raise StoreError(f"{place}: missing fields {', '.join(missing)}")
    if data["status"] not in STATUSES:
        raise StoreError(f"{place}: unknown status {data['status']!r}; known: {', '.join(STATUSES)}")
    return Record(**{name: _decode(name, value, place) for name, value in data.items() if name != CRC})


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
    if kind not in SCALARS:
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
