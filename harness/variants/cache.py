"""KV caches that append in place.

One class holds what any variant must keep: per token and head, some channels of each of its streams. Full and grouped
attention keep (k, v); MLA keeps one latent stream, or expanded (k, v).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class KVCache:
    """Streams of shape (B, heads, S, width). `append` writes in place, growing by doubling beyond the capacity."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.length = 0
        self._buffers: tuple[Tensor, ...] = ()

    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        """Add L tokens to each stream; gives all tokens so far, as views."""
        self._check(streams)
        start, end = self.length, self.length + streams[0].shape[2]
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*streams, *self._buffers)):
            # Autograd forbids writing into what it may need again: here, and only here, the cache is copied.
            held = [buffer[:, :, :start] for buffer in self._buffers] or [t[:, :, :0] for t in streams]
            self._buffers = tuple(torch.cat(pair, dim=2) for pair in zip(held, streams, strict=True))
        else:
            self._reserve(end, streams)
            for buffer, new in zip(self._buffers, streams, strict=True):
                buffer[:, :, start:end] = new
        self.length = end
        return self.streams()

    def streams(self) -> tuple[Tensor, ...]:
        return tuple(buffer[:, :, : self.length] for buffer in self._buffers)

    def crop(self, length: int) -> None:
        """Forget the tokens from `length` on (a rejected draft, a repeated measurement)."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length = {length}: must be within 0 and the {self.length} tokens held")
        self.length = length

    @property
    def allocated_bytes(self) -> int:
        """What the cache really occupies: its storages, each counted once."""
        # By identity, not address: on the meta device every address is 0.
        storages = {storage._cdata: storage.nbytes() for storage in (t.untyped_storage() for t in self._storages())}
        return sum(storages.values())

    def get_cache_info(self) -> dict[str, Any]:
        """What the cache holds, for people and logs."""
        return {
            "tokens": self.length,
            "capacity": self.capacity,
            "dtype": str(self._buffers[0].dtype).removeprefix("torch.") if self._buffers else None,
            "streams": [(b.shape[0], b.shape[1], self.length, b.shape[3]) for b in self._buffers],
            "allocated_bytes": self.allocated_bytes,
            "bytes_per_token": self.allocated_bytes / self.capacity if self.capacity else None,
        }

    def _storages(self) -> Sequence[Tensor]:
        """All tensors that the cache keeps."""
        return self._buffers

    def _check(self, streams: tuple[Tensor, ...]) -> None:
        """Writing in place would broadcast and cast what does not fit, without a word."""
        like = self._buffers or streams
        if not streams or len(streams) != len(like):
            raise ValueError(f"{len(streams)} streams: must be {len(like) or 'at least 1'}")
        L = streams[0].shape[2]
        for new, held in zip(streams, like, strict=True):
            B, heads, _, width = held.shape
            if new.shape != (B, heads, L, width) or new.dtype != held.dtype:
                expected = f"{(B, heads, L, width)} {held.dtype}"
                raise ValueError(f"stream {tuple(new.shape)} {new.dtype}: must be {expected}, like what it joins")

    def _reserve(self, length: int, like: tuple[Tensor, ...]) -> None:
        if self._buffers and self._buffers[0].shape[2] >= length:
            return
        self.capacity = max(length, self.capacity if not self._buffers else 2 * self._buffers[0].shape[2])
        old = self.streams()
        self._buffers = tuple(t.new_empty((*t.shape[:2], self.capacity, t.shape[3])) for t in like)
        for buffer, held in zip(self._buffers, old, strict=False):
            buffer[:, :, : self.length] = held


class SlidingKVCache(KVCache):
    """Keeps the last `window` tokens; `append` gives those that it held and the new ones, all that these may see."""

    def __init__(self, capacity: int = 0, *, window: int) -> None:
        super().__init__(capacity)
        if window < 1:
            raise ValueError(f"window = {window}: must be at least 1 (self)")
        self.window = window
        self._kept = 0  # tokens held

    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        self._check(streams)
        given = self.streams() or tuple(t[:, :, :0] for t in streams)
        joined = tuple(torch.cat(pair, dim=2) for pair in zip(given, streams, strict=True))
        self.length += streams[0].shape[2]
        self._kept = min(joined[0].shape[2], self.window)
        size = min(self.window, max(self.capacity, self.length))
        if torch.is_grad_enabled() and any(t.requires_grad for t in joined):
            self._buffers = tuple(t[:, :, -self._kept :] for t in joined)
        else:
            if not self._buffers or self._buffers[0].shape[2] < size:
                self._buffers = tuple(t.new_empty((*t.shape[:2], size, t.shape[3])) for t in joined)
            for buffer, new in zip(self._buffers, joined, strict=True):
                buffer[:, :, : self._kept] = new[:, :, -self._kept :]
        self.capacity = max(self.capacity, self.length)
        return joined

    def streams(self) -> tuple[Tensor, ...]:
        return tuple(buffer[:, :, : self._kept] for buffer in self._buffers)

    def crop(self, length: int) -> None:
        """Forget the tokens from `length` on, as long as what the next one sees is still held."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length = {length}: must be within 0 and the {self.length} tokens held")
        kept = self._kept - (self.length - length)
        if kept < min(length, self.window - 1):
            raise ValueError(f"length = {length}: of {self.length} tokens the cache has forgotten those before")
        self.length, self._kept = length, kept
