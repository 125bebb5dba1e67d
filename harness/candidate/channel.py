"""Messages between a parent and its worker: a length of 8 bytes, then JSON. No pickle: a worker runs anyone's code."""

import dataclasses
import json
import os
from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any

HEADER_BYTES = 8
MOST_BYTES = 256 << 20  # a record of the longest timing has 3 MB; more is no message of ours


class BrokenMessage(Exception):
    pass


def pack(message: dict[str, Any]) -> bytes:
    # NaN and infinities go as Python's json writes them; the store has its own, strict form.
    data = json.dumps(message, default=_plain, separators=(",", ":")).encode()
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def _plain(value: object) -> object:
    if isinstance(value, Integral):  # numpy's are no ints
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if dataclasses.is_dataclass(value):
        return vars(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent")


class Inbox:
    """Bytes in as they come, whole messages out."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        self._bytes += data
        return self._whole()

    def _whole(self) -> Iterator[dict[str, Any]]:
        """One by one: a broken message does not take those before it along."""
        while len(self._bytes) >= HEADER_BYTES:
            size = int.from_bytes(self._bytes[:HEADER_BYTES], "big")
            if size > MOST_BYTES:
                raise BrokenMessage(f"a message of {size} bytes is announced")
            if len(self._bytes) < HEADER_BYTES + size:
                break
            body = bytes(self._bytes[HEADER_BYTES : HEADER_BYTES + size])
            del self._bytes[: HEADER_BYTES + size]
            yield _parse(body)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BrokenMessage(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise BrokenMessage(f"a {type(message).__name__} instead of an object")
    return message


def send(handle: int, message: dict[str, Any]) -> None:
    left = memoryview(pack(message))
    while left:
        left = left[os.write(handle, left) :]


def receive(handle: int) -> dict[str, Any] | None:
    """The next message, waited for; None when the other side is gone."""
    header = _exactly(handle, HEADER_BYTES)
    body = None if header is None else _exactly(handle, int.from_bytes(header, "big"))
    return None if body is None else _parse(body)


def _exactly(handle: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = os.read(handle, size - len(data))
        if not more:
            return None
        data += more
    return data
