"""The `grouped` kernel: equal to torch and to float64, and frugal with the cache that it reads."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import harness
from harness.kernels import grouped
from harness.kernels.eager import eager
from harness.kernels.names import FEW
from tests.support.allocations import allocations

INF = float("inf")


def cache_view(B: int, heads: int, S: int, D: int, *, layout: str, like: Tensor) -> Tensor:
    """(B, heads, S, D) as caches hand it out: dense, the head of a longer buffer, token-major, or a channel slice."""
    generator = torch.Generator().manual_seed(int(like.sum().abs() * 1000) + D)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(like.dtype)

    if layout == "buffer":
        return random(B, heads, S + 7, D)[:, :, :S]
    if layout == "tokens":
        return random(B, S, heads, D).transpose(1, 2)
    if layout == "channels":
        return random(B, heads, S, D + 3)[..., :D]
    return random(B, heads, S, D)


def draw(H: int, H_kv: int, L: int, S: int, **how: Any) -> list[Tensor]:
    B, D, D_v = how.get("B", 2), how.get("D", 8), how.get("D_v", 6)
    layout, dtype = how.get("layout", "buffer"), how.get("dtype", torch.float32)
    q = torch.randn(B, H, L, D, generator=torch.Generator().manual_seed(how.get("seed", 0))).to(dtype)
    k, v = (cache_view(B, H_kv, S, width, layout=layout, like=q) for width in (D, D_v))
    return [q, k, v]


def textbook(
    q: Tensor, k: Tensor, v: Tensor, *, allowed: Tensor | None, softcap: float | None, sinks: Tensor
) -> Tensor:
    """With repeated heads and the sink as a real column: nothing in common with the kernel. In the inputs' dtype."""
    G = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(G, dim=1), v.repeat_interleave(G, dim=1)
    scores = torch.einsum("bhld,bhsd->bhls", q, k) / q.shape[-1] ** 0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores if allowed is None else scores.masked_fill(~allowed, -INF)
    extra = sinks.to(q.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((extra, scores), dim=-1).softmax(-1)[..., 1:]
    return torch.einsum("bhls,bhsd->bhld", weights, v)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    found: Tensor = harness.attention(q, k, v, mask=mask, kernel="grouped")
    return found


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([(8, 8), (8, 2), (6, 3), (8, 1), (16, 1), (1, 1)]),
    L=st.integers(1, 5),
    S=st.integers(5, 90),
    B=st.integers(1, 3),
    layout=st.sampled_from(["dense", "buffer", "tokens", "channels"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from(["none", "bool", "float"]),
    seed=st.integers(0, 999),
)
def test_equal_to_sdpa_by_the_acceptance_rule(heads, L, S, B, layout, dtype, kind, seed):
    q, k, v = draw(heads[0], heads[1], L, S, B=B, layout=layout, dtype=dtype, seed=seed)
    mask = None
    if kind != "none":
        mask = torch.rand(B, 1, L, S, generator=torch.Generator().manual_seed(seed)) < 0.7
        mask[..., 0] = True
        mask = mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -INF).to(dtype)
    found = harness.check(lambda q, k, v: ours(q, k, v, mask), lambda q, k, v: sdpa(q, k, v, _as(mask, q)), (q, k, v))
    assert found.passed, found.table().to_string()
    # `check` clones its inputs densely; the view itself must give the very same.
    torch.testing.assert_close(ours(q, k, v, mask), ours(q, k.contiguous(), v.contiguous(), mask))


def _as(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)


@pytest.mark.parametrize("heads", [(8, 2), (16, 1)])  # K multiplies the queries, and the queries K
def test_both_orders_of_the_product(heads, monkeypatch):
    monkeypatch.setattr(grouped, "cache_bytes", lambda: 0)
    for layout in ("buffer", "tokens"):
        q, k, v = draw(heads[0], heads[1], 1, 300, layout=layout)
        harness.assert_equivalent(ours, sdpa, (q, k, v))
        torch.testing.assert_close(ours(q, k, v), sdpa(q, k, v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("S", [64, 65, 200])
def test_a_half_precision_cache_in_pieces(S, dtype, monkeypatch):
    monkeypatch.setattr(grouped, "PIECE_BYTES", 1)  # as many pieces as there can be
    q, k, v = draw(8, 2, 2, S, dtype=dtype)
    harness.assert_equivalent(ours, sdpa, (8 * q, 8 * k, v))  # large logits: half-precision scores would not do


RULES = {
    "causal": {"causal": True},
    "causal rows": {"causal": True, "q_start": torch.tensor([3, 11])},
    "window": {"window": 6},
    "window both sides": {"window": (4, 2), "q_start": 7},
}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_positions_softcap_and_sinks_against_float64(rules, softcap):
    q, k, v = draw(8, 2, 3, 20)
    sinks = torch.linspace(-1, 2, 8)
    start = torch.as_tensor(rules.get("q_start", 20 - 3)).view(-1, 1, 1, 1)
    i, j = start + torch.arange(3)[:, None], torch.arange(20)  # (1 or B, 1, L, 1), (S,)
    left, right = {"window": (5, 0), "window both sides": (4, 2)}.get(_name(rules), (99, 0))
    allowed = (j <= i + right) & (j >= i - left)
    options = {**rules, "softcap": softcap, "sinks": sinks, "kernel": "grouped"}
    harness.assert_equivalent(
        lambda q, k, v: harness.attention(q, k, v, **options),
        lambda q, k, v: textbook(q, k, v, allowed=allowed, softcap=softcap, sinks=sinks),
        (q, k, v),
        gradients=True,
    )


def _name(rules: dict[str, Any]) -> str:
    return next(name for name, value in RULES.items() if value is rules)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_against_sdpa(dtype):
    mask = torch.rand(2, 1, 2, 70, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 3] = True
    masked, expected = (functools.partial(function, mask=mask) for function in (ours, sdpa))
    harness.assert_equivalent(masked, expected, draw(8, 2, 2, 70, dtype=dtype), gradients=True)


def test_dead_rows_are_zero_and_hidden_nan_stays_hidden():
    q, k, v = draw(8, 2, 2, 20)
    mask = torch.ones(2, 1, 2, 20, dtype=torch.bool)
    mask[..., 5] = False
    mask[0, :, 1] = False
    clean = ours(q, k, v, mask)
    k[:, :, 5], v[:, :, 5] = float("nan"), INF
    out = ours(q, k, v, mask)
    assert bool((out[0, :, 1] == 0).all()) and bool(out.isfinite().all())
    torch.testing.assert_close(out, clean)


def test_weights_are_those_that_multiply_v():
    q, k, v = draw(8, 2, 2, 30)
    out, weights = harness.attention(q, k, v, causal=True, kernel="grouped", return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 8, 2))
    torch.testing.assert_close(weights @ v.repeat_interleave(4, dim=1), out)
    assert bool((weights[:, :, 0, 29] == 0).all())  # the first of two queries does not see the last key


@pytest.mark.parametrize("S", [512, 4096])
def test_no_copy_of_the_cache(S):
    """Every tensor that a step makes is of the size of the scores, however the cache lies in memory."""
    for layout in ("buffer", "tokens"):
        q, k, v = draw(8, 2, 1, S, D=32, D_v=32, layout=layout)
        made = allocations(lambda: ours(q, k, v)).made  # noqa: B023
        scores = 2 * 8 * S * 4
        assert made and max(made) <= scores < k.numel() * k.itemsize, layout


def test_a_half_precision_cache_is_never_widened_whole(monkeypatch):
    monkeypatch.setattr(grouped, "PIECE_BYTES", 1 << 16)
    q, k, v = draw(4, 2, 1, 4096, D=32, D_v=32, dtype=torch.bfloat16)
    made = allocations(lambda: ours(q, k, v)).made
    assert max(made) <= max(1 << 16, 2 * 4 * 4096 * 4) < k.numel() * 4


def test_many_rows_take_the_eager_lines(monkeypatch):
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return eager(*arguments)

    monkeypatch.setattr(grouped, "eager", counted)
    half = {"dtype": torch.bfloat16}
    few, many = draw(8, 2, FEW // 4, 40, **half), draw(8, 2, FEW // 4 + 1, 40, **half)
    ours(*few)
    assert not calls  # widened in pieces
    ours(*draw(8, 2, 1, 40, layout="tokens"))
    assert not calls  # eager would copy it
    assert torch.equal(ours(*many), harness.attention(*many, kernel="eager")) and len(calls) == 1
    ours(*draw(8, 2, 1, 40, layout="buffer"))
    assert len(calls) == 2  # eager reads it where it lies


def test_no_keys_and_no_queries():
    q, k, v = draw(4, 2, 1, 0)
    assert torch.equal(ours(q, k, v), torch.zeros(2, 4, 1, 6))
    q, k, v = draw(4, 2, 0, 9)
    assert ours(q, k, v).shape == (2, 4, 0, 6)
    q, k, v = (t.to(torch.bfloat16) for t in draw(4, 2, 1, 0))
    assert torch.equal(ours(q, k, v), torch.zeros(2, 4, 1, 6, dtype=torch.bfloat16))
