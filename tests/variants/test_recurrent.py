"""Recurrent variants: three forms of one function, transformers' classes in float64, and a state that never grows."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import harness
from harness.case import Case
from harness.cell.build import build_pair
from harness.cell.side import run_steps
from harness.kernels.call import Unsupported
from harness.kernels.front import find_kernel
from harness.references import recurrent as references
from harness.variants import recurrence
from harness.variants.recurrence import Recurrence
from harness.variants.recurrent import GatedDeltaNet, KimiDeltaAttention, LightningAttention, Mamba2, RecurrentLayer
from harness.variants.specs import VARIANTS
from tests.support.attention import assert_same, count_parameters, draw_tokens, filled, make_case
from tests.support.doubles import in_float64

NAMES = ("lightning", "gated_deltanet", "kda", "mamba2")
every_variant = pytest.mark.parametrize("name", NAMES)
E, B, S = 24, 2, 21
SIZES: dict[str, dict[str, Any]] = {
    "lightning": {"head_dim": 6},
    "gated_deltanet": {"head_dim": 6, "kv_heads": 2, "v_head_dim": 5},
    "kda": {"head_dim": 6},
    "mamba2": {"head_dim": 12, "kv_heads": 2},
}
tokens = functools.partial(draw_tokens, batch=B, length=S, width=E)


def cell(name: str, **axes: Any) -> Case:
    return make_case(name, **{"embed_dim": E, "heads": 4, "seq_len": S, "batch": B} | SIZES[name] | axes)


def pair_of(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    """The reference, filled, and ours with the same weights."""
    old = filled(references.build(cell(name)), dtype)
    return old, harness.swap(old, to="variant", **options)[0]


def random_steps(channels: int, *, delta: bool, length: int = 23, fast: float = 1.0) -> Recurrence:
    generator = torch.Generator().manual_seed(0)

    def draw(width: int) -> Tensor:
        return torch.randn(2, 3, length, width, generator=generator, dtype=torch.float64)

    q, k, v = draw(6), draw(6) / 6**0.5, draw(5)
    return Recurrence(q, k, v, -fast * draw(channels).exp(), draw(1).sigmoid() if delta else None)


# ---- three forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 6])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("fast", [0.0, 1e-6, 1.0, 100.0])
def test_chunked_recurrent_and_parallel_are_one_function(channels: int, delta: bool, fast: float) -> None:
    """Gates of exactly 1 (fast = 0), nearly 1, ordinary, and such that a token forgets all before it."""
    steps = random_steps(channels, delta=delta, fast=fast)
    state = torch.randn(2, 3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = recurrence.run(steps, state, form="recurrent")
    for form, chunk in (("parallel", 1), ("chunked", 1), ("chunked", 4), ("chunked", 22), ("chunked", 23), ("auto", 7)):
        found = recurrence.run(steps, state, form=form, chunk=chunk)  # type: ignore[arg-type]
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12 * float(theirs.abs().max())), (form, chunk)


def test_a_long_sequence_that_hardly_forgets_and_one_that_forgets_at_once_stay_exact() -> None:
    for fast in (1e-5, 50.0):
        steps = random_steps(1, delta=True, length=1500, fast=fast)
        exact, _ = recurrence.run(steps, None, form="recurrent")
        assert steps.beta is not None
        q, k, v, g, beta = (t.float() for t in (steps.q, steps.k, steps.v, steps.g, steps.beta))
        narrow = Recurrence(q, k, v, g, beta)
        chunked, _ = recurrence.run(narrow, None, form="chunked")
        slow, _ = recurrence.run(narrow, None, form="recurrent")
        assert float((chunked - exact).abs().max()) <= 4 * float((slow - exact).abs().max())


@every_variant
@pytest.mark.parametrize("form", ["chunked", "recurrent", "parallel"])
def test_every_form_of_a_layer_is_the_reference_with_gradients(name: str, form: str) -> None:
    old, _ = pair_of(name)
    ours, _ = harness.swap(old, to="variant", form=form, chunk=8)
    harness.assert_equivalent(ours, old, (tokens(),), gradients=True)


@every_variant
@torch.no_grad()
def test_prefill_is_pieces_is_step_by_step(name: str) -> None:
    _, ours = pair_of(name)
    x = tokens()
    whole = ours(x)
    for cuts in ([S], [8, 8, 5], [1] * S, [3, 1, 11, 1, 5]):
        cache = ours.new_cache()
        parts = torch.cat([ours(part, cache=cache) for part in x.split(cuts, dim=1)], dim=1)
        assert torch.allclose(parts, whole, rtol=0, atol=1e-12 * float(whole.abs().max()))
        assert cache.length == S


# ---- transformers' classes -------------------------------------------------------------------------------------------


def theirs(name: str) -> Any:
    """transformers' own class of the same sizes, to be called inside `in_float64`."""
    case = cell(name)
    if name == "lightning":
        from transformers.models.minimax import modeling_minimax as minimax

        config = minimax.MiniMaxConfig(
            hidden_size=E, num_attention_heads=4, head_dim=6, num_hidden_layers=1, block_size=8,
            layer_types=["linear_attention"],
        )  # fmt: skip
        layer: Any = minimax.MiniMaxLightningAttention(config, 0)
        return layer, lambda module, x: module(x, None, None)[0]
    if name == "gated_deltanet":
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen

        config = qwen.Qwen3NextConfig(
            hidden_size=E, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=6,
            linear_value_head_dim=5, linear_conv_kernel_dim=4, num_hidden_layers=1, layer_types=["linear_attention"],
        )  # fmt: skip
        return qwen.Qwen3NextGatedDeltaNet(config, 0), lambda module, x: module(x)
    if name == "kda":
        from transformers.models.kimi_linear import modeling_kimi_linear as kimi

        config = kimi.KimiLinearConfig(
            hidden_size=E, linear_num_heads=4, linear_head_dim=6, linear_conv_kernel_dim=4, num_hidden_layers=1,
            rms_norm_eps=1e-6, layer_types=["linear_attention"],
        )  # fmt: skip
        return kimi.KimiLinearDeltaAttention(config, 0), lambda module, x: module(x)
    from transformers.models.mamba2 import modeling_mamba2 as mamba

    config = mamba.Mamba2Config(
        hidden_size=E, num_heads=4, head_dim=12, n_groups=2, state_size=2 * case.head_dim, conv_kernel=4, expand=2,
        num_hidden_layers=1, chunk_size=8, layer_norm_epsilon=1e-5,
    )  # fmt: skip
    return mamba.Mamba2Mixer(config, 0), lambda module, x: module(x)


@every_variant
@torch.no_grad()
def test_it_is_transformers_class_with_the_same_weights(name: str) -> None:
    """In float64 within 1e-12, where theirs is held to float64; as it is, it is a thousand times further away."""
    reference, ours = pair_of(name)
    x = tokens()
    with in_float64():
        layer, call = theirs(name)
        layer.load_state_dict(reference.state_dict(), strict=False)
        left = {key for key, _ in layer.named_parameters()} ^ {key for key, _ in reference.named_parameters()}
        assert not left
        layer = layer.double().eval()
        expected = call(layer, x)
    size = float(expected.abs().max())
    for found in (ours(x), reference(x)):
        assert float((found - expected).abs().max()) <= 1e-12 * size
    if name != "lightning":  # which casts its norm alone
        as_it_is = float((call(layer, x) - expected).abs().max()) / size
        assert as_it_is > 1e-9  # their float32 inside: no golden
        assert float((reference(x) - expected).abs().max()) / size < 1e-3 * as_it_is


@every_variant
@torch.no_grad()
def test_in_float32_it_keeps_the_rule_beside_transformers_class(name: str) -> None:
    reference, ours = pair_of(name, torch.float32)
    layer, call = theirs(name)
    layer.load_state_dict(reference.state_dict(), strict=False)

    class Theirs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float32:
                out: Tensor = call(self.layer, x)
                return out
            with in_float64():
                return call(self.layer, x)

    assert_same(ours, Theirs().eval(), tokens(torch.float32))


# ---- what it weighs --------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("sizes", [(16, 2, 4), (24, 4, 6), (32, 4, 8), (40, 8, 10), (64, 8, 16)], ids=str)
@torch.no_grad()
def test_parameters_and_bytes_are_the_formulas_at_any_length(name: str, sizes: tuple[int, int, int]) -> None:
    embed, heads, head_dim = sizes
    seen = set()
    for dtype in ("float32", "bfloat16"):
        for length in (1, 2, 40):
            case = cell(name, embed_dim=embed, heads=heads, head_dim=head_dim, seq_len=length, dtype=dtype)
            pair = build_pair(case, find_kernel("eager"), seed=0)
            module = pair.candidate.module
            cache = module.new_cache(length)  # type: ignore[operator]
            module(torch.zeros(case.batch, length, embed, dtype=getattr(torch, dtype)), cache=cache)
            assert count_parameters(module) == VARIANTS[name].params(case)
            assert cache.allocated_bytes == VARIANTS[name].kv_cache_bytes(case)
            seen.add((dtype, cache.allocated_bytes))
    assert len(seen) == 2  # one for each dtype, whatever the length


@every_variant
@torch.no_grad()
def test_float32_states_are_as_large_as_transformers(name: str) -> None:
    from transformers import DynamicCache

    _, ours = pair_of(name, torch.float32)
    layer, _ = theirs(name)
    x = tokens(torch.float32)
    mine = ours.new_cache()
    ours(x, cache=mine)
    if name == "lightning":
        from transformers.models.minimax.modeling_minimax import MiniMaxCache

        kept = MiniMaxCache()
        layer(x, None, None, past_key_values=kept)
        held = [kept.get_linear_cache(0)]
    else:
        from transformers.cache_utils import LinearAttentionLayer

        states: Any = DynamicCache()
        states.layers = [LinearAttentionLayer()]
        layer(x, cache_params=states)
        held = [states.layers[0].conv_states[0], states.layers[0].recurrent_states[0]]
    assert mine.allocated_bytes == sum(t.numel() * t.element_size() for t in held)


# ---- padding, and what is refused ------------------------------------------------------------------------------------


@every_variant
@torch.no_grad()
def test_padding_on_the_left_leaves_no_trace(name: str) -> None:
    """Whatever stands in padded tokens, NaN too: the state, and all that follows, are those without them."""
    _, ours = pair_of(name)
    x, pad = tokens(), 4
    padded = torch.cat([torch.full((B, pad, E), float("nan"), dtype=x.dtype), x], dim=1)
    mask = (torch.arange(pad + S) >= pad)[None, None, None]
    with_padding, without = ours.new_cache(), ours.new_cache()
    expected = ours(x, cache=without)
    found = ours(padded, mask=mask, cache=with_padding)
    assert torch.allclose(found[:, pad:], expected, rtol=0, atol=1e-13)
    for ours_state, theirs_state in zip(with_padding.streams(), without.streams(), strict=True):
        assert torch.allclose(ours_state, theirs_state, rtol=0, atol=1e-13)


@every_variant
@torch.no_grad()
def test_a_sequence_alone_is_the_sequence_in_the_batch(name: str) -> None:
    _, ours = pair_of(name)
    x = tokens()
    assert torch.allclose(torch.cat([ours(row[None]) for row in x]), ours(x), rtol=0, atol=1e-13)


def test_refusals_name_the_value() -> None:
    _, ours = pair_of("kda")
    x = tokens()
    with pytest.raises(Unsupported, match="causal = False, window = None"):
        ours(x, causal=False)
    with pytest.raises(Unsupported, match=r"mask torch.bool \(21, 21\): a recurrence can hide whole tokens alone"):
        ours(x, mask=torch.ones(S, S, dtype=torch.bool))
    with pytest.raises(ValueError, match="form = 'scan': must be one of auto, chunked, recurrent, parallel"):
        LightningAttention(8, 2, head_dim=4, form=cast(Any, "scan"))
    with pytest.raises(ValueError, match="chunk = 0: must be at least 1"):
        LightningAttention(8, 2, head_dim=4, chunk=0)


# ---- in the grid -----------------------------------------------------------------------------------------------------


@every_variant
def test_the_grid_judges_weighs_and_counts_it(name: str, tmp_path: Path) -> None:
    grid = {"variant": name, "embed_dim": E, "heads": 4, "seq_len": 7, "mask": "causal", "kernel": ["eager", "tiled"]}
    grid |= {axis: value for axis, value in SIZES[name].items() if axis != "head_dim"}
    grid["phase"] = ["prefill", "decode", "train"]
    config = {"name": "x", "grid": grid, "timing": {"enabled": False}, "regimes": ["plain", "poison"]}
    table = harness.run(config, out=tmp_path / "run")
    assert list(table["status"]) == ["ok"] * 3  # the kernel axis has collapsed
    assert set(table["kernel"]) == {"eager"} and bool((table["calls"] > 0).all())
    kept = table[table["phase"] != "train"]
    assert list(kept["kv_cache_bytes"]) == list(kept["kv_cache_bytes_formula"])


def test_other_masks_are_impossible_for_it() -> None:
    grid = {"variant": "kda", "embed_dim": E, "heads": 4, "seq_len": 10, "mask": "sliding_window", "phase": "prefill"}
    with pytest.raises(ValueError, match="impossible for kda: this variant has only causal, left_padding"):
        harness.run({"name": "x", "grid": grid})


def test_a_module_that_is_bypassed_is_seen_by_its_count() -> None:
    pair = build_pair(cell("mamba2"), find_kernel("eager"), seed=0)
    before = pair.calls
    run_steps(pair.candidate, pair.steps, tokens(torch.float32))
    assert pair.calls == before + 1
    module = pair.candidate.module
    assert isinstance(module, RecurrentLayer)
    module.counted = None
    run_steps(replace(pair.candidate), pair.steps, tokens(torch.float32))
    assert pair.calls == before + 1


def test_classes() -> None:
    kinds = {"lightning": LightningAttention, "gated_deltanet": GatedDeltaNet, "kda": KimiDeltaAttention}
    for name, kind in (kinds | {"mamba2": Mamba2}).items():
        assert type(pair_of(name)[1]) is kind
