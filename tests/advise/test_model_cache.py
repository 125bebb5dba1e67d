"""`harness advise --config`: bytes by formula are those of the live cache of a tiny model of the same layers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.advise.model_cache import KINDS, model_cache, read_model_cache
from harness.errors import BadInput
from tests.support import called

TINY: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
WIDE = {"head_dim": 16}  # not hidden / heads
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, **EXPERTS,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_conv": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "mistral": {**WIDE, "sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
    "qwen3": WIDE,
    "gemma2": {**WIDE, "sliding_window": 8},
    "gemma3_text": {**WIDE, "sliding_window": 8, "num_hidden_layers": 7},
    "gemma3n_text": {
        **WIDE, "intermediate_size": [64] * 4, "num_kv_shared_layers": 2, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 97,
        "hidden_size_per_layer_input": 8, "activation_sparsity_pattern": None, "laurel_rank": 4, "altup_num_inputs": 2,
    },
    "gpt_oss": {**WIDE, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "diffllama": WIDE,
    "phi3": {"sliding_window": 8},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    "qwen3_next": {
        **WIDE, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
    "kimi_linear": {
        **LATENT, "linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4, "num_experts": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "minimax": {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "conv_kernel": 4, "expand": 2},
    "falcon_h1": {**WIDE, **MAMBA, "mamba_d_ssm": 64},
    "bamba": {**MAMBA, "mamba_expand": 2, "attn_layer_indices": [1, 3]},
}  # fmt: skip


def live_bytes(cache: Any) -> int:
    """Of every tensor that a transformers cache holds."""
    held: list[torch.Tensor] = [t for t in getattr(cache, "linear_cache", []) if isinstance(t, torch.Tensor)]
    for layer in cache.layers:
        for value in vars(layer).values():
            held += [t for t in (value.values() if isinstance(value, dict) else [value]) if _is_real(t)]
    return sum(t.numel() * t.element_size() for t in held)


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_bytes_are_those_of_the_live_cache(name: str, tmp_path: Path) -> None:
    """From the file that transformers itself saves, at three lengths, in two dtypes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **{**TINY, **FAMILIES[name]})
    config.save_pretrained(tmp_path)
    found = read_model_cache(tmp_path)
    assert len(found.layers) == config.num_hidden_layers
    model = AutoModelForCausalLM.from_config(config).eval()
    for dtype, lengths in ((torch.float32, (1, 7, 20)), (torch.bfloat16, (9,))):
        model = model.to(dtype)
        for length in lengths:
            output = model(input_ids=torch.randint(1, 97, (2, length)), use_cache=True)
            cache = getattr(output, "past_key_values", None) or output.cache_params
            named = str(dtype).removeprefix("torch.")
            assert found.bytes(length, batch=2, dtype=named) == live_bytes(cache), (dtype, length)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss", "qwen3_next", "minimax", "bamba", "qwen2"])
def test_layers_follow_from_the_family_where_the_config_does_not_list_them(name: str) -> None:
    from transformers import AutoConfig

    values = AutoConfig.for_model(name, **{**TINY, **FAMILIES[name], "num_hidden_layers": 12}).to_dict()
    listed = model_cache(values)
    assert listed == model_cache({key: value for key, value in values.items() if key != "layer_types"})
    assert len(set(listed.layers)) == 2


def test_at_least_twelve_families_are_proven() -> None:
    assert len(FAMILIES) >= 12 and FAMILIES.keys() <= KINDS.keys()


def test_longest_is_the_most_that_fits() -> None:
    cache = model_cache({"model_type": "llama", **TINY})
    per_token = cache.bytes(1)
    assert cache.longest(100 * per_token + per_token - 1, batch=1, dtype="bfloat16") == 100
    assert cache.longest(0, batch=1, dtype="bfloat16") == 0
    window = model_cache({"model_type": "mistral", **TINY, "sliding_window": 8})
    assert window.longest(10 * per_token, batch=1, dtype="bfloat16") is None
    assert window.longest(3 * per_token, batch=1, dtype="bfloat16") == 3
    states = model_cache({"model_type": "mamba2", **TINY, **FAMILIES["mamba2"]})
    assert states.longest(states.bytes(1) - 1, batch=1, dtype="bfloat16") == 0
    assert states.longest(states.bytes(1), batch=1, dtype="bfloat16") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "model_type = 'lama': unknown; known: .*did you mean 'llama'"),
        ({"model_type": "llama", "hidden_size": None}, "hidden_size: required for llama, and missing"),
        (
            {"model_type": "llama", "layer_types": ["full_attention"]},
            "layer_types has 1 entries, num_hidden_layers is 4",
        ),
        ({"model_type": "llama", "layer_types": ["chunked"] * 4}, "layer_types: 'chunked': unknown for llama"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        model_cache({**TINY, **changes})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"text_config": {"model_type": "gemma2", **TINY, **FAMILIES["gemma2"]}}))
    result = called(capsys, "advise", "--config", file, "--context", "4096", "--memory", "1GiB")
    total = model_cache({"model_type": "gemma2", **TINY, **FAMILIES["gemma2"]}).bytes(4096)
    assert result.code == 0 and f"{total:,} bytes" in result.out and "sliding" in result.out
    assert called(capsys, "advise", "--config", file, "--context", "1M", "--memory", "1MiB").code == 1
    refused = called(capsys, "advise", "--config", file, "--model", "llama-3-8b")
    assert refused.code == 2 and "--model: the config says what the model is" in refused.err
    assert called(capsys, "advise", "--config", tmp_path / "none.json").code == 2
