"""NaN and inf behind a mask never leak into outputs, weights or gradients; whoever sees them is told."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import harness
from harness.kernels.front import find_kernel

KERNELS = ["eager", "sdpa", "grouped", "tiled"]
B, H, H_kv, L, S, D, D_v = 2, 4, 2, 6, 20, 8, 5
BAD_KEY = 17
NAN, INF = float("nan"), float("inf")

KEEP = (torch.arange(S) != BAD_KEY).expand(B, 1, 1, S)
HIDING = {  # nobody sees BAD_KEY
    "bool": {"mask": KEEP},
    "bool 1-D": {"mask": KEEP[0, 0, 0]},
    "float": {"mask": torch.zeros(KEEP.shape).masked_fill(~KEEP, -INF)},
    "causal": {"causal": True, "q_start": BAD_KEY - L},
    "causal tensor": {"causal": True, "q_start": torch.tensor([BAD_KEY - L, 3])},
    "window": {"window": (2, 1), "q_start": 4},
    "mask and window": {"mask": KEEP, "window": 6},
}
HALF_HIDING = {  # the last query alone sees BAD_KEY
    "bool": {"mask": KEEP | (torch.arange(L)[:, None] == L - 1)},
    "float": {"mask": torch.zeros(L, S).index_put((torch.arange(L - 1), torch.tensor(BAD_KEY)), torch.tensor(-INF))},
    "causal": {"causal": True, "q_start": BAD_KEY - L + 1},
    "window": {"window": 3, "q_start": BAD_KEY - L + 1},
}


def qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, L, D), (B, H_kv, S, D), (B, H_kv, S, D_v)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def poisoned(name: str, bad: float, **where: Any) -> list[Tensor]:
    """q, k and v with `bad` in some channels of BAD_KEY in those that are named."""
    tensors = qkv(**where)
    for t, letter in zip(tensors[1:], "kv", strict=True):
        if letter in name:
            t[:, :, BAD_KEY, ::2] = bad
    return tensors


def gradients(tensors: list[Tensor], cotangent: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(harness.attention(*leaves, **options), leaves, cotangent)


def cotangent_for(queries: slice) -> Tensor:
    cotangent = torch.zeros(B, H, L, D_v)
    cotangent[:, :, queries] = torch.randn(cotangent[:, :, queries].shape, generator=torch.Generator().manual_seed(1))
    return cotangent


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["k", "v", "kv"])
@pytest.mark.parametrize("options", HIDING.values(), ids=HIDING)
def test_what_nobody_sees_changes_nothing(options, where, bad, kernel):
    clean, dirty = qkv(), poisoned(where, bad)
    expected = harness.attention(*clean, kernel=kernel, **options)
    torch.testing.assert_close(harness.attention(*dirty, kernel=kernel, **options), expected)
    cotangent = cotangent_for(slice(None))
    found = gradients(dirty, cotangent, kernel=kernel, **options)
    for ours, wanted in zip(found, gradients(clean, cotangent, kernel=kernel, **options), strict=True):
        torch.testing.assert_close(ours, wanted)
    assert bool((found[1][:, :, BAD_KEY] == 0).all()) and bool((found[2][:, :, BAD_KEY] == 0).all())


@pytest.mark.parametrize("options", HIDING.values(), ids=HIDING)
def test_weights_know_nothing_of_hidden_keys(options):
    _, expected = harness.attention(*qkv(), return_weights=True, **options)
    for where in ("k", "v"):
        _, weights = harness.attention(*poisoned(where, NAN), return_weights=True, **options)
        torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_dtype_is_shielded(kernel, dtype):
    expected = harness.attention(*qkv(dtype), mask=KEEP, kernel=kernel)
    found = harness.attention(*poisoned("kv", NAN, dtype=dtype), mask=KEEP, kernel=kernel)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("where", ["k", "v", "kv"])
@pytest.mark.parametrize("options", HALF_HIDING.values(), ids=HALF_HIDING)
def test_only_the_query_that_sees_it_is_spoilt(options, where, kernel):
    clean, dirty = qkv(), poisoned(where, NAN)
    expected = harness.attention(*clean, kernel=kernel, **options)
    others, last = slice(0, L - 1), slice(L - 1, L)
    for tensors in (dirty, [t.clone().requires_grad_() for t in dirty]):  # two ways through the shield
        out = harness.attention(*tensors, kernel=kernel, **options).detach()
        torch.testing.assert_close(out[:, :, others], expected[:, :, others])
        channels = slice(None) if "k" in where else slice(None, None, 2)  # a bad value spoils its own channel
        assert bool(out[:, :, last, channels].isnan().all())
        if where == "v":
            torch.testing.assert_close(out[:, :, last, 1::2], expected[:, :, last, 1::2])

    # A loss of the other queries has the gradients that it would have without the poison.
    found = gradients(dirty, cotangent_for(others), kernel=kernel, **options)
    wanted = gradients(clean, cotangent_for(others), kernel=kernel, **options)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    # And a loss of all gives the other queries theirs.
    everything = gradients(dirty, cotangent_for(slice(None)), kernel=kernel, **options)[0]
    wanted = gradients(clean, cotangent_for(slice(None)), kernel=kernel, **options)
    torch.testing.assert_close(everything[:, :, others], wanted[0][:, :, others])


def test_weights_of_the_query_that_sees_a_bad_key_are_not_finite():
    _, weights = harness.attention(*poisoned("k", NAN), causal=True, q_start=BAD_KEY - L + 1, return_weights=True)
    assert bool(weights[:, :, L - 1, : BAD_KEY + 1].isnan().all())
    assert bool(weights[:, :, : L - 1].isfinite().all())


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_a_mask_everybody_sees_it(kernel):
    assert bool(harness.attention(*poisoned("k", NAN), kernel=kernel).isnan().all())
    out = harness.attention(*poisoned("v", NAN), kernel=kernel)
    assert bool(out[..., ::2].isnan().all()) and bool(out[..., 1::2].isfinite().all())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize(
    "options",
    [
        {"mask": torch.arange(L)[:, None] >= 2},
        {"mask": torch.zeros(L, S).index_fill(0, torch.tensor([0, 1]), -INF)},
        {"causal": True, "q_start": -2},
        {"window": (1, 1), "q_start": torch.tensor([-3, -3])},
    ],
    ids=["bool", "float", "causal", "window"],
)
def test_dead_queries_may_hold_anything(options, bad, kernel):
    clean = qkv()
    dirty = [t.clone() for t in clean]
    dirty[0][:, :, :2, ::2] = bad
    out = harness.attention(*dirty, kernel=kernel, **options)
    assert bool((out[:, :, :2] == 0).all())
    torch.testing.assert_close(out, harness.attention(*clean, kernel=kernel, **options))
    cotangent = cotangent_for(slice(None))
    found = gradients(dirty, cotangent, kernel=kernel, **options)
    for ours, wanted in zip(found, gradients(clean, cotangent, kernel=kernel, **options), strict=True):
        torch.testing.assert_close(ours, wanted)
    assert bool((found[0][:, :, :2] == 0).all())


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bad_query_that_sees_something_spoils_itself_alone(kernel):
    clean = qkv()
    dirty = [clean[0].clone(), *clean[1:]]
    dirty[0][:, :, 3, 0] = NAN
    out = harness.attention(*dirty, mask=KEEP, kernel=kernel)
    expected = harness.attention(*clean, mask=KEEP, kernel=kernel)
    assert bool(out[:, :, 3].isnan().all())
    others = [i for i in range(L) if i != 3]
    torch.testing.assert_close(out[:, :, others], expected[:, :, others])


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_gradient_of_a_float_mask_is_shielded(kernel):
    def gradient(tensors: list[Tensor]) -> Tensor:
        bias = torch.zeros(L, S).masked_fill(~KEEP[0, 0], -INF).requires_grad_()
        out = harness.attention(*tensors, mask=bias, kernel=kernel)
        return torch.autograd.grad(out, bias, cotangent_for(slice(None)))[0]

    for where in ("k", "v", "kv"):
        torch.testing.assert_close(gradient(poisoned(where, NAN)), gradient(qkv()))


@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_so_large_that_their_sum_overflows_are_not_taken_for_bad(kernel):
    q, k, v = qkv()
    v = v.sign() * 3e38
    out = harness.attention(q.requires_grad_(), k, v, mask=KEEP, kernel=kernel)
    expected = harness.attention(q, k, v / 3e38, mask=KEEP, kernel=kernel)
    torch.testing.assert_close(out / 3e38, expected)


def test_compiled_code_is_shielded_without_a_look_at_the_data():
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return harness.attention(q, k, v, mask=KEEP)

    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager")
    torch.testing.assert_close(compiled(*poisoned("kv", NAN)), function(*qkv()))


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_the_shield_it_leaks(kernel):
    """So the tests above can fail: the same kernels, judged as they are."""
    bare = dataclasses.replace(find_kernel(kernel), shielded=False)
    out = harness.attention(*poisoned("v", NAN), mask=KEEP, kernel=bare)
    assert bool(out[..., ::2].isnan().all())
    found = gradients(poisoned("k", NAN), cotangent_for(slice(None)), mask=KEEP, kernel=bare)
    assert bool(found[0].isnan().any())
    dirty = qkv()
    dirty[0][:, :, 0] = NAN
    found = gradients(dirty, cotangent_for(slice(None)), mask=torch.arange(L)[:, None] > 0, kernel=bare)
    assert bool(found[1].isnan().any())
