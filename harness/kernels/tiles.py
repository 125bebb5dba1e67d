"""How a big attention is cut into tiles that stay in cache, and which keys and masks each tile needs."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall, four_dims

CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
DEFAULT_CACHE = 8 << 20  # bytes of last-level cache where the system does not tell: a laptop's
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SHARE = 4  # a tile takes this part of the last-level cache; keys, values and other processes want room too
# Each product reads all its keys anew, so few rows are dear; beyond these nothing more is gained.
LEAST_ROWS, MOST_ROWS = 64, 256
STAIRS = 8  # a causal tile computes its whole last step and hides half of it: steps are this part of the length,
LEAST_STEP = 128  # but no smaller than this: products of fewer rows are slower than half of them hidden
TILE_ROWS = 512  # of all its heads: what each tile costs besides arithmetic no longer counts


@functools.cache
def cache_bytes(folder: Path = CPU_CACHES) -> int:
    """The last-level cache that this processor's cores share."""
    sizes = {}
    for index in folder.glob("index*"):
        level, size = _read(index / "level"), re.fullmatch(r"(\d+)([KMG]?)", _read(index / "size"))
        if size is not None and int(size[1]) > 0 and _read(index / "type") != "Instruction":
            sizes[level] = int(size[1]) * UNITS[size[2]]
    return sizes[max(sizes)] if sizes else DEFAULT_CACHE


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Tiling:
    """A tile is `rows` query positions of the query heads of `heads` key/value heads, over all keys that they see."""

    rows: int
    heads: int


def choose_tiling(q: Tensor, k: Tensor, call: AttentionCall) -> Tiling:
    """The scores of a tile fit the cache, as far as the least number of rows allows."""
    L, (H_kv, S) = q.shape[2], k.shape[1:3]
    G = q.shape[1] // H_kv  # the heads of a group are rows of one product
    if call.dropout_p > 0:  # drawn tile by tile: the same seed must draw the same on every machine
        return Tiling(max(min(MOST_ROWS // G, L), 1), heads=1)
    row = G * max(S, 1) * max(q.element_size(), 4)  # bytes of one position's scores: half types are scored in float32
    budget = cache_bytes() // (SHARE * torch.get_num_threads())  # each thread has a tile of its own
    most = min(MOST_ROWS, max(L // STAIRS, LEAST_STEP)) if call.is_slanted else MOST_ROWS
    rows = max(min(budget // row, most // G, L), LEAST_ROWS // G, 1)
    return Tiling(rows, heads=max(min(TILE_ROWS // (rows * G), budget // (rows * row), H_kv), 1))


@dataclass(frozen=True)
class Zone:
    """A stretch of a tile's keys of which some are hidden from some of its queries."""

    keys: slice  # counted from the tile's first key
    hidden: Tensor  # bool, broadcastable to (heads, rows, keys)
    ceiling: Tensor  # -inf where hidden, else inf: a minimum takes an eighth of the time of a masked_fill


@dataclass(frozen=True)
class Tile:
    batch: int
    kv_heads: slice
    heads: slice
    rows: slice
    keys: slice  # from the first key that some row sees to the last; empty if there is none
    zones: tuple[Zone, ...]
    has_dead_rows: bool  # that see no key at all


def tiles(q: Tensor, k: Tensor, call: AttentionCall, tiling: Tiling) -> Iterator[Tile]:
    """All of the problem, in an order that depends on shapes alone."""
    (B, H, L, _), H_kv = q.shape, k.shape[1]
    G = H // H_kv
    mask = None if call.mask is None else four_dims(call.mask)
    # Head after head, so that its keys stay in cache; but a mask that all heads share is looked at once for all.
    together = H_kv if mask is not None and mask.shape[1] == 1 else tiling.heads
    for b in range(B):
        sight = _Sight(q, k, call, mask, b)
        for group in blocks(slice(0, H_kv), together):
            for rows in blocks(slice(0, L), tiling.rows):
                seen = sight.through_mask(_times(group, G), rows) if mask is not None else sight.by_position(rows)
                for kv_heads in blocks(group, tiling.heads):
                    yield Tile(b, kv_heads, _times(kv_heads, G), rows, *seen)


def blocks(whole: slice, size: int) -> Iterator[slice]:
    for start in range(whole.start, whole.stop, size):
        yield slice(start, min(start + size, whole.stop))


def part(t: Tensor, b: int, heads: slice, rows: slice, keys: slice) -> Tensor:
    """What of a tensor that broadcasts to (B, H, L, S) belongs to a tile: a view that broadcasts to 3 dims."""
    picks = (slice(b, b + 1), heads, rows, keys)
    at = tuple(pick if size > 1 else slice(None) for pick, size in zip(picks, t.shape, strict=True))
    return t[at][0]


def _times(s: slice, factor: int) -> slice:
    return slice(s.start * factor, s.stop * factor)


Seen = tuple[slice, tuple[Zone, ...], bool]  # the last three fields of a Tile


class _Sight:
    """What the queries of one batch row may see."""

    def __init__(self, q: Tensor, k: Tensor, call: AttentionCall, mask: Tensor | None, b: int) -> None:
        self.S, self.mask, self.b, self.device = k.shape[2], mask, b, q.device
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.start = int(call.q_start[b]) if isinstance(call.q_start, Tensor) else call.q_start
        # The query at position p sees the keys from p - left to p + right, of which causal is one case.
        self.left, self.right = call.reach
        self.zones: dict[tuple[int, int, int], Zone] = {}  # along a diagonal all zones are alike

    def by_position(self, rows: slice) -> Seen:
        top, bottom = self.start + rows.start, self.start + rows.stop - 1  # positions of the first and last query
        keys = self._reach(top, bottom)
        # All rows see the middle; only the slanted ends need a mask.
        from_here = keys.start if self.left is None else max(bottom - self.left, keys.start)
        to_here = keys.stop if self.right is None else min(top + self.right + 1, keys.stop)
        ends = [slice(keys.start, from_here), slice(to_here, keys.stop)] if from_here < to_here else [keys]
        zones = tuple(self._zone(top, rows, end, keys.start) for end in ends if end.start < end.stop)
        ends_before = self.right is not None and top + self.right < 0
        begins_after = self.left is not None and bottom - self.left >= self.S
        return keys, zones, ends_before or begins_after

    def through_mask(self, heads: slice, rows: slice) -> Seen:
        assert self.mask is not None
        top, bottom = self.start + rows.start, self.start + rows.stop - 1
        keys = self._reach(top, bottom)
        seen = part(self.mask, self.b, heads, rows, keys)
        seen = seen != float("-inf") if seen.is_floating_point() else seen
        if self.left is not None or self.right is not None:
            seen = seen & self._in_window(top, rows, keys)
        seen = seen.expand(*seen.shape[:2], keys.stop - keys.start)  # (1 or heads, 1 or rows, keys)
        columns = seen.any(1).any(0).nonzero()
        if columns.shape[0] == 0:
            return slice(keys.start, keys.start), (), True
        low, high = int(columns[0]), int(columns[-1]) + 1
        seen = seen[..., low:high]
        found = slice(keys.start + low, keys.start + high)
        if bool(seen.all()):
            return found, (), False
        return found, (self._hiding(slice(0, high - low), ~seen),), not bool(seen.any(-1).all())

    def _reach(self, top: int, bottom: int) -> slice:
        first = 0 if self.left is None else min(max(top - self.left, 0), self.S)
        stop = self.S if self.right is None else min(bottom + self.right + 1, self.S)
        return slice(first, max(stop, first))

    def _zone(self, top: int, rows: slice, keys: slice, origin: int) -> Zone:
        relative = (rows.stop - rows.start, keys.start - top, keys.stop - top)
        if relative not in self.zones:
            self.zones[relative] = self._hiding(slice(0), ~self._in_window(top, rows, keys))
        return dataclasses.replace(self.zones[relative], keys=slice(keys.start - origin, keys.stop - origin))

    def _hiding(self, keys: slice, hidden: Tensor) -> Zone:
        endless = torch.full((), float("inf"), dtype=self.wide, device=self.device)
        return Zone(keys, hidden, torch.where(hidden, -endless, endless))

    def _in_window(self, top: int, rows: slice, keys: slice) -> Tensor:
        i = torch.arange(top, top + rows.stop - rows.start, device=self.device)[:, None]  # (rows, 1)
        j = torch.arange(keys.start, keys.stop, device=self.device)  # (keys,)
        seen = torch.ones(1, i.shape[0], j.shape[0], dtype=torch.bool, device=self.device)
        if self.left is not None:
            seen &= j >= i - self.left
        if self.right is not None:
            seen &= j <= i + self.right
        return seen
