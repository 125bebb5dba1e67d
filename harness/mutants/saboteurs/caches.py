"""Wrong KV caches. A row that is wrong shows only where a decoded query may see it."""

from functools import partial

import torch
from torch import Tensor

from harness.case import Case
from harness.cell.build import Pair
from harness.mutants.saboteurs.reach import both, context, decoded, keeps_values, visible
from harness.mutants.saboteurs.saboteur import in_class
from harness.variants.cache import KVCache
from harness.variants.specs import VARIANTS

PAGE = 64


def _cache_in(pair: Pair, wrong: type[KVCache]) -> None:
    """Nothing where the variant keeps no cache, or one of another kind."""
    if pair.candidate.new_cache is not None and VARIANTS[pair.case.variant].core == "softmax":
        # The class itself, not a closure: a float32 copy of the candidate makes the same caches.
        pair.candidate.module.new_cache = wrong  # type: ignore[assignment]


in_cache = partial(in_class, _cache_in)


class _AtSteps(KVCache):
    """Other than a right one when a single token comes behind others: in what it writes, or in what it gives."""

    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        if not self.length or streams[0].shape[2] > 1:
            return super().append(*streams)
        return self.given(super().append(*self.written(streams)))

    def written(self, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return streams

    def given(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return held


def _decode_sees(case: Case, keys: Tensor) -> bool:
    """`keys`: (S,) or (S, S), True where the row of a decoded query finds something wrong at a key."""
    rows = decoded(case)[:, None]
    return bool((visible(case) & rows & keys).any())


def _sees_decoded_rows(case: Case) -> bool:
    return _decode_sees(case, decoded(case))


@in_cache("cache_row_stale", applies=_sees_decoded_rows)
class _StaleRow(_AtSteps):
    """The length grows, the new row is not written: what was there before is read."""

    def written(self, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(held[:, :, -1:].clone() for held in self.streams())


@in_cache("cache_keeps_keys_without_values", applies=both(keeps_values, _sees_decoded_rows))
class _StaleValues(_AtSteps):
    """The new key is written, the new value is not."""

    def written(self, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return streams[:1] + tuple(held[:, :, -1:].clone() for held in self.streams()[1:])


def _sees_overwritten_rows(case: Case) -> bool:
    at = torch.arange(case.seq_len)
    return _decode_sees(case, (at >= context(case) - 1) & (at < at[:, None]))


@in_cache("cache_write_off_by_one", applies=_sees_overwritten_rows)
class _WritesOneEarly(_AtSteps):
    """Each new token also overwrites the row before its own."""

    def given(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for stream in held:
            stream[:, :, -2] = stream[:, :, -1]
        return held


def _sees_partial_page(case: Case) -> bool:
    at = torch.arange(case.seq_len)
    return _decode_sees(case, at >= (at[:, None] + 1) // PAGE * PAGE)


@in_cache("cache_truncated_at_page", applies=_sees_partial_page)
class _FullPagesOnly(_AtSteps):
    """A paged cache whose last page, not yet full, is not read: its rows are 0."""

    def given(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        in_full_page = torch.arange(self.length, device=held[0].device)[:, None] < self.length // PAGE * PAGE
        return tuple(torch.where(in_full_page, stream, 0) for stream in held)


def _sees_reversed_values(case: Case) -> bool:
    if case.phase != "decode" or not keeps_values(case):
        return False
    prefilled, at = context(case), torch.arange(case.seq_len)
    return bool((visible(case) & (at < prefilled) & (2 * at != prefilled - 1)).any())


@in_cache("cache_appends_values_reversed", applies=_sees_reversed_values)
class _ReversedValues(KVCache):
    """The values of a prompt are stored last to first, its keys first to last."""

    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        return super().append(*streams) if len(streams) == 1 else super().append(streams[0], streams[1].flip(2))


@in_cache(
    "cache_grows_one_row_short",
    applies=lambda case: _decode_sees(case, torch.arange(case.seq_len) == context(case) - 1),
)
class _GrowsShort(KVCache):
    """Growing behind the prompt copies one row too few."""

    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        held = super().append(*streams)
        if streams[0].shape[2] > 1 or self.length == 1:
            self._grown = False
        elif not self._grown:
            self._grown = True
            for stream in held:
                stream[:, :, -2] = 0
        return held


@in_cache("cache_of_first_in_batch", applies=lambda case: bool((visible(case)[1:].any(-1) & decoded(case)).any()))
class _FirstOfBatch(_AtSteps):
    """Every sequence of a batch reads the cache of the first: the page table is not indexed by the batch."""

    def given(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(stream[:1].expand_as(stream) for stream in held)


def _decodes_in_more_bits(case: Case) -> bool:
    return case.phase == "decode" and case.dtype != "bfloat16" and bool(visible(case).any())


@in_cache("cache_in_bfloat16", applies=_decodes_in_more_bits)
class _InBfloat16(KVCache):
    """Keys and values are rounded to bfloat16 on their way into the cache, whatever the model's dtype."""

    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        return super().append(*(stream.to(torch.bfloat16).to(stream.dtype) for stream in streams))
