"""MLA: naive = absorbed = auto = transformers' DeepseekV3Attention, and what the cache holds."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from harness.variants.mla import MultiHeadLatentAttention
from tests.support.attention import assert_same, differentiated, draw_tokens, filled

E, H, S, B = 48, 4, 40, 2
R_KV, NOPE, PE, V = 32, 16, 8, 12
SIZES: dict[str, Any] = {"kv_lora_rank": R_KV, "nope_head_dim": NOPE, "rope_head_dim": PE, "v_head_dim": V}
tokens = functools.partial(draw_tokens, batch=B, length=S, width=E)
MODES = ("naive", "absorbed", "auto")
modes = pytest.mark.parametrize("mode", MODES)
query_ranks = pytest.mark.parametrize("q_rank", [None, 24], ids=["q", "q_lora"])

NAMES = {  # ours -> transformers'
    "q_a_norm": "q_a_layernorm",
    "kv_a_norm": "kv_a_layernorm",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "out_proj": "o_proj",
}


def ours(mode: str, *, bias: bool = False, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    options = SIZES | options
    module = MultiHeadLatentAttention(E, H, mode=mode, bias=bias, **options)  # type: ignore[arg-type]
    return filled(module, dtype, seed=2)


class Theirs(nn.Module):
    """transformers' attention, called with x alone: it makes its own positions, mask and, for decode, cache.

    `exact` takes out what transformers always does in float32 (the norms, the angles), to compare in float64.
    """

    def __init__(self, q_rank: int | None, *, interleave: bool = True, exact: bool = False) -> None:
        super().__init__()
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
            DeepseekV3Attention,
            DeepseekV3RotaryEmbedding,
        )

        config = DeepseekV3Config(
            hidden_size=E,
            num_attention_heads=H,
            num_key_value_heads=H,
            q_lora_rank=q_rank,
            kv_lora_rank=R_KV,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=PE,
            v_head_dim=V,
            num_hidden_layers=1,
            vocab_size=8,
            max_position_embeddings=256,
        )
        assert config.rope_interleave is True  # transformers' default, DeepSeek's layout
        config.rope_interleave = interleave
        config._attn_implementation = "sdpa"  # its eager softmax is float32, whatever the dtype
        self.attention = DeepseekV3Attention(config, layer_idx=0)
        self.rotary = DeepseekV3RotaryEmbedding(config)
        self.exact = exact
        self.steps: list[int] | None = None
        self.eval()

    def load(self, module: MultiHeadLatentAttention) -> "Theirs":
        self.to(module.out_proj.weight.dtype)  # before the weights: float32 would round those of float64
        state = {}
        for key, value in module.state_dict().items():
            part, _, kind = key.partition(".")
            state[f"{NAMES.get(part, part)}.{kind}"] = value
        self.attention.load_state_dict(state)  # strict: every weight has its place on both sides
        if self.exact:
            for name in ("q_a_layernorm", "kv_a_layernorm"):
                if (norm := getattr(self.attention, name)) is not None:
                    exact = nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=norm.weight.dtype)
                    exact.load_state_dict(norm.state_dict())
                    setattr(self.attention, name, exact)
        return self

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        length = x.shape[1]
        if not self.exact:
            cos, sin = self.rotary(x, torch.arange(length)[None])
            return cos, sin
        frequencies = 10_000.0 ** (-torch.arange(0, PE, 2, dtype=torch.float64) / PE)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        both = torch.cat((angles, angles), dim=-1)[None]
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        from transformers import DynamicCache

        length = x.shape[1]
        cos, sin = self.angles(x)
        causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        self.cache = DynamicCache()
        start, parts = 0, []
        for size in self.steps or [length]:
            rows = slice(start, start + size)
            mask = causal[:, :, rows, : rows.stop]
            out, _ = self.attention(
                x[:, rows], (cos[:, rows], sin[:, rows]), mask, past_key_values=self.cache if self.steps else None
            )
            parts.append(out)
            start += size
        return torch.cat(parts, dim=1)


class Decoded(nn.Module):
    """Ours, prefilled and then fed token by token."""

    def __init__(self, module: Any, prefill: int) -> None:
        super().__init__()
        self.module, self.prefill = module, prefill

    def forward(self, x: Tensor) -> Tensor:
        self.cache = self.module.new_cache(x.shape[1])
        rest = [1] * (x.shape[1] - self.prefill)
        pieces = x.split([self.prefill, *rest], dim=1)
        return torch.cat([self.module(piece, causal=True, cache=self.cache) for piece in pieces], dim=1)


class Causal(nn.Module):
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x, causal=True)
        return out


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


# Three ways and transformers' one.


@query_ranks
@modes
@torch.no_grad()
def test_equals_transformers_in_float64(mode: str, q_rank: int | None) -> None:
    module, x = ours(mode, q_lora_rank=q_rank), tokens()
    whole, theirs = (Theirs(q_rank, exact=True).load(module) for _ in range(2))
    theirs.steps = [29] + [1] * (S - 29)
    # The last is transformers' own decode, from its own cache of latents.
    for candidate in (Causal(module), Decoded(module, prefill=29), theirs):
        assert_same(candidate, whole, x)
    assert_same(Decoded(module, prefill=1), theirs, x)


@query_ranks
@modes
def test_gradients_equal_transformers_in_float64(mode: str, q_rank: int | None) -> None:
    module, x = ours(mode, q_lora_rank=q_rank), tokens()
    theirs = Theirs(q_rank, exact=True).load(module)
    parameters, their_parameters = dict(module.named_parameters()), dict(theirs.attention.named_parameters())
    matching = {}
    for key in parameters:
        part, _, kind = key.partition(".")
        matching[key] = their_parameters[f"{NAMES.get(part, part)}.{kind}"]
    cotangent = tokens(seed=3)
    assert_same(differentiated(Causal(module), parameters, cotangent), differentiated(theirs, matching, cotangent), x)


@query_ranks
@modes
@torch.no_grad()
def test_equals_transformers_as_shipped_up_to_its_float32_parts(mode: str, q_rank: int | None) -> None:
    """In float64 too transformers norms and takes angles in float32: that alone is the difference."""
    module, x = ours(mode, q_lora_rank=q_rank), tokens()
    found = difference(module(x, causal=True), Theirs(q_rank).load(module)(x))
    assert 1e-9 < found <= 1e-5


@query_ranks
@modes
def test_equals_transformers_in_float32_by_the_acceptance_rule(mode: str, q_rank: int | None) -> None:
    module, x = ours(mode, q_lora_rank=q_rank, dtype=torch.float32), tokens(torch.float32)
    theirs = Theirs(q_rank, exact=True).load(module)
    harness.assert_equivalent(Causal(module), theirs, x, gradients=True)
    theirs.steps = [29] + [1] * (S - 29)
    harness.assert_equivalent(Decoded(module, prefill=29), theirs, x)


@query_ranks
@modes
def test_judged_beside_transformers_as_shipped(mode: str, q_rank: int | None) -> None:
    """The other way round: against our float32 naive module, transformers' own one passes the same rule."""
    module, x = ours(mode, q_lora_rank=q_rank, dtype=torch.float32), tokens(torch.float32)
    naive = ours("naive", q_lora_rank=q_rank, dtype=torch.float32)
    harness.assert_equivalent(Theirs(q_rank).load(module), Causal(naive), x)


@query_ranks
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_the_three_modes_are_one_function_with_the_same_gradients(q_rank: int | None, bias: bool) -> None:
    x, cotangent, found = tokens(), tokens(seed=3), {}
    for mode in MODES:
        module = ours(mode, bias=bias, q_lora_rank=q_rank)
        found[mode] = differentiated(Causal(module), dict(module.named_parameters()), cotangent)
    for mode in ("absorbed", "auto"):
        assert_same(found[mode], found["naive"], x)


@query_ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_absorbed_equals_naive_by_the_acceptance_rule(q_rank: int | None, dtype: torch.dtype) -> None:
    naive, absorbed = (Causal(ours(mode, bias=True, q_lora_rank=q_rank, dtype=dtype)) for mode in ("naive", "absorbed"))
    harness.assert_equivalent(absorbed, naive, tokens(dtype))


# The decompressor's bias.


@pytest.mark.parametrize("rules", ["full", "causal", "window", "bool", "float", "padding"])
@torch.no_grad()
def test_absorbed_restores_the_value_bias_and_only_where_a_row_attends(rules: str) -> None:
    generator = torch.Generator().manual_seed(4)
    dead = torch.rand(B, H, S, S, generator=generator) < 0.4
    dead[0, 1, 5] = dead[1, :, 7] = False  # rows that may attend nothing
    given: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"causal": True},
        "window": {"window": (3, 2)},
        "bool": {"mask": dead},
        "float": {"mask": torch.zeros(B, H, S, S).double().masked_fill(~dead, float("-inf"))},
        "padding": {"mask": torch.arange(S) >= torch.tensor([0, 6])[:, None, None, None], "causal": True},
    }
    naive, absorbed, x = ours("naive", bias=True), ours("absorbed", bias=True), tokens()
    assert_same(functools.partial(absorbed, **given[rules]), functools.partial(naive, **given[rules]), x)
    if rules in ("bool", "float"):
        assert torch.equal(naive(x, **given[rules])[1, 7], naive.out_proj.bias)  # all heads dead: the output's bias
    if rules == "padding":
        assert torch.equal(absorbed(x, **given[rules])[1, :6], naive.out_proj.bias.expand(6, E))


def break_value_bias(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any]) -> None:
    monkeypatch.setattr(MultiHeadLatentAttention, "_value_bias", wrong)


@torch.no_grad()
def test_dropping_the_value_bias_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: what the documents' absorb forgot is an error of tens of percent."""
    naive, absorbed, x = ours("naive", bias=True), ours("absorbed", bias=True), tokens()
    expected = naive(x, causal=True)
    break_value_bias(monkeypatch, lambda self, q, latent, rules: torch.zeros((), dtype=q.dtype))
    wrong = absorbed(x, causal=True)
    assert difference(wrong, expected) > 0.1 * float(expected.abs().max())
    found = harness.check(Causal(absorbed), Causal(naive), x.float().double())
    assert found.status == "mismatch"


@torch.no_grad()
def test_giving_dead_rows_the_value_bias_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    naive, absorbed, x = ours("naive", bias=True), ours("absorbed", bias=True), tokens()
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    mask[3] = False
    assert_same(functools.partial(absorbed, mask=mask), functools.partial(naive, mask=mask), x)
    everywhere = absorbed.kv_b_proj.bias.view(H, 1, -1)[..., NOPE:]
    break_value_bias(monkeypatch, lambda self, q, latent, rules: everywhere)
    assert difference(absorbed(x, mask=mask)[:, 3], naive(x, mask=mask)[:, 3]) > 0.1


@torch.no_grad()
def test_the_key_bias_never_matters() -> None:
    """It shifts all scores of a query alike."""
    module, x = ours("naive", bias=True), tokens()
    moved = copy.deepcopy(module)
    moved.kv_b_proj.bias.view(H, -1)[:, :NOPE] += 1.0
    assert_same(Causal(moved), Causal(module), x)
    moved.kv_b_proj.bias.view(H, -1)[:, NOPE:] += 1.0
    assert difference(moved(x, causal=True), module(x, causal=True)) > 0.1


@torch.no_grad()
def test_the_scale_is_that_of_the_expanded_head_not_of_the_latent() -> None:
    module, x = ours("absorbed"), tokens()
    assert module.scale == (NOPE + PE) ** -0.5
    expected = module(x, causal=True)
    module.scale = (R_KV + PE) ** -0.5
    assert difference(module(x, causal=True), expected) > 1e-3


# Positions.


@query_ranks
@modes
@torch.no_grad()
def test_half_split_rotation_of_interleaved_weights_is_wrong_until_they_are_permuted(
    mode: str, q_rank: int | None
) -> None:
    module, x = ours(mode, q_lora_rank=q_rank), tokens()
    halves = Theirs(q_rank, interleave=False, exact=True).load(module)
    expected = module(x, causal=True)
    assert difference(halves(x), expected) > 0.01
    # Evens then odds, in the rope rows of q and of kv_a: now channel i and i + R/2 are a pair.
    order = torch.cat((torch.arange(0, PE, 2), torch.arange(1, PE, 2)))
    q = halves.attention.q_proj if q_rank is None else halves.attention.q_b_proj
    rows = q.weight.view(H, NOPE + PE, -1)
    rows[:, NOPE:] = rows[:, NOPE:][:, order].clone()
    kv_a = halves.attention.kv_a_proj_with_mqa.weight
    kv_a[R_KV:] = kv_a[R_KV:][order].clone()
    assert_same(halves, Causal(module), x)


@modes
@torch.no_grad()
def test_positions_matter_and_follow_the_cache(mode: str) -> None:
    module, x = ours(mode), tokens()

    def second(x: Tensor) -> Any:
        cache = module.new_cache()
        module(x[:, :7], causal=True, cache=cache)
        return module(x[:, 7:], causal=True, cache=cache)

    assert_same(second, lambda x: module(x, causal=True)[:, 7:], x)
    swapped = x.clone()
    swapped[:, [2, 5]] = x[:, [5, 2]]
    assert difference(module(swapped)[:, -1], module(x)[:, -1]) > 1e-3  # without positions these would be equal


# What the cache holds.


@pytest.mark.parametrize("mode", ["absorbed", "auto"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_the_latent_cache_holds_r_plus_rope_elements_per_token(mode: str, dtype: torch.dtype) -> None:
    module, x = ours(mode, dtype=dtype), tokens(dtype)
    decoded = Decoded(module, prefill=9)
    decoded(x)
    (stream,) = decoded.cache.streams()
    assert stream.shape == (B, 1, S, R_KV + PE)
    assert stream.numel() == B * S * module.kv_elements_per_token()
    assert decoded.cache.allocated_bytes == B * S * (R_KV + PE) * stream.element_size()


@torch.no_grad()
def test_the_naive_cache_holds_expanded_heads() -> None:
    decoded = Decoded(ours("naive"), prefill=9)
    decoded(tokens())
    k, v = decoded.cache.streams()
    assert k.shape == (B, H, S, NOPE + PE)
    assert v.shape == (B, H, S, V)
    assert decoded.cache.allocated_bytes == B * S * H * (NOPE + PE + V) * 8
    assert decoded.module.kv_elements_per_token() == H * (NOPE + PE + V)


@torch.no_grad()
def test_the_cached_latents_are_transformers_latents() -> None:
    """Normed latent and rotated k_pe. transformers keeps them de-interleaved: evens, then odds."""
    module, x = ours("absorbed", q_lora_rank=24), tokens()
    theirs, decoded = Theirs(24, exact=True).load(module), Decoded(module, prefill=5)
    theirs.steps = [S]

    def their_cache(x: Tensor) -> tuple[Tensor, Tensor]:
        theirs(x)
        layer = theirs.cache.layers[0]
        return layer.keys, layer.values

    def our_cache(x: Tensor) -> tuple[Tensor, Tensor]:
        decoded(x)
        (stream,) = decoded.cache.streams()
        latent, pe = stream[..., :R_KV], stream[..., R_KV:]
        return latent, torch.cat((pe[..., 0::2], pe[..., 1::2]), dim=-1)

    assert_same(our_cache, their_cache, x)
    assert sum(t.shape[-1] for t in their_cache(x)) == module.kv_elements_per_token()


# The cost model.


def spy_on_absorbing(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(queries, keys) of each call that absorbed."""
    seen: list[tuple[int, int]] = []
    original = MultiHeadLatentAttention._attend_latents

    def spy(self: Any, q_nope: Tensor, q_pe: Tensor, latent: Tensor, rules: dict[str, Any]) -> Any:
        seen.append((q_nope.shape[2], latent.shape[2]))
        return original(self, q_nope, q_pe, latent, rules)

    monkeypatch.setattr(MultiHeadLatentAttention, "_attend_latents", spy)
    return seen


@torch.no_grad()
def test_auto_absorbs_decode_and_not_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ours("auto")
    seen = spy_on_absorbing(monkeypatch)
    x, cache = tokens(length=200), module.new_cache(200)
    module(x[:, :199], causal=True, cache=cache)
    assert seen == []
    module(x[:, 199:], causal=True, cache=cache)
    assert seen == [(1, 200)]
    assert_same(Decoded(module, prefill=199), Causal(ours("naive")), x)


def test_auto_takes_the_cheaper_way_at_the_size_of_deepseek_v3(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"kv_lora_rank": 512, "nope_head_dim": 128, "rope_head_dim": 64, "v_head_dim": 128}
    module = MultiHeadLatentAttention(7168, 128, q_lora_rank=1536, device="meta", **options)
    seen = spy_on_absorbing(monkeypatch)
    cache = module.new_cache(8192)
    module(torch.empty(1, 8191, 7168, device="meta"), causal=True, cache=cache)
    assert seen == []
    module(torch.empty(1, 1, 7168, device="meta"), causal=True, cache=cache)
    assert seen == [(1, 8192)]


@pytest.mark.parametrize(("mode", "expected"), [("naive", []), ("absorbed", [(S, S), (1, S + 1)])])
@torch.no_grad()
def test_the_other_modes_never_choose(mode: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module = ours(mode)
    seen = spy_on_absorbing(monkeypatch)
    x, cache = tokens(length=S + 1), module.new_cache()
    module(x[:, :S], causal=True, cache=cache)
    module(x[:, S:], causal=True, cache=cache)
    assert seen == expected
