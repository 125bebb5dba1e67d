"""Qwen3: queries and keys are normalised per head, and the head dim is not hidden_size / heads."""

from transformers import Qwen3ForCausalLM

from harness.models.families.language import language_family

FAMILY = language_family(
    "qwen3",
    "Qwen3: normalised queries and keys, wide heads",
    model_class=Qwen3ForCausalLM,
    attention_class="Qwen3Attention",
    tiny={"head_dim": 24, "attention_bias": True},
)
