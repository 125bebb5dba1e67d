"""Quantised caches: what they weigh, what they hold, and that both budgets of their judgement see what is wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import harness
from harness import Quantisation
from harness.cell import quantised as judging
from harness.cell.quantised import dequantised, judge_cache
from harness.variants import quantised
from harness.variants.quantised import QuantisedKVCache
from tests.support.attention import draw

B, HEADS, D, D_v = 2, 3, 16, 8
WAYS = [
    Quantisation(format, per, group, residual)
    for format in ("int8", "int4", "fp8")
    for per, group, residual in (("token", None, 0), ("token", 4, 3), ("channel", 5, 0), ("channel", 4, 6))
]
ways = pytest.mark.parametrize("how", WAYS, ids=lambda how: f"{how.format}-{how.per}-{how.group}-{how.residual}")


def streams(length: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    k, v = draw((B, HEADS, length, D), (B, HEADS, length, D_v), dtype=dtype, seed=seed)
    return k, v


@ways
@pytest.mark.parametrize("length", [1, 7, 24, 33, 64])
def test_bytes_are_the_formula_s(how: Quantisation, length: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        cache = QuantisedKVCache(length, how)
        cache.append(*streams(length, dtype))
        by_formula = B * HEADS * sum(how.stream_bytes(length, width, dtype.itemsize) for width in (D, D_v))
        assert cache.allocated_bytes == by_formula


@ways
def test_a_prompt_leaves_the_same_codes_however_it_comes(how: Quantisation) -> None:
    k, v = streams(29)
    whole, pieces, steps, grown = (QuantisedKVCache(size, how) for size in (29, 29, 29, 0))
    whole.append(k, v)
    for cache, cuts in ((pieces, [13, 3, 13]), (steps, [1] * 29), (grown, [2, 9, 1, 17])):
        for part in zip(k.split(cuts, dim=2), v.split(cuts, dim=2), strict=True):
            cache.append(*part)
        assert all(torch.equal(a, b) for a, b in zip(cache.streams(), whole.streams(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(cache.coded()[0].tensors, whole.coded()[0].tensors, strict=True))
    assert torch.equal(whole.streams()[0][:, :, 29 - how.residual :], k[:, :, 29 - how.residual :])


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_keeps_both_budgets(how: Quantisation, dtype: torch.dtype) -> None:
    q, k, v = draw((B, 2 * HEADS, 21, D), (B, HEADS, 21, D), (B, HEADS, 21, D_v), dtype=dtype)
    found = judge_cache(QuantisedKVCache(21, how), q, k, v, causal=True)
    assert found.passed
    assert found.contents_err > 0.5  # the bound is what happens, not far above it
    assert found.output_ratio > 0.1


def rolled_scales(coded: Any, how: Quantisation, dtype: torch.dtype) -> Tensor:
    return quantised_decode(coded._replace(scale=coded.scale.roll(1, dims=2)), how, dtype)


def swapped_halves(coded: Any, how: Quantisation, dtype: torch.dtype) -> Tensor:
    return quantised_decode(coded._replace(codes=coded.codes << 4 | coded.codes >> 4), how, dtype)


def no_least(coded: Any, how: Quantisation, dtype: torch.dtype) -> Tensor:
    return quantised_decode(coded._replace(least=torch.zeros_like(coded.least)), how, dtype)


quantised_decode, quantised_encode = quantised.decode, quantised.encode


def truncated(x: Tensor, how: Quantisation) -> Any:
    coded = quantised_encode(x, how)
    down = (
        coded.codes.int() - (decoded_error(x, coded, how) > 0).int()
    )  # towards the least value, instead of the nearest
    return coded._replace(codes=down.clamp(0).to(torch.uint8))


def decoded_error(x: Tensor, coded: Any, how: Quantisation) -> Tensor:
    return quantised_decode(coded, how, torch.float32) - x


def scale_of_whole_batch(x: Tensor, how: Quantisation) -> Any:
    largest = quantised_encode(x * torch.tensor([1.0, 4.0]).view(2, 1, 1, 1), how)  # a neighbour's outlier coarsens
    return quantised_encode(x, how)._replace(scale=largest.scale)


@pytest.mark.parametrize(
    ("part", "wrong", "format", "seen_by"),
    [
        ("decode", rolled_scales, "int8", "equality"),
        ("decode", swapped_halves, "int4", "equality"),
        ("decode", no_least, "int8", "equality"),
        ("encode", truncated, "int8", "contents"),
        ("encode", scale_of_whole_batch, "int8", "contents"),
    ],
)
def test_what_is_wrong_is_seen(
    monkeypatch: pytest.MonkeyPatch, part: str, wrong: Callable[..., Any], format: str, seen_by: str
) -> None:
    q, k, v = draw((B, HEADS, 9, D), (B, HEADS, 9, D), (B, HEADS, 9, D_v))
    how = Quantisation(format)
    assert judge_cache(QuantisedKVCache(9, how), q, k, v).passed
    if part == "decode":
        bound = quantised.step_bound  # by the right decoding, as the reference's
        monkeypatch.setattr(quantised, "step_bound", lambda *a: _with(quantised, "decode", quantised_decode, bound, a))
    monkeypatch.setattr(quantised, part, wrong)
    found = judge_cache(QuantisedKVCache(9, how), q, k, v)
    assert not found.passed
    assert found.contents_err > 1
    assert found.equality.passed == (seen_by == "contents")


def _with(module: Any, name: str, value: Any, function: Callable[..., Any], arguments: Any) -> Any:
    was = getattr(module, name)
    setattr(module, name, value)
    try:
        return function(*arguments)
    finally:
        setattr(module, name, was)


def test_the_reference_reads_fp8_from_its_bits() -> None:
    cache = QuantisedKVCache(6, Quantisation("fp8"))
    held = cache.append(*streams(6))
    for ours, theirs in zip(held, dequantised(cache), strict=True):
        assert torch.allclose(ours.double(), theirs, rtol=2e-7, atol=0)


def test_equal_numbers_and_zeros_are_kept_exactly() -> None:
    for format in ("int8", "int4", "fp8"):
        cache = QuantisedKVCache(4, Quantisation(format))
        ones = torch.full((1, 1, 4, 8), 448.0)
        held = cache.append(ones, torch.zeros(1, 1, 4, 8))
        assert torch.equal(held[0], ones) and not held[1].any()


def test_nan_spoils_its_own_token_alone() -> None:
    k, v = streams(5)
    k[0, 0, 2, 3] = float("nan")
    held, _ = QuantisedKVCache(5).append(k, v)
    assert held[0, 0, 2].isnan().all() and int(held.isnan().sum()) == D


def test_crop_forgets_and_goes_on() -> None:
    k, v = streams(20)
    for how in (Quantisation(), Quantisation(residual=4), Quantisation("int4", "channel", 4, 4)):
        cache, other = QuantisedKVCache(20, how), QuantisedKVCache(20, how)
        cache.append(k, v)
        cache.crop(12)
        cache.append(k[:, :, 12:15], v[:, :, 12:15])
        assert cache.length == 15
        other.append(k[:, :, :15], v[:, :, :15])
        assert torch.allclose(cache.streams()[0], other.streams()[0], atol=float(cache.error_bound()[0].max()))
    cache.append(k[:, :, :3], v[:, :, :3])
    with pytest.raises(ValueError, match="length = 10: the first 12 tokens are quantised in groups of 4"):
        cache.crop(10)


def test_errors_name_value_and_rule() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"format": "int3"}, "format = 'int3': must be one of int8, int4, fp8"),
        ({"per": "head"}, "per = 'head': must be one of token, channel"),
        ({"group": 0}, "group = 0: must be at least 1"),
        ({"residual": -1}, "residual = -1: must not be negative"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            Quantisation(**options)
    with pytest.raises(ValueError, match="group = 5: must divide the 16 channels"):
        QuantisedKVCache(4, Quantisation(group=5)).append(*streams(4))
    with pytest.raises(ValueError, match="no gradient"):
        QuantisedKVCache(4).append(*(t.requires_grad_() for t in streams(4)))


@pytest.mark.parametrize("attention_type", ["mha", "gqa-2", "mla", "mla_naive"])
@torch.no_grad()
def test_every_layer_takes_one(attention_type: str) -> None:
    """At 8 bits the output is near the plain cache's, and what was cached is what the layer made."""
    layer = harness.UnifiedAttention(32, 4, attention_type=attention_type).eval()
    x = draw((2, 12, 32))[0]
    plain, cache = layer.new_cache(12), layer.new_cache(12, quantised=Quantisation(group=2))
    assert isinstance(cache, QuantisedKVCache)
    expected = layer(x, causal=True, cache=plain)
    got = torch.cat([layer(part, causal=True, cache=cache) for part in x.split([8, 1, 3], dim=1)], dim=1)
    assert not torch.equal(got, expected)
    for held, exact, bound in zip(cache.streams(), plain.streams(), cache.error_bound(), strict=True):
        assert bool(((held - exact).abs() <= bound + 1e-6).all())
    assert torch.allclose(got, expected, atol=0.1)
    info = cache.get_cache_info()
    assert info["tokens"] == 12 and info["format"] == "int8" and info["allocated_bytes"] == cache.allocated_bytes
    assert info["full_precision_bytes"] == plain.allocated_bytes == plain.get_cache_info()["allocated_bytes"]


def test_the_bound_of_the_output_is_reached_up_to_a_small_factor_where_errors_conspire() -> None:
    """Keys and values moved to the ends of their bounds along the gradient: what happens is then near the bound."""
    q, k, v = (t.double() for t in draw((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 5)))
    of_k, of_v = torch.full_like(k, 1e-3), torch.full_like(v, 1e-3)
    leaves = [t.clone().requires_grad_() for t in (k, v)]
    out = harness.attention(q, *leaves)
    torch.autograd.backward(out[0, 0, 0, 0])
    worst = [t.detach() + 1e-3 * leaf.grad.sign() for t, leaf in zip((k, v), leaves, strict=True)]  # type: ignore[union-attr]
    moved = (harness.attention(q, *worst) - harness.attention(q, k, v))[0, 0, 0, 0]
    bound = judging.propagated(q, k, v, of_k, of_v)[0, 0, 0, 0]
    assert moved <= bound <= 1.05 * moved


def test_unlike_ways_are_unlike() -> None:
    how = Quantisation("int8", "token", None, 0)
    assert replace(how, format="int4").stream_bytes(32, 64, 2) < how.stream_bytes(32, 64, 2) < 32 * 64 * 2
