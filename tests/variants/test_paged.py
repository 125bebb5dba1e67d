"""Paged caches: the contiguous cache bit for bit, bytes as allocated, shared prefixes, copies on write, eviction."""

import pytest
import torch
from torch import Tensor

import harness
from harness.variants.cache import KVCache
from harness.variants.paged import PagedKVCache, PagePool, paged_bytes
from tests.support.attention import draw

B, HEADS, D, D_v = 2, 3, 4, 5
TOKEN_BYTES = HEADS * (D + D_v) * 4


def streams(length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    k, v = draw((B, HEADS, length, D), (B, HEADS, length, D_v), seed=seed)
    return k, v


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("page", [1, 3, 16])
@pytest.mark.parametrize("cuts", [[23], [1] * 23, [5, 1, 16, 1]], ids=str)
def test_it_gives_what_a_contiguous_cache_gives_bit_for_bit(page: int, cuts: list[int]) -> None:
    k, v = streams(23)
    paged, plain = PagedKVCache(PagePool(page=page)), KVCache()
    for part in zip(k.split(cuts, dim=2), v.split(cuts, dim=2), strict=True):
        assert same(paged.append(*part), plain.append(*part))
    paged.crop(7)
    plain.crop(7)
    more = streams(4, seed=1)
    assert same(paged.append(*more), plain.append(*more))


@pytest.mark.parametrize("attention_type", ["mha", "gqa-2", "mla", "mla_naive"])
@torch.no_grad()
def test_layers_give_the_same_bits(attention_type: str) -> None:
    layer = harness.UnifiedAttention(32, 4, attention_type=attention_type, kernel="eager").eval()
    x = draw((B, 21, 32))[0]
    paged, plain = PagedKVCache(PagePool(page=4)), layer.new_cache()
    for part in x.split([10, 1, 7, 1, 1, 1], dim=1):
        assert torch.equal(layer(part, causal=True, cache=paged), layer(part, causal=True, cache=plain))


@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 33])
def test_bytes_are_whole_pages(tokens: int) -> None:
    pool = PagePool(page=4)
    cache = PagedKVCache(pool)
    cache.append(*streams(tokens))
    assert cache.allocated_bytes == B * paged_bytes(tokens, page=4, token_bytes=TOKEN_BYTES)
    exact = PagePool(2 * -(-tokens // 4), page=4)
    PagedKVCache(exact).append(*streams(tokens))
    assert exact.allocated_bytes == cache.allocated_bytes  # room for as many pages, and no more


def test_a_fork_shares_the_prefix_until_it_writes() -> None:
    pool = PagePool(page=4)
    first = PagedKVCache(pool)
    k, v = streams(10)
    first.append(k, v)
    in_use = pool.pages_in_use
    second = first.fork()
    assert pool.pages_in_use == in_use and second.get_cache_info()["shared_pages"] == 2 * 3
    more, other = streams(3, seed=1), streams(3, seed=2)
    second.append(*more)  # into the last page, not full: a copy of it, and a new one, for each of two sequences
    assert pool.pages_in_use == in_use + 2 * 2
    assert same(first.streams(), (k, v))
    first.append(*other)
    for cache, tail in ((first, other), (second, more)):
        expected = tuple(torch.cat(pair, dim=2) for pair in zip((k, v), tail, strict=True))
        assert same(cache.streams(), expected)
    second.free()
    first.free()
    assert pool.pages_in_use == 0


def test_eviction_gives_back_what_no_window_sees() -> None:
    layer = harness.UnifiedAttention(32, 4, attention_type="gqa-2", kernel="eager").eval()
    x, pool = draw((1, 40, 32))[0], PagePool(page=4)
    paged, plain, window = PagedKVCache(pool), layer.new_cache(), 6
    with torch.no_grad():
        for step in x.split(1, dim=1):
            ours = layer(step, causal=True, window=window, cache=paged)
            theirs = layer(step, causal=True, window=window, cache=plain)
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)  # hidden keys are not even summed here
            paged.evict(window)
            assert paged.held >= min(paged.length, window) and pool.pages_in_use <= 3
    assert paged.length == 40 and paged.evicted == 32
    with pytest.raises(ValueError, match="length = 20: must be within 32 and the 40 tokens held"):
        paged.crop(20)


def test_errors_and_what_a_broken_table_would_do() -> None:
    with pytest.raises(ValueError, match="no gradient"):
        PagedKVCache().append(*(t.requires_grad_() for t in streams(2)))
    cache = PagedKVCache(PagePool(page=4))
    k, v = streams(9)
    cache.append(k, v)
    with pytest.raises(ValueError, match="like what it joins"):
        cache.append(k[:, :1], v)
    cache.table[0][0], cache.table[0][1] = cache.table[0][1], cache.table[0][0]
    assert not same(cache.streams(), (k, v))
    cache.table[0] = cache.table[1]  # not indexed by the batch
    assert not same(cache.streams(), (k, v))
