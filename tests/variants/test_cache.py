"""The KV cache: what it holds, when it copies, what it occupies."""

import re

import pytest
import torch
from torch import Tensor

import harness
from harness.kernels.front import find_kernel
from harness.variants.cache import KVCache
from tests.support.allocations import allocations

B, HEADS, D, D_v = 2, 3, 4, 5


def tokens(count: int, *, first: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """k and v whose every value is the token's number, so that order and place can be read off."""
    number = torch.arange(first, first + count, dtype=dtype).view(1, 1, -1, 1)
    return number.expand(B, HEADS, count, D).clone(), -number.expand(B, HEADS, count, D_v).clone()


def numbers(stream: Tensor) -> list[int]:
    assert bool((stream == stream[:1, :1, :, :1]).all())  # the same in every batch row, head and channel
    return [int(x) for x in stream[0, 0, :, 0]]


def pointers(cache: KVCache) -> list[int]:
    return [stream.data_ptr() for stream in cache.streams()]


def test_a_new_cache_is_empty():
    cache = KVCache()
    assert cache.length == 0 and cache.streams() == () and cache.allocated_bytes == 0


def test_append_gives_all_tokens_so_far():
    cache = KVCache()
    for first, count in ((0, 3), (3, 1), (4, 2)):
        k, v = cache.append(*tokens(count, first=first))
        assert cache.length == first + count
        assert k.shape == (B, HEADS, cache.length, D) and v.shape == (B, HEADS, cache.length, D_v)
        assert numbers(k) == list(range(cache.length)) and numbers(-v) == numbers(k)
    assert [numbers(s) for s in cache.streams()] == [numbers(k), numbers(v)]


def test_one_stream_is_enough():
    cache = KVCache(4)
    (latent,) = cache.append(tokens(3)[0])
    assert numbers(latent) == [0, 1, 2] and cache.allocated_bytes == 4 * B * HEADS * 4 * D


def test_appending_nothing_changes_nothing():
    cache = KVCache(4)
    cache.append(*tokens(2))
    k, _ = cache.append(*tokens(0))
    assert cache.length == 2 and numbers(k) == [0, 1]


def test_within_its_capacity_nothing_is_copied():
    cache = KVCache(8)
    first = cache.append(*tokens(1))
    at, occupied = pointers(cache), cache.allocated_bytes
    for n in range(1, 8):
        cache.append(*tokens(1, first=n))
        assert pointers(cache) == at and cache.allocated_bytes == occupied
    assert cache.capacity == 8 and numbers(cache.streams()[0]) == list(range(8))
    assert numbers(first[0]) == [0]  # a view given out before still shows what it showed


def test_beyond_its_capacity_it_doubles():
    cache = KVCache(4)
    cache.append(*tokens(4))
    at = pointers(cache)
    cache.append(*tokens(1, first=4))
    assert cache.capacity == 8 and pointers(cache) != at
    assert numbers(cache.streams()[0]) == list(range(5))


def test_growth_is_seldom():
    cache = KVCache()
    places = set()
    for n in range(100):
        cache.append(*tokens(1, first=n))
        places.add(cache.capacity)
    assert places == {1, 2, 4, 8, 16, 32, 64, 128} and numbers(cache.streams()[0]) == list(range(100))


def test_growing_copies_each_token_once_or_twice_on_average():
    cache, steps, token = KVCache(), 130, tokens(1)
    written = sum(sum(allocations(lambda: cache.append(*token)).written) for _ in range(steps))
    assert steps * B * HEADS * (D + D_v) * 4 <= written <= 3 * steps * B * HEADS * (D + D_v) * 4


MODULES = {
    "gqa": harness.GroupedQueryAttention(32, 4, 2),
    "mla": harness.MultiHeadLatentAttention(
        32, 4, kv_lora_rank=16, nope_head_dim=8, rope_head_dim=4, v_head_dim=8, mode="absorbed"
    ),
}


@pytest.mark.parametrize("kernel", ["eager", "grouped"])
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_a_decode_step_writes_no_more_than_its_scores_and_its_token(module, kernel):
    """In bytes, counted: beyond the scores nothing of a step grows with what the cache holds."""

    def written(held: int) -> int:
        cache = module.new_cache(held + 1)
        with torch.no_grad():
            module(torch.randn(1, held, 32), causal=True, cache=cache)
        found = sum(allocations(lambda: module(torch.randn(1, 1, 32), causal=True, cache=cache)).written)
        assert cache.length == cache.capacity == held + 1
        return found

    module.kernel = find_kernel(kernel)
    written(1200)  # RoPE's table grows by doubling too: here it is long enough for what follows
    per_token = (written(1024) - written(256)) / (1024 - 256)
    scores = 4 * 4  # four heads, float32
    assert scores <= per_token <= 2 * scores < 4 * module.kv_elements_per_token()


def test_one_long_append_gets_the_room_that_it_needs():
    cache = KVCache(2)
    cache.append(*tokens(1))
    cache.append(*tokens(10, first=1))
    assert cache.capacity == 11 and numbers(cache.streams()[0]) == list(range(11))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_allocated_bytes_are_those_of_the_capacity(dtype):
    cache = KVCache(16)
    cache.append(*tokens(3, dtype=dtype))
    assert cache.allocated_bytes == 16 * B * HEADS * (D + D_v) * dtype.itemsize
    assert all(stream.dtype == dtype for stream in cache.streams())


def test_allocated_bytes_on_the_meta_device():
    cache = KVCache(16)
    k, _ = cache.append(*(t.to("meta") for t in tokens(3)))
    assert k.is_meta and cache.allocated_bytes == 16 * B * HEADS * (D + D_v) * 4


def test_the_cache_keeps_no_hold_on_what_was_appended():
    given = tokens(2)
    cache = KVCache()
    k, _ = cache.append(*given)
    given[0].zero_()
    assert numbers(k) == [0, 1]


def test_crop_forgets_the_end_and_keeps_the_room():
    cache = KVCache(8)
    cache.append(*tokens(6))
    at = pointers(cache)
    cache.crop(2)
    assert cache.length == 2 and numbers(cache.streams()[0]) == [0, 1]
    k, _ = cache.append(*tokens(1, first=77))
    assert numbers(k) == [0, 1, 77] and pointers(cache) == at


@pytest.mark.parametrize("length", [-1, 4])
def test_crop_beyond_what_is_held(length):
    cache = KVCache(8)
    cache.append(*tokens(3))
    with pytest.raises(ValueError, match=f"length = {length}: must be within 0 and the 3 tokens held"):
        cache.crop(length)
    assert cache.length == 3


def test_gradients_flow_through_every_append():
    cache = KVCache(8)
    parts = [tuple(t.requires_grad_() for t in tokens(count)) for count in (3, 1, 2)]
    for part in parts:
        k, v = cache.append(*part)
    assert k.requires_grad and cache.length == 6
    weight = torch.arange(6.0).view(1, 1, 6, 1)
    gradients = torch.autograd.grad((k * weight).sum() + v.sum(), [t for part in parts for t in part])
    expected = torch.cat(list(gradients[::2]), dim=2)
    torch.testing.assert_close(expected, weight.expand(B, HEADS, 6, D))
    assert all(bool((g == 1).all()) for g in gradients[1::2])


def test_gradients_after_a_prefix_without():
    cache = KVCache(8)
    with torch.no_grad():
        cache.append(*tokens(2))
    new = tuple(t.requires_grad_() for t in tokens(1, first=2))
    k, _ = cache.append(*new)
    assert numbers(k.detach()) == [0, 1, 2]
    (gradient,) = torch.autograd.grad(k.sum(), new[0])
    assert bool((gradient == 1).all())


def test_no_grad_after_gradients_leaves_the_graph_alone():
    cache = KVCache()
    leaf, v = (t.requires_grad_() for t in tokens(2))
    k, _ = cache.append(leaf, v)
    loss = k.pow(2).sum()
    with torch.no_grad():
        held, _ = cache.append(*tokens(1, first=2))
    assert numbers(held) == [0, 1, 2]
    torch.testing.assert_close(torch.autograd.grad(loss, leaf)[0], 2 * leaf.detach())


def test_with_gradients_on_but_none_wanted_it_writes_in_place():
    cache = KVCache(4)
    cache.append(*tokens(1))
    at = pointers(cache)
    cache.append(*tokens(1, first=1))
    assert pointers(cache) == at


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_appending_parameters_of_a_frozen_pass(mode):
    cache = KVCache(4)
    with mode():
        k, _ = cache.append(*(t.requires_grad_() for t in tokens(2)))
        at = pointers(cache)
        cache.append(*tokens(1, first=2))
    assert not k.requires_grad and pointers(cache) == at


k0, v0 = tokens(2)
MISFITS = {  # each would be broadcast or cast without a word
    "batch": ((k0[:1], v0[:1]), "stream (1, 3, 2, 4) torch.float32: must be (2, 3, 2, 4) torch.float32"),
    "heads": ((k0[:, :1], v0), "stream (2, 1, 2, 4) torch.float32: must be (2, 3, 2, 4) torch.float32"),
    "width": ((k0[..., :1], v0), "stream (2, 3, 2, 1) torch.float32: must be (2, 3, 2, 4) torch.float32"),
    "length": ((k0, v0[:, :, :1]), "stream (2, 3, 1, 5) torch.float32: must be (2, 3, 2, 5) torch.float32"),
    "dtype": ((k0.half(), v0.half()), "stream (2, 3, 2, 4) torch.float16: must be (2, 3, 2, 4) torch.float32"),
    "one stream": ((k0,), "1 streams: must be 2"),
    "three streams": ((k0, v0, v0), "3 streams: must be 2"),
    "none": ((), "0 streams: must be 2"),
}


@pytest.mark.parametrize(("streams", "message"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(streams, message):
    cache = KVCache(8)
    cache.append(*tokens(3))
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.append(*streams)
    assert cache.length == 3 and [numbers(s) for s in cache.streams()] == [[0, 1, 2], [0, -1, -2]]


def test_the_first_streams_must_be_of_one_length():
    with pytest.raises(ValueError, match=re.escape("stream (2, 3, 1, 5) torch.float32: must be (2, 3, 2, 5)")):
        KVCache().append(k0, v0[:, :, :1])


def test_an_append_of_nothing_at_all():
    with pytest.raises(ValueError, match="0 streams: must be at least 1"):
        KVCache().append()
