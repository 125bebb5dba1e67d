"""One small registry: duplicate names raise, an unknown name lists the known ones and suggests the nearest."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from harness.errors import BadInput

T = TypeVar("T")


class UnknownName(BadInput):
    """A name that no registry entry answers to; the message lists those that exist."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: "; did you mean 'eager'?", or nothing if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class Registry(Generic[T]):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            known = ", ".join(self._entries)
            raise UnknownName(f"unknown {self.kind} {name!r}; known: {known}{nearest(name, self._entries)}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
