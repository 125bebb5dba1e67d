"""Wrong KV caches. A row that is wrong shows only where a decoded query may see it."""

import torch
from torch import Tensor

from harness.case import Case
from harness.cell.build import Pair
from harness.mutants.saboteurs.reach import context, decoded, keeps_values, visible
from harness.mutants.saboteurs.saboteur import in_module
from harness.variants.cache import KVCache

PAGE = 64


def _cache_in(pair: Pair, wrong: type[KVCache]) -> None:
    """Nothing where the variant keeps no cache."""
    if pair.candidate.new_cache is not None:
        # The class itself, not a closure: a float32 copy of the candidate makes the same caches.
        pair.candidate.module.new_cache = wrong  # type: ignore[assignment]


def _decode_sees(case: Case, keys: Tensor) -> bool:
    """`keys`: (S,) or (S, S), True where the row of a decoded query finds something wrong at a key."""
    rows = decoded(case)[:, None]
    return bool((visible(case) & rows & keys).any())


def _sees_decoded_rows(case: Case) -> bool:
    return _decode_sees(case, decoded(case))


class _StaleRow(KVCache):
    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        if self.length and streams[0].shape[2] == 1:
            streams = tuple(held[:, :, -1:].clone() for held in self.streams())
        return super().append(*streams)


@in_module(applies=_sees_decoded_rows)
def cache_row_stale(pair: Pair) -> None:
    """The length grows, the new row is not written: what was there before is read."""
    _cache_in(pair, _StaleRow)


class _StaleValues(KVCache):
    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        if self.length and len(streams) == 2 and streams[0].shape[2] == 1:
            streams = (streams[0], self.streams()[1][:, :, -1:].clone())
        return super().append(*streams)


def _sees_decoded_values(case: Case) -> bool:
    return keeps_values(case) and _sees_decoded_rows(case)


@in_module(applies=_sees_decoded_values)
def cache_keeps_keys_without_values(pair: Pair) -> None:
    """The new key is written, the new value is not."""
    _cache_in(pair, _StaleValues)


class _WritesOneEarly(KVCache):
    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        held = super().append(*streams)
        if streams[0].shape[2] == 1 and self.length > 1:
            for stream, new in zip(held, streams, strict=True):
                stream[:, :, -2:-1] = new
        return held


def _sees_overwritten_rows(case: Case) -> bool:
    at = torch.arange(case.seq_len)
    return _decode_sees(case, (at >= context(case) - 1) & (at < at[:, None]))


@in_module(applies=_sees_overwritten_rows)
def cache_write_off_by_one(pair: Pair) -> None:
    """Each new token also overwrites the row before its own."""
    _cache_in(pair, _WritesOneEarly)


class _FullPagesOnly(KVCache):
    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        held = super().append(*streams)
        if streams[0].shape[2] > 1 or self.length == 1:
            return held
        in_full_page = torch.arange(self.length, device=held[0].device)[:, None] < self.length // PAGE * PAGE
        return tuple(torch.where(in_full_page, stream, 0) for stream in held)


def _sees_partial_page(case: Case) -> bool:
    at = torch.arange(case.seq_len)
    return _decode_sees(case, at >= (at[:, None] + 1) // PAGE * PAGE)


@in_module(applies=_sees_partial_page)
def cache_truncated_at_page(pair: Pair) -> None:
    """A paged cache whose last page, not yet full, is not read: its rows are 0."""
    _cache_in(pair, _FullPagesOnly)


class _ReversedValues(KVCache):
    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        return super().append(*streams) if len(streams) == 1 else super().append(streams[0], streams[1].flip(2))


def _sees_reversed_values(case: Case) -> bool:
    if case.phase != "decode" or not keeps_values(case):
        return False
    prefilled, at = context(case), torch.arange(case.seq_len)
    return bool((visible(case) & (at < prefilled) & (2 * at != prefilled - 1)).any())


@in_module(applies=_sees_reversed_values)
def cache_appends_values_reversed(pair: Pair) -> None:
    """The values of a prompt are stored last to first, its keys first to last."""
    _cache_in(pair, _ReversedValues)


class _GrowsShort(KVCache):
    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        held = super().append(*streams)
        if streams[0].shape[2] > 1 or self.length == 1:
            self._grown = False
        elif not self._grown:
            self._grown = True
            for stream in held:
                stream[:, :, -2] = 0
        return held


def _sees_last_prefilled_row(case: Case) -> bool:
    return _decode_sees(case, torch.arange(case.seq_len) == context(case) - 1)


@in_module(applies=_sees_last_prefilled_row)
def cache_grows_one_row_short(pair: Pair) -> None:
    """Growing behind the prompt copies one row too few."""
    _cache_in(pair, _GrowsShort)


class _FirstOfBatch(KVCache):
    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        held = super().append(*streams)
        if streams[0].shape[2] > 1 or self.length == 1:
            return held
        return tuple(stream[:1].expand_as(stream) for stream in held)


def _decodes_a_batch(case: Case) -> bool:
    return bool((visible(case)[1:].any(-1) & decoded(case)).any())


@in_module(applies=_decodes_a_batch)
def cache_of_first_in_batch(pair: Pair) -> None:
    """Every sequence of a batch reads the cache of the first: the page table is not indexed by the batch."""
    _cache_in(pair, _FirstOfBatch)


class _InBfloat16(KVCache):
    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        return super().append(*(stream.to(torch.bfloat16).to(stream.dtype) for stream in streams))


def _is_wider_than_bfloat16(case: Case) -> bool:
    return case.phase == "decode" and case.dtype != "bfloat16" and bool(visible(case).any())


@in_module(applies=_is_wider_than_bfloat16)
def cache_in_bfloat16(pair: Pair) -> None:
    """Keys and values are rounded to bfloat16 on their way into the cache, whatever the model's dtype."""
    _cache_in(pair, _InBfloat16)
