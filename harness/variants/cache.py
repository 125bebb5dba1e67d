"""KV caches that append in place.

One class holds what any variant must keep: per token and head, some channels of each of its streams. Full and grouped
attention keep (k, v); MLA keeps one latent stream, or expanded (k, v).
"""

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

    def fill(self, length: int) -> None:
        """Random numbers up to this length, as if so many tokens had been appended: for timing one step after them. At
        least one must be there, for the streams' shapes."""
        self._reserve(length, self.streams())
        for buffer in self._buffers:
            buffer[:, :, self.length : length].normal_()
        self.length = length

    def crop(self, length: int) -> None:
        """Forget the tokens from `length` on (a rejected draft, a repeated measurement)."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length = {length}: must be within 0 and the {self.length} tokens held")
        self.length = length

    @property
    def allocated_bytes(self) -> int:
        """What the cache really occupies: its storages, each counted once."""
        # By identity, not address: on the meta device every address is 0.
        storages = {storage._cdata: storage.nbytes() for storage in (b.untyped_storage() for b in self._buffers)}
        return sum(storages.values())

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
