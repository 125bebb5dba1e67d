"""Qwen3: queries and keys are normalised per head, and the head dim is not hidden_size / heads."""

from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from harness.models.families.language import language_family

FAMILY = language_family(
    "qwen3",
    "Qwen3: normalised queries and keys, wide heads",
    config_class=Qwen3Config,
    model_class=Qwen3ForCausalLM,
    attention_class=Qwen3Attention,
    tiny={"head_dim": 24, "attention_bias": True},
)
