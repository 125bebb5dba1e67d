"""DeepSeek-V2: multi-head latent attention; the swap decodes it in latent space, which transformers does not."""

from collections.abc import Mapping
from typing import Any

from transformers import DeepseekV2ForCausalLM

from harness.models.families.language import language_family

TINY_LATENT: Mapping[str, Any] = {
    "num_key_value_heads": None,  # as many as query heads, however many those are
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,  # not the nope head dim: who takes one for the other is seen
    "attention_bias": True,
    "first_k_dense_replace": 1,  # one dense layer, then one of experts
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    # Routing is discontinuous: where a token's best experts are chosen, a last bit can choose others. Here all are.
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
}


def latent_head_dim(config: Any) -> int:
    """The `head_dim` of these configs is that of the rotated part alone."""
    return int(config.qk_nope_head_dim + config.qk_rope_head_dim)


FAMILY = language_family(
    "deepseek_v2",
    "DeepSeek-V2: latent attention, absorbed where that is cheaper, experts",
    model_class=DeepseekV2ForCausalLM,
    attention_class="DeepseekV2Attention",
    tiny={**TINY_LATENT, "q_lora_rank": None},  # as V2-Lite; V2 itself compresses its queries too
    head_dim=latent_head_dim,
    swap_options={"mode": "auto"},
)
