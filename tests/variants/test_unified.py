"""UnifiedAttention: one front for all variants."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import harness
from harness.cell.build import randomise
from harness.variants.gqa import GroupedQueryAttention
from harness.variants.mla import MultiHeadLatentAttention
from tests.support.attention import assert_same

D_MODEL, HEADS = 32, 8
GROUPED = {"mha": 8, "mqa": 1, "gqa-1": 1, "gqa-2": 2, "gqa-4": 4, "gqa-8": 8}
LATENT = {"mla": "auto", "mla_naive": "naive", "mla_absorbed": "absorbed"}
every_type = pytest.mark.parametrize("attention_type", [*GROUPED, *LATENT])


def make(attention_type: str, **options: Any) -> harness.UnifiedAttention:
    module = harness.UnifiedAttention(D_MODEL, HEADS, attention_type=attention_type, **options)
    if not next(module.parameters()).is_meta:
        randomise(module, torch.Generator().manual_seed(0))
    return module.eval()


def shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


@pytest.mark.parametrize(("attention_type", "kv_heads"), GROUPED.items())
def test_grouped_types_have_the_kv_heads_they_name(attention_type: str, kv_heads: int) -> None:
    inner = make(attention_type).attention
    assert isinstance(inner, GroupedQueryAttention)
    assert inner.num_kv_heads == kv_heads
    assert inner.head_dim == D_MODEL // HEADS
    assert inner.k_proj.weight.shape == (kv_heads * 4, D_MODEL)  # narrow, not as wide as q


@pytest.mark.parametrize(("attention_type", "mode"), LATENT.items())
def test_latent_types_have_their_mode_and_deepseeks_proportions(attention_type: str, mode: str) -> None:
    inner = make(attention_type).attention
    assert isinstance(inner, MultiHeadLatentAttention)
    assert inner.mode == mode
    assert (inner.nope_head_dim, inner.rope_head_dim, inner.v_head_dim, inner.kv_lora_rank) == (4, 2, 4, 16)
    assert inner.q_lora_rank is None


def test_the_default_is_mha_and_gqa_may_be_spelt_both_ways() -> None:
    assert harness.UnifiedAttention(D_MODEL, HEADS).get_config()["num_kv_heads"] == HEADS
    for heads, kv_heads in ((1, 1), (2, 1), (6, 1), (8, 2), (24, 6), (32, 8)):
        alone = harness.UnifiedAttention(96, heads, attention_type="gqa", head_dim=4)
        assert alone.get_config()["num_kv_heads"] == kv_heads
    spelt = harness.UnifiedAttention(D_MODEL, HEADS, 4, "gqa")
    assert spelt.get_config()["num_kv_heads"] == 4
    assert shapes(spelt) == shapes(make("gqa-4"))
    assert shapes(harness.UnifiedAttention(D_MODEL, HEADS, 4, "gqa-4")) == shapes(spelt)
    assert shapes(harness.UnifiedAttention(D_MODEL, HEADS, 1, "mqa")) == shapes(make("mqa"))


@every_type
@torch.no_grad()
def test_forward_is_the_inner_modules_and_decode_equals_it(attention_type: str) -> None:
    module = make(attention_type, bias=True, dtype=torch.float64)
    x = torch.randn(2, 7, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = module(x, causal=True)
    assert torch.equal(out, module.attention(x, causal=True))

    def decoded(x: Tensor) -> Tensor:
        cache = module.new_cache(7)
        return torch.cat([module(piece, causal=True, cache=cache) for piece in x.split([4, 1, 1, 1], dim=1)], dim=1)

    assert_same(decoded, lambda x: module(x, causal=True), x)
    with_weights, weights = module(x, causal=True, need_weights=True)
    assert torch.equal(with_weights, out)
    assert weights.shape == (2, HEADS, 7, 7)


@every_type
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_config_makes_the_same_module_again(attention_type: str, bias: bool) -> None:
    options: dict[str, Any] = {"head_dim": 6, "dropout": 0.25, "kernel": "sdpa", "bias": bias}
    if attention_type in LATENT:
        options |= {"kv_lora_rank": 10, "q_lora_rank": 5, "rope_head_dim": 4, "v_head_dim": 3}
    module = make(attention_type, **options)
    config = module.get_config()
    assert config.items() >= options.items()
    assert (config["d_model"], config["num_heads"], config["attention_type"]) == (D_MODEL, HEADS, attention_type)
    twin = harness.UnifiedAttention(**json.loads(json.dumps(config)))  # plain data, so it can be stored
    assert shapes(twin) == shapes(module)
    assert twin.get_config() == config
    twin.load_state_dict(module.state_dict())
    x = torch.randn(2, 5, D_MODEL)
    with torch.no_grad():
        assert torch.equal(twin.eval()(x, causal=True), module(x, causal=True))


@every_type
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("seq_len", "batch"), [(1, 1), (9, 3)])
@torch.no_grad()
def test_memory_usage_is_what_the_cache_and_the_parameters_occupy(
    attention_type: str, dtype: torch.dtype, seq_len: int, batch: int
) -> None:
    module = make(attention_type, dtype=dtype, bias=True)
    usage = module.get_memory_usage(seq_len, batch)
    cache = module.new_cache(seq_len)
    x = torch.randn(batch, seq_len, D_MODEL).to(dtype)
    for piece in x.split([max(1, seq_len - 2), *[1] * min(2, seq_len - 1)], dim=1):
        module(piece, causal=True, cache=cache)
    assert usage["kv_cache_bytes"] == cache.allocated_bytes
    assert usage["kv_bytes_per_token"] * seq_len * batch == cache.allocated_bytes
    assert usage["params"] == sum(p.numel() for p in module.parameters())
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    assert usage["param_bytes"] == sum(storages.values())


@torch.no_grad()
def test_the_score_matrix_is_what_the_textbook_keeps() -> None:
    q, k, v = torch.randn(2, 8, 9, 4), torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 4)
    _, weights = harness.ScaledDotProductAttention()(q, k, v)
    usage = make("gqa-2").get_memory_usage(9, 2)
    assert usage["score_matrix_bytes"] == weights.untyped_storage().nbytes()


def test_a_number_behind_mla_is_the_latent_s_rank() -> None:
    assert make("mla-32").get_config()["kv_lora_rank"] == 32
    assert shapes(make("mla-32")) == shapes(make("mla", kv_lora_rank=32))


def test_memory_falls_with_kv_heads() -> None:
    """The mistake to avoid: k/v heads of d/kv channels, which save nothing."""
    per_token = {name: make(name).get_memory_usage(128)["kv_bytes_per_token"] for name in GROUPED}
    assert per_token == {name: 2 * kv * 4 * 4 for name, kv in GROUPED.items()}
    assert per_token["mha"] == 8 * per_token["mqa"] == 2 * per_token["gqa-4"]
    assert make("mla").get_memory_usage(1)["kv_bytes_per_token"] == (16 + 2) * 4
    assert make("mla_naive").get_memory_usage(1)["kv_bytes_per_token"] == 8 * (4 + 2 + 4) * 4


def test_memory_usage_of_a_published_model_needs_no_memory() -> None:
    llama = harness.UnifiedAttention(4096, 32, 8, "gqa", device="meta", dtype=torch.bfloat16)
    scores, total = 32 * 4, 4096 + 83_886_080 + 32 * 4  # scored in float32
    assert llama.get_memory_usage(1) == {
        "kv_bytes_per_token": 4096,
        "params": 41_943_040,
        "kv_cache_bytes": 4096,
        "score_matrix_bytes": scores,
        "param_bytes": 83_886_080,
        "total_bytes": total,
        "kv_cache_mib": 4096 / 2**20,
        "score_matrix_mib": scores / 2**20,
        "param_mib": 80.0,
        "total_mib": total / 2**20,
    }
    assert llama.get_memory_usage(8192, batch_size=4)["kv_cache_bytes"] == 4096 * 8192 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_type": "flash"}, "attention_type = 'flash': must be one of mha, mqa, gqa"),
        ({"attention_type": "MHA"}, "attention_type = 'MHA': must be one of"),
        ({"attention_type": "gqa-"}, "attention_type = 'gqa-': must be one of"),
        ({"attention_type": "gqa-4x"}, "attention_type = 'gqa-4x': must be one of"),
        ({"attention_type": "gqa--4"}, "attention_type = 'gqa--4': must be one of"),
        ({"attention_type": "mla_fast"}, "attention_type = 'mla_fast': must be one of"),
        ({"attention_type": "mla-"}, "attention_type = 'mla-': must be one of"),
        ({"attention_type": "mla-8", "kv_lora_rank": 4}, "kv_lora_rank = 4: mla-8 has 8"),
        ({"attention_type": "gqa-3"}, r"num_kv_heads \(3\) must divide num_heads \(8\)"),
        ({"attention_type": "gqa-0"}, r"num_kv_heads \(0\) must divide num_heads \(8\)"),
        ({"attention_type": "gqa", "num_kv_heads": 16}, r"num_kv_heads \(16\) must divide num_heads \(8\)"),
        ({"attention_type": "gqa-4", "num_kv_heads": 2}, "num_kv_heads = 2: gqa-4 with 8 heads has 4"),
        ({"attention_type": "mqa", "num_kv_heads": 2}, "num_kv_heads = 2: mqa with 8 heads has 1"),
        ({"attention_type": "mha", "num_kv_heads": 2}, "num_kv_heads = 2: mha with 8 heads has 8"),
        ({"attention_type": "mla", "num_kv_heads": 2}, "num_kv_heads = 2: MLA has none"),
        ({"attention_type": "mla", "rope_head_dim": 3}, "rope_head_dim = 3: must be even"),
        ({"attention_type": "mla", "kv_lora_rank": 0}, "kv_lora_rank = 0: must be at least 1"),
        ({"attention_type": "mla_naive", "q_lora_rank": 0}, "q_lora_rank = 0: must be at least 1"),
        ({"attention_type": "mha", "kv_lora_rank": 8}, "kv_lora_rank = 8: mha has none, only MLA does"),
        ({"attention_type": "gqa-2", "v_head_dim": 8}, "v_head_dim = 8: gqa-2 has none, only MLA does"),
        ({"d_model": 30}, r"num_heads \(8\) must divide embed_dim \(30\)"),
        ({"d_model": 30, "attention_type": "mla"}, r"heads = 8: must divide embed_dim \(30\)"),
        ({"num_heads": 0}, r"num_heads \(0\) must be at least 1"),
        ({"num_heads": 0, "attention_type": "mla"}, "heads = 0: must be at least 1"),
        ({"kernel": "flash"}, "unknown kernel 'flash'; known: auto, compiled, eager"),
    ],
)
def test_errors_name_value_and_rule(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        harness.UnifiedAttention(**{"d_model": D_MODEL, "num_heads": HEADS} | options)
