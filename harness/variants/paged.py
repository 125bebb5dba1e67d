"""KV caches in pages of one pool, as serving runtimes keep them.

A page holds some tokens of all streams and heads of one sequence, and a block table says which pages a sequence has, in
order. Pages that several caches name are shared (a common prompt is stored once) until one of them writes: then it gets
a copy. Pages before a window are given back. What attention is given is gathered from the pages, in the order of the
tokens: the same numbers as a contiguous cache's, so the same bits come out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness.variants.cache import KVCache

PAGE = 16  # tokens


class PagePool:
    """Pages for any number of caches whose streams have the same heads, widths and dtype; grows by doubling."""

    def __init__(self, pages: int = 0, *, page: int = PAGE) -> None:
        """`pages`: room that is allocated with the first token; `page`: tokens of one."""
        if page < 1 or pages < 0:
            raise ValueError(f"pages = {pages}, page = {page}: must be at least 0 and 1")
        self.page, self._wanted = page, pages
        self._buffers: tuple[Tensor, ...] = ()  # (pages, heads, page, width)
        self._owners: list[int] = []  # of each page: how many block tables name it
        self._free: list[int] = []

    @property
    def pages_in_use(self) -> int:
        return sum(owners > 0 for owners in self._owners)

    @property
    def allocated_bytes(self) -> int:
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers)

    def take(self, like: Sequence[Tensor]) -> int:
        """A page of its own for a stream such as these."""
        if not self._free:
            self._grow(like)
        number = self._free.pop()
        self._owners[number] = 1
        return number

    def share(self, pages: Sequence[int]) -> None:
        for number in pages:
            self._owners[number] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        for number in pages:
            self._owners[number] -= 1
            if not self._owners[number]:
                self._free.append(number)

    def own(self, number: int, like: Sequence[Tensor]) -> int:
        """The page itself if nobody else has it, or a copy of it."""
        if self._owners[number] == 1:
            return number
        copy = self.take(like)
        for buffer in self._buffers:
            buffer[copy] = buffer[number]
        self.give_back([number])
        return copy

    def write(self, number: int, at: int, tokens: Sequence[Tensor]) -> None:
        """tokens (heads, some, width) of each stream, from place `at` of the page on."""
        for buffer, part in zip(self._buffers, tokens, strict=True):
            buffer[number, :, at : at + part.shape[1]] = part

    def gather(self, table: Sequence[Sequence[int]], length: int) -> tuple[Tensor, ...]:
        """(B, heads, length, width) of each stream."""
        numbers = torch.tensor(table, dtype=torch.long).reshape(len(table), -1)
        return tuple(b[numbers].transpose(1, 2).flatten(2, 3)[:, :, :length] for b in self._buffers)

    def _grow(self, like: Sequence[Tensor]) -> None:
        held = len(self._owners)
        size = max(2 * held, self._wanted, 1) if held else max(self._wanted, 1)
        old = self._buffers
        self._buffers = tuple(t.new_empty((size, t.shape[1], self.page, t.shape[3])) for t in like)
        for buffer, before in zip(self._buffers, old, strict=False):
            buffer[:held] = before
        self._owners += [0] * (size - held)
        self._free = list(range(size - 1, held - 1, -1))


class PagedKVCache(KVCache):
    """As KVCache, over a pool; for inference alone. `evicted` tokens stood before the first that is held."""

    def __init__(self, pool: PagePool | None = None) -> None:
        super().__init__()
        self.pool = pool or PagePool()
        self.table: list[list[int]] = []  # of each sequence, its pages
        self.evicted = 0

    @property
    def held(self) -> int:
        return self.length - self.evicted

    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        if self.pool._buffers and self.held:
            self._buffers = self.pool.gather(self.table, 1)  # what new tokens must look like
        self._check(streams)
        self._buffers = ()
        if torch.is_grad_enabled() and any(t.requires_grad for t in streams):
            raise ValueError("a paged cache has no gradient: call it under torch.no_grad()")
        B, L, page = streams[0].shape[0], streams[0].shape[2], self.pool.page
        self.table = self.table or [[] for _ in range(B)]
        for row, pages in enumerate(self.table):
            done = 0
            while done < L:
                nth, at = divmod(self.held + done, page)
                if nth == len(pages):
                    pages.append(self.pool.take(streams))
                else:
                    pages[nth] = self.pool.own(pages[nth], streams)
                part = min(page - at, L - done)
                self.pool.write(pages[nth], at, [t[row, :, done : done + part] for t in streams])
                done += part
        self.length += L
        return self.streams()

    def streams(self) -> tuple[Tensor, ...]:
        return self.pool.gather(self.table, self.held) if self.held else ()

    def fork(self) -> "PagedKVCache":
        """Another cache with the same tokens, in the same pages until one of the two writes into them."""
        other = PagedKVCache(self.pool)
        other.length, other.evicted, other.table = self.length, self.evicted, [list(pages) for pages in self.table]
        for pages in other.table:
            self.pool.share(pages)
        return other

    def evict(self, window: int) -> None:
        """Give back the pages that hold nothing of the last `window` tokens."""
        if window < 1:
            raise ValueError(f"window = {window}: must be at least 1 (self)")
        whole = max(0, self.held - window) // self.pool.page
        for pages in self.table:
            self.pool.give_back(pages[:whole])
            del pages[:whole]
        self.evicted += whole * self.pool.page

    def crop(self, length: int) -> None:
        if not self.evicted <= length <= self.length:
            raise ValueError(f"length = {length}: must be within {self.evicted} and the {self.length} tokens held")
        self.length = length
        kept = -(-self.held // self.pool.page)
        for pages in self.table:
            self.pool.give_back(pages[kept:])
            del pages[kept:]

    def free(self) -> None:
        """Give all pages back."""
        for pages in self.table:
            self.pool.give_back(pages)
        self.table, self.length, self.evicted = [], 0, 0

    @property
    def allocated_bytes(self) -> int:
        """Of the pages that this cache names, shared ones included; the pool's own says what all caches take."""
        pages = {number for pages in self.table for number in pages}
        return len(pages) * sum(b[0].numel() * b.element_size() for b in self.pool._buffers)

    def get_cache_info(self) -> dict[str, Any]:
        pages = [number for pages in self.table for number in pages]
        return {
            "tokens": self.length,
            "evicted": self.evicted,
            "page": self.pool.page,
            "pages": len(pages),
            "shared_pages": sum(self.pool._owners[number] > 1 for number in pages),
            "allocated_bytes": self.allocated_bytes,
            "pool_bytes": self.pool.allocated_bytes,
        }


def paged_bytes(tokens: int, *, page: int, token_bytes: int) -> int:
    """Of one sequence: whole pages."""
    return -(-tokens // page) * page * token_bytes
