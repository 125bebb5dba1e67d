"""Encoder layers: torch's own through the swap, and the block around MLA."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harness
from harness.references.mla_block import MlaBlock
from harness.swaps.converters import SwapError
from harness.variants.blocks import EncoderLayer
from tests.support.attention import assert_same, by_sources, differentiated, draw_tokens, filled, make_case

E, H, FF, S, B = 24, 4, 40, 11, 3
tokens = functools.partial(draw_tokens, batch=B, length=S, width=E)
layers = pytest.mark.parametrize("norm_first", [False, True], ids=["post_ln", "pre_ln"])
activations = pytest.mark.parametrize("activation", ["relu", "gelu"])


@contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


def torch_layer(norm_first: bool, activation: str = "relu", **options: Any) -> nn.TransformerEncoderLayer:
    options = {"dropout": 0.0, "dtype": torch.float64, **options}
    layer = nn.TransformerEncoderLayer(
        E, H, dim_feedforward=FF, activation=activation, norm_first=norm_first, batch_first=True, **options
    )
    made: nn.TransformerEncoderLayer = filled(layer, options["dtype"])
    return made


def mla_block(**changes: Any) -> MlaBlock:
    sizes = {"embed_dim": E, "heads": H, "seq_len": S, "kv_lora_rank": 10, "rope_head_dim": 4, "v_head_dim": 5}
    block: MlaBlock = filled(MlaBlock(make_case("block_mla", **sizes | changes)))
    return block


def mask_pairs() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """torch's arguments (True = blocked) and ours (True = attends) for the same mask."""
    blocked = torch.ones(S, S, dtype=torch.bool).triu(1)
    padding = torch.arange(S) >= torch.tensor([[S], [7], [4]])
    bias = torch.randn(S, S, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    scattered = torch.rand(B, H, S, S, generator=torch.Generator().manual_seed(3)) < 0.3
    scattered &= ~torch.eye(S, dtype=torch.bool)  # no dead rows: there torch gives NaN
    seen = ~padding[:, None, None]
    return {
        "none": ({}, {}),
        "causal": ({"src_mask": blocked, "is_causal": True}, {"causal": True}),
        "bool": ({"src_mask": blocked}, {"mask": ~blocked}),
        "float": ({"src_mask": bias}, {"mask": bias}),
        "padding": ({"src_key_padding_mask": padding}, {"mask": seen}),
        "causal_padding": ({"src_mask": blocked, "src_key_padding_mask": padding}, {"mask": seen, "causal": True}),
        "per_head": ({"src_mask": scattered.flatten(0, 1)}, {"mask": ~scattered}),
        "window": ({"src_mask": blocked | blocked.mT.triu(-99).tril(-3)}, {"window": 3}),
    }


@layers
@activations
@pytest.mark.parametrize("mask", mask_pairs())
@pytest.mark.parametrize("fast", [True, False], ids=["fast_path", "slow_path"])
@torch.no_grad()
def test_swapped_layer_equals_torchs(norm_first: bool, activation: str, mask: str, fast: bool) -> None:
    theirs = torch_layer(norm_first, activation)
    ours, report = harness.swap(theirs, to="variant")
    assert isinstance(ours, EncoderLayer)
    assert (ours.norm_first, ours.activation) == (norm_first, activation)
    assert [row.was for row in report.swapped] == ["TransformerEncoderLayer"]
    torch_rules, rules = mask_pairs()[mask]
    if mask == "float":
        fast = False  # the next test says why

    def expected(x: Tensor) -> Any:
        with fast_path(fast):
            return theirs(x, **torch_rules)

    assert_same(functools.partial(ours, **rules), expected, tokens())


@layers
@torch.no_grad()
def test_torchs_fast_path_takes_a_float_mask_for_a_bool_one(norm_first: bool) -> None:
    """Whatever is not 0 is blocked: a bias is lost without a word. Ours adds it, as torch's slow path does."""
    theirs, x = torch_layer(norm_first), tokens()
    ours, _ = harness.swap(theirs, to="variant")
    bias = torch.zeros(S, S, dtype=torch.float64)
    bias[:, 2] = 0.5

    def run(fast: bool, mask: Tensor, x: Tensor) -> Any:
        with fast_path(fast):
            return theirs(x, src_mask=mask)

    assert_same(functools.partial(run, True, bias), functools.partial(run, True, bias != 0), x)
    assert_same(functools.partial(ours, mask=bias), functools.partial(run, False, bias), x)
    assert float((ours(x, mask=bias) - run(True, bias, x)).abs().max()) > 1e-3
    # A float mask of 0 and -inf alone means the same to both.
    causal = torch.zeros(S, S, dtype=torch.float64).masked_fill(torch.ones(S, S).triu(1) == 1, float("-inf"))
    assert_same(functools.partial(ours, mask=causal), functools.partial(run, True, causal), x)


@torch.no_grad()
def test_the_fast_path_really_ran_and_really_did_not() -> None:
    """Otherwise the two halves of the test above would be one."""
    layer, calls = torch_layer(False), []
    layer.self_attn.forward = lambda *a, **k: calls.append(1) or nn.MultiheadAttention.forward(layer.self_attn, *a, **k)  # type: ignore[method-assign,func-returns-value]
    with fast_path(True):
        layer(tokens())
    assert calls == []
    with fast_path(False):
        layer(tokens())
    assert calls == [1]


@layers
@activations
@pytest.mark.parametrize("mask", ["none", "causal_padding", "float"])
def test_gradients_equal_torchs(norm_first: bool, activation: str, mask: str) -> None:
    theirs = torch_layer(norm_first, activation)
    ours, report = harness.swap(theirs, to="variant")
    torch_rules, rules = mask_pairs()[mask]
    old, new, sources = dict(theirs.named_parameters()), dict(ours.named_parameters()), report.sources()
    assert sources.keys() == new.keys()
    cotangent = tokens(seed=4)
    expected = differentiated(functools.partial(theirs, **torch_rules), old, cotangent)
    actual = differentiated(functools.partial(ours, **rules), new, cotangent)
    assert_same(actual, lambda x: by_sources(expected(x), sources), tokens())


@layers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_equals_torchs_by_the_acceptance_rule(norm_first: bool, dtype: torch.dtype) -> None:
    theirs = torch_layer(norm_first, "gelu", dtype=dtype)
    ours, _ = harness.swap(theirs, to="variant")
    harness.assert_equivalent(ours, theirs, tokens(dtype), gradients=True)


def test_post_and_pre_ln_differ_and_the_order_is_as_named() -> None:
    post, _ = harness.swap(torch_layer(False), to="variant")
    pre, _ = harness.swap(torch_layer(True), to="variant")
    x = tokens()
    with torch.no_grad():
        assert float((post(x) - pre(x)).abs().max()) > 0.1
        out = post(x)
        # Post-LN ends in a LayerNorm: undone, every token has mean 0 and variance 1.
        norm: Any = post.norm2
        plain = (out - norm.bias) / norm.weight
        assert float(plain.mean(-1).abs().max()) <= 1e-12
        assert float((plain.var(-1, unbiased=False) - 1).abs().max()) <= 1e-3


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@layers
@torch.no_grad()
def test_bias_norm_eps_and_dropout_are_carried(norm_first: bool, bias: bool) -> None:
    theirs = torch_layer(norm_first, bias=bias, layer_norm_eps=0.3, dropout=0.4)
    ours: Any = harness.swap(theirs, to="variant")[0]
    assert (ours.norm1.eps, ours.norm2.eps) == (0.3, 0.3)
    assert (ours.dropout.p, ours.attention.dropout) == (0.4, 0.4)
    assert (ours.linear1.bias is not None) is bias
    assert_same(ours, theirs, tokens())  # eval: no dropout
    ours.train()
    torch.manual_seed(0)
    first = ours(tokens())
    assert float((first - theirs(tokens())).abs().max()) > 1e-2
    torch.manual_seed(0)
    assert torch.equal(ours(tokens()), first)


@pytest.mark.parametrize("attention_type", ["mha", "mqa", "gqa-2", "mla", "mla_naive", "mla_absorbed"])
@layers
@torch.no_grad()
def test_a_layer_around_any_variant_decodes_what_it_computes_in_full(attention_type: str, norm_first: bool) -> None:
    attention = harness.UnifiedAttention(E, H, attention_type=attention_type, dtype=torch.float64)
    layer = EncoderLayer(attention, E, FF, norm_first=norm_first, activation="gelu", dtype=torch.float64)
    filled(layer)

    def decoded(x: Tensor) -> Tensor:
        cache = attention.new_cache(S)
        return torch.cat([layer(piece, causal=True, cache=cache) for piece in x.split([6, 1, 3, 1], dim=1)], dim=1)

    assert_same(decoded, functools.partial(layer, causal=True), tokens())


# The MLA block.


@pytest.mark.parametrize("mode", ["naive", "absorbed", "auto"])
@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": 7}, {"bias": False}], ids=["plain", "q_lora", "no_bias"])
def test_mla_block_equals_its_reference(mode: str, changes: dict[str, Any]) -> None:
    theirs = mla_block(**changes)
    ours, report = harness.swap(theirs, to="variant", mode=mode)
    assert [row.became for row in report.swapped] == ["EncoderLayer"]
    inner: Any = ours.attention
    assert inner.mode == mode
    assert ours.norm_first
    seen = torch.arange(S) < torch.tensor([S, 7, 4])[:, None, None, None]
    causal = torch.ones(S, S, dtype=torch.bool).tril()
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"is_causal": True}, {"causal": True}),
        ({"attn_mask": seen & causal}, {"mask": seen, "causal": True}),
    ]
    old, new, cotangent = dict(theirs.named_parameters()), dict(ours.named_parameters()), tokens(seed=4)
    for reference_rules, rules in pairs:
        expected = differentiated(functools.partial(theirs, **reference_rules), old, cotangent)
        actual = differentiated(functools.partial(ours, **rules), new, cotangent)
        assert_same(actual, lambda x, run=expected: by_sources(run(x), report.sources()), tokens())


@pytest.mark.parametrize("mode", ["naive", "absorbed"])
def test_mla_block_by_the_acceptance_rule(mode: str) -> None:
    theirs = mla_block().float()
    ours, _ = harness.swap(theirs, to="variant", mode=mode)
    harness.assert_equivalent(ours, theirs, tokens(torch.float32), gradients=True)


@torch.no_grad()
def test_mla_block_as_formulas() -> None:
    block = mla_block()

    def formulas(x: Tensor) -> Tensor:
        middle = x + block.attn(F.layer_norm(x, (E,), block.attn_norm.weight, block.attn_norm.bias))
        normed = F.layer_norm(middle, (E,), block.mlp_norm.weight, block.mlp_norm.bias)
        return middle + block.down(F.gelu(block.up(normed)))

    assert_same(block, formulas, tokens())


# The comparison can fail.


@pytest.mark.parametrize("part", ["attention.v_proj", "linear1", "linear2", "norm1", "norm2"])
@torch.no_grad()
def test_one_wrong_weight_is_seen(part: str) -> None:
    theirs = torch_layer(True)
    ours, _ = harness.swap(theirs, to="variant")
    ours.get_submodule(part).weight[-1] *= 1.001  # type: ignore[operator,index]
    with pytest.raises(AssertionError):
        assert_same(ours, theirs, tokens())


def test_errors() -> None:
    attention = harness.MultiHeadAttention(E, H)
    with pytest.raises(ValueError, match="activation = 'swish': must be one of relu, gelu, silu, leaky_relu"):
        EncoderLayer(attention, E, FF, activation="swish")
    layer = torch_layer(True)
    layer.activation = torch.tanh
    with pytest.raises(SwapError, match="only relu and gelu are known"):
        harness.swap(layer, to="variant")


# The small public classes


@pytest.mark.parametrize(("activation", "function"), [("silu", F.silu), ("leaky_relu", F.leaky_relu)])
@layers
def test_other_activations_are_torch_s(activation: str, function: Any, norm_first: bool) -> None:
    """torch's layer takes any function, and its attention through the swap is GQA with as many heads."""
    theirs = torch_layer(norm_first, activation=function)
    grouped = harness.GroupedQueryAttention(E, H, H, bias=True, dtype=torch.float64)
    ours = harness.EncoderLayer(
        grouped, E, FF, norm_first=norm_first, activation=activation, dtype=torch.float64
    ).eval()
    named = {name.replace("attention.out_proj", "self_attn.out_proj"): p for name, p in ours.named_parameters()}
    with torch.no_grad(), fast_path(False):
        for number, part in enumerate(("q_proj", "k_proj", "v_proj")):
            for kind in ("weight", "bias"):
                packed = getattr(theirs.self_attn, f"in_proj_{kind}")
                named.pop(f"attention.{part}.{kind}").copy_(packed[number * E : (number + 1) * E])
        for name, p in named.items():
            p.copy_(theirs.get_parameter(name))
        assert_same(ours, theirs, tokens())


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_attention_inside_a_layer_is_its_attention_and_the_rest(kv_heads: int) -> None:
    layer = filled(harness.EncoderLayer(harness.GroupedQueryAttention(E, H, kv_heads), E, FF, activation="silu"))

    def by_hand(x: Tensor) -> Tensor:
        x = layer.norm1(x + layer.attention(x, causal=True))
        out: Tensor = layer.norm2(x + layer.linear2(F.silu(layer.linear1(x))))
        return out

    assert_same(lambda x: layer(x, causal=True), by_hand, tokens())


def test_mla_block_is_the_grid_s() -> None:
    theirs = mla_block(bias=False)
    ours, _ = harness.swap(theirs, to="variant")
    made = harness.MLABlock(E, H, kv_lora_rank=10, rope_head_dim=4, v_head_dim=5, bias=False, dtype=torch.float64)
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in ours.named_parameters()}
    made.load_state_dict(ours.state_dict())
    assert_same(made.eval(), theirs, tokens())


def test_scaled_dot_product_attention_is_torch_s() -> None:
    q, k, v = (torch.randn(B, heads, S, 8, dtype=torch.float64) for heads in (H, 2, 2))
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    core = harness.ScaledDotProductAttention(temperature=3.0, dropout=0.5).eval()

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1 / 3.0, enable_gqa=True)

    assert_same(lambda *t: core(*t, mask)[0], theirs, q, k, v)
    _, weights = core(q, k, v, mask)
    assert torch.allclose(weights.sum(-1), torch.ones(B, H, S, dtype=torch.float64))
    torch.manual_seed(0)
    dropped = core.train()(q, k, v, mask)[1]
    assert 0.3 < float((dropped[..., mask] == 0).double().mean()) < 0.7
    with pytest.raises(ValueError, match="temperature = 0: must be positive"):
        harness.ScaledDotProductAttention(temperature=0)
