"""Tensors through shared memory: written once by one side, read where they lie by the other.

The judge lays out the arena of inputs, the kernel's process that of outputs. Around each input lie guards whose bytes
are known, so that who writes beside a view is seen, and who reads there reads NaN.
"""

import fcntl
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
GUARD = 4096  # bytes on either side of an input
FILLER = 0xFF  # NaN in every floating type
GROWTH = 1 << 20
F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2  # of Linux; Python's fcntl has them from 3.13 on
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8)
}


class BrokenLayout(Exception):
    """What the other side says of its memory cannot be."""


class Arena:
    """Memory that two processes map. It only grows: what was mapped before stays where it is."""

    def __init__(self, handle: int) -> None:
        self.handle, self._size = handle, 0
        self._map: mmap.mmap | None = None

    @classmethod
    def make(cls) -> "Arena":
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("harness", os.MFD_CLOEXEC | getattr(os, "MFD_ALLOW_SEALING", 2))
            fcntl.fcntl(handle, F_ADD_SEALS, F_SEAL_SHRINK)  # who cuts it off would crash whoever reads it
        else:
            with tempfile.TemporaryFile() as file:
                handle = os.dup(file.fileno())
        return cls(handle)

    def bytes(self, start: int, size: int) -> Tensor:
        """A range as bytes, uint8; BrokenLayout if there is no such range."""
        if not (start >= 0 and size >= 0 and start + size <= os.fstat(self.handle).st_size):
            raise BrokenLayout(f"{size} bytes at {start} of {os.fstat(self.handle).st_size}")
        if start + size > self._size:
            self._size = os.fstat(self.handle).st_size
            self._map = mmap.mmap(self.handle, self._size)
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size, offset=start)

    def reserve(self, size: int) -> None:
        if size > os.fstat(self.handle).st_size:
            os.ftruncate(self.handle, size + size // 4 + GROWTH)

    def close(self) -> None:
        os.close(self.handle)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in an arena: `span` elements from `start` on, seen through sizes and strides."""

    start: int
    span: int
    dtype: str
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, start: int) -> "Place":
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if tensor.numel() else 0
        return cls(start, span, str(tensor.dtype).removeprefix("torch."), size, stride)

    @classmethod
    def read(cls, fields: Any) -> "Place":
        """Of what the other side says; BrokenLayout unless it is one."""
        try:
            place = cls(**{**fields, "size": tuple(fields["size"]), "stride": tuple(fields["stride"])})
            numbers = (place.start, place.span, *place.size, *place.stride)
            sound = place.dtype in DTYPES and all(type(n) is int and n >= 0 for n in numbers)
            if not (sound and len(place.size) == len(place.stride)):
                raise ValueError(fields)
            reach = 1 + sum((n - 1) * s for n, s in zip(place.size, place.stride, strict=True))
            if all(place.size) and reach > place.span:
                raise ValueError(fields)
        except (TypeError, ValueError, KeyError, AttributeError):
            raise BrokenLayout(f"no tensor lies at {fields!r:.200}") from None
        return place

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        return self.span * self.itemsize

    def tensor(self, arena: Arena, *, guard: int = 0) -> Tensor:
        """The tensor where it lies; its storage reaches `guard` bytes beyond either end."""
        flat = arena.bytes(self.start - guard, self.bytes + 2 * guard).view(DTYPES[self.dtype])
        return flat.as_strided(self.size, self.stride, guard // self.itemsize)


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def lay_out(tensors: Mapping[str, Tensor], start: int) -> tuple[dict[str, Place], int]:
    """Places for tensors one after another, guards between, from `start` on; and where the last guard ends."""
    places, end = {}, start
    for name, tensor in tensors.items():
        places[name] = Place.of(tensor, aligned(end + GUARD))
        end = aligned(places[name].start + places[name].bytes) + GUARD
    return places, end


def put(arena: Arena, tensors: Mapping[str, Tensor], places: Mapping[str, Place], start: int, end: int) -> None:
    """Writes them, all that lies between filled with guards."""
    arena.reserve(end)
    # Between the elements of a strided view lies what its owner has there: as it is, since a kernel may read it.
    edge = start
    for name, place in places.items():
        arena.bytes(edge, place.start - edge).fill_(FILLER)
        if place.span:
            flat = tensors[name].detach().as_strided((place.span,), (1,))
            arena.bytes(place.start, place.bytes).view(DTYPES[place.dtype]).copy_(flat)
        edge = place.start + place.bytes
    arena.bytes(edge, end - edge).fill_(FILLER)


def spoilt(arena: Arena, tensors: Mapping[str, Tensor], places: Mapping[str, Place], start: int, end: int) -> list[str]:
    """The names of those that are no longer as they were put, or whose guards are not."""
    found, edge, stops = [], start, [*[place.start for place in places.values()][1:], end]
    for (name, place), stop in zip(places.items(), stops, strict=True):
        after = place.start + place.bytes
        guards = (arena.bytes(edge, place.start - edge), arena.bytes(after, stop - after))
        same = all(bool((guard == FILLER).all()) for guard in guards)
        if place.span:
            flat = tensors[name].detach().as_strided((place.span,), (1,)).view(torch.uint8)
            same = same and torch.equal(arena.bytes(place.start, place.bytes), flat)
        if not same:
            found.append(name)
        edge = after
    return found


def publish(arena: Arena, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Copies of results, dense, for the other side to read: their places by name."""
    places, end = {}, 0
    dense = {name: t if t.is_contiguous() else t.contiguous() for name, t in tensors.items()}
    for name, tensor in dense.items():
        places[name] = Place.of(tensor, aligned(end))
        end = places[name].start + places[name].bytes
    arena.reserve(end)
    for name, place in places.items():
        if place.span:
            arena.bytes(place.start, place.bytes).view(DTYPES[place.dtype]).copy_(dense[name].reshape(-1))
    return {name: vars(place) for name, place in places.items()}


def collect(arena: Arena, places: Any) -> dict[str, Tensor]:
    """Copies of what the other side published: nobody can change them afterwards."""
    if not isinstance(places, dict):
        raise BrokenLayout(f"a {type(places).__name__} instead of places")
    return {str(name): Place.read(fields).tensor(arena).clone() for name, fields in places.items()}
