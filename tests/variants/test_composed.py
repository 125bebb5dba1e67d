"""Gated, differential, sink and shared-KV attention: transformers' classes, caches by formula, steps and pieces."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from harness.case import Case
from harness.cell.build import build_pair
from harness.kernels.front import find_kernel
from harness.references import composed as references
from harness.variants.cache import SlidingKVCache
from harness.variants.mla import Rope
from harness.variants.specs import VARIANTS
from harness.variants.specs.composed import WINDOW
from tests.support.attention import assert_same, count_parameters, draw_tokens, filled, make_case
from tests.support.doubles import in_float64

NAMES = ("gated_gqa", "differential", "sinks", "sinks_sliding", "kv_shared")
every_variant = pytest.mark.parametrize("name", NAMES)
FIVE = [(16, 2, 2, 4), (24, 4, 2, 6), (32, 8, 4, 8), (40, 4, 4, 10), (64, 8, 2, 16)]
E, H, KV, D, B, S = 24, 4, 2, 8, 2, WINDOW + 9
tokens = functools.partial(draw_tokens, batch=B, length=S, width=E)


def cell(name: str, **axes: Any) -> Case:
    sizes = {"embed_dim": E, "heads": H, "kv_heads": KV, "head_dim": D, "seq_len": S, "batch": B, "bias": True}
    return make_case(name, **sizes | axes)


def pair_of(name: str, dtype: torch.dtype = torch.float64, **axes: Any) -> tuple[Any, Any]:
    old = filled(references.build(cell(name, **axes)), dtype)
    return old, harness.swap(old, to="variant")[0]


def rotary(length: int, dtype: torch.dtype, *, halves: bool = False) -> tuple[Tensor, Tensor]:
    """cos and sin as transformers' models hand them to each layer."""
    angles = torch.outer(torch.arange(length).double(), 10_000.0 ** -(torch.arange(0, D, 2).double() / D))
    both = angles if halves else torch.cat([angles, angles], dim=-1)
    return both.cos()[None].to(dtype), both.sin()[None].to(dtype)


def causal(length: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = (j <= i) if window is None else (j <= i) & (i - j < window)
    return torch.zeros(length, length, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]


class Theirs(nn.Module):
    """transformers' class with our reference's weights, called as a model calls it, truly in its dtype."""

    def __init__(self, name: str, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.name = name
        shared: dict[str, Any] = {
            "hidden_size": E, "num_attention_heads": H, "num_key_value_heads": KV, "head_dim": D,
            "num_hidden_layers": 2, "attention_bias": True, "attn_implementation": "eager",
        }  # fmt: skip
        with in_float64():
            self.layers = nn.ModuleList(self._make(shared))
        if name == "differential":
            names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
            state = {k: v for k, v in state.items() if k != "lambdas"} | dict(zip(names, state["lambdas"], strict=True))
        parts = [{k: v for k, v in state.items() if not k.startswith("upper.")}]
        if len(self.layers) > 1:
            parts.append({k.removeprefix("upper."): v for k, v in state.items() if k.startswith("upper.")})
        for layer, part in zip(self.layers, parts, strict=True):
            assert {k for k, _ in layer.named_parameters()} == part.keys()
            layer.load_state_dict(part, strict=False)

    def _make(self, shared: dict[str, Any]) -> list[nn.Module]:
        if self.name == "gated_gqa":
            from transformers.models.qwen3_next import modeling_qwen3_next as qwen

            return [qwen.Qwen3NextAttention(qwen.Qwen3NextConfig(**shared), 0)]
        if self.name == "differential":
            from transformers.models.diffllama import modeling_diffllama as diff

            return [diff.DiffLlamaAttention(diff.DiffLlamaConfig(**shared, rms_norm_eps=1e-6), 0)]
        if self.name == "kv_shared":
            from transformers.models.gemma3n import modeling_gemma3n as gemma

            kinds = {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1, "intermediate_size": [8, 8]}
            config = gemma.Gemma3nTextConfig(**shared, **kinds, activation_sparsity_pattern=None)
            return [gemma.Gemma3nTextAttention(config, 0), gemma.Gemma3nTextAttention(config, 1)]
        from transformers.models.gpt_oss import modeling_gpt_oss as oss

        kind = "sliding_attention" if self.name == "sinks_sliding" else "full_attention"
        return [oss.GptOssAttention(oss.GptOssConfig(**shared, sliding_window=WINDOW, layer_types=[kind] * 2), 0)]

    def forward(self, x: Tensor) -> Tensor:
        sinks, window = self.name.startswith("sinks"), WINDOW if self.name == "sinks_sliding" else None
        at = rotary(x.shape[1], x.dtype, halves=sinks)
        mask, kept = causal(x.shape[1], x.dtype, window), {}  # type: ignore[var-annotated]
        with in_float64():
            for layer in self.layers:
                more = {"shared_kv_states": kept} if self.name == "kv_shared" else {}
                out: Tensor = layer(x, position_embeddings=at, attention_mask=mask, **more)[0]
                x = x + out
        return out


@every_variant
@torch.no_grad()
def test_it_is_transformers_class_with_the_same_weights(name: str) -> None:
    reference, ours = pair_of(name)
    theirs, x = Theirs(name, reference.state_dict()).double().eval(), tokens()
    expected = theirs(x)
    assert float((ours(x, causal=True) - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


@every_variant
def test_in_float32_it_keeps_the_rule_beside_transformers_class(name: str) -> None:
    reference, ours = pair_of(name, torch.float32)
    theirs = Theirs(name, reference.state_dict()).float().eval()
    assert_same(lambda x: ours(x, causal=True), theirs, tokens(torch.float32))


@every_variant
@torch.no_grad()
def test_prefill_is_pieces_is_step_by_step(name: str) -> None:
    _, ours = pair_of(name)
    x = tokens()
    whole = ours(x, causal=True)
    for cuts in ([S], [20, 20, S - 40], [1] * S, [WINDOW + 3, 1, S - WINDOW - 4]):
        cache = ours.new_cache()
        parts = [ours(part, causal=True, cache=cache) for part in x.split(cuts, dim=1)]
        assert torch.allclose(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-12 * float(whole.abs().max()))


@every_variant
def test_gradients_are_the_reference_s(name: str) -> None:
    reference, ours = pair_of(name, seq_len=9)
    x = draw_tokens(batch=B, length=9, width=E)
    harness.assert_equivalent(
        _Causal(ours, "causal"), _Causal(reference, "is_causal"), (x,), gradients=True
    )  # fmt: skip


class _Causal(nn.Module):
    def __init__(self, inner: nn.Module, word: str) -> None:
        super().__init__()
        self.inner, self.word = inner, word

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x, **{self.word: True})
        return out


@every_variant
@pytest.mark.parametrize(
    "sizes", [(16, 2, 2, 4), (24, 4, 2, 6), (32, 8, 4, 8), (40, 4, 4, 10), (64, 8, 2, 16)], ids=str
)
@torch.no_grad()
def test_parameters_and_bytes_are_the_formulas(name: str, sizes: tuple[int, int, int, int]) -> None:
    axes = dict(zip(("embed_dim", "heads", "kv_heads", "head_dim"), sizes, strict=True))
    for dtype, bias, length in (("float32", True, 1), ("bfloat16", False, WINDOW), ("float32", False, 3 * WINDOW)):
        case = cell(name, **axes, dtype=dtype, bias=bias, seq_len=length)
        pair = build_pair(case, find_kernel("eager"), seed=0)
        module: Any = pair.candidate.module
        cache = module.new_cache(length)
        x = torch.zeros(B, length, case.embed_dim, dtype=getattr(torch, dtype))
        for part in x.split([max(1, length - 2), *[1] * min(2, length - 1)], dim=1):
            module(part, causal=True, cache=cache)
        assert count_parameters(module) == VARIANTS[name].params(case)
        assert cache.allocated_bytes == VARIANTS[name].kv_cache_bytes(case)


def test_a_sliding_cache_crops_as_long_as_the_window_is_whole() -> None:
    cache = SlidingKVCache(window=4)
    k = torch.arange(10.0).view(1, 1, 10, 1)
    assert cache.append(k, k)[0].shape[2] == 10 and cache.streams()[0].flatten().tolist() == [6, 7, 8, 9]
    cache.crop(9)
    assert cache.append(k[:, :, 9:], k[:, :, 9:])[0].flatten().tolist() == [6, 7, 8, 9]
    with pytest.raises(ValueError, match="length = 8: of 10 tokens the cache has forgotten those before"):
        cache.crop(8)
    with pytest.raises(ValueError, match="length = 11: must be within 0 and the 10 tokens held"):
        cache.crop(11)


def test_rope_in_halves_is_the_interleaved_one_with_its_channels_reordered() -> None:
    x = draw_tokens(batch=1, length=5, width=D)[:, None]
    order = torch.cat([torch.arange(0, D, 2), torch.arange(1, D, 2)])
    assert_same(lambda t: Rope(D, halves=True)(t[..., order], 3), lambda t: Rope(D)(t, 3)[..., order], x)


def test_impossible_sizes_are_named() -> None:
    for name, axes, rule in (
        ("differential", {"kv_heads": 1}, "must be even: half of them are subtracted"),
        ("gated_gqa", {"head_dim": 3}, "must be even: RoPE turns pairs"),
        ("sinks", {"mask": "padding"}, "this variant has only causal, causal_padding"),
    ):
        grid = {"variant": name, "embed_dim": 24, "heads": 4, "kv_heads": 2, "seq_len": 8, "mask": "causal"}
        with pytest.raises(ValueError, match=rule):
            harness.run({"name": "x", "grid": {**grid, "phase": "prefill", **axes}})
