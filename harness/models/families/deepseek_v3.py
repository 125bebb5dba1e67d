"""DeepSeek-V3: latent attention with compressed queries, interleaved rotary pairs and yarn's scale."""

from transformers import DeepseekV3ForCausalLM

from harness.models.families.deepseek_v2 import TINY_LATENT, latent_head_dim
from harness.models.families.language import language_family

FAMILY = language_family(
    "deepseek_v3",
    "DeepSeek-V3: latent attention, always absorbed, yarn, experts",
    model_class=DeepseekV3ForCausalLM,
    attention_class="DeepseekV3Attention",
    tiny={
        **TINY_LATENT,
        "q_lora_rank": 12,
        # Its mscale makes the scale another than (nope + rope)^-0.5: who computes his own is seen.
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 32,
        },
    },
    head_dim=latent_head_dim,
    # A whole prompt is cheaper decompressed, so only like this is the latent way judged layer by layer too.
    swap_options={"mode": "absorbed"},
)
