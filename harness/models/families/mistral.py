"""Mistral: every layer sees a sliding window."""

from transformers import MistralConfig, MistralForCausalLM
from transformers.models.mistral.modeling_mistral import MistralAttention

from harness.models.families.language import language_family

FAMILY = language_family(
    "mistral",
    "Mistral: sliding window in every layer",
    config_class=MistralConfig,
    model_class=MistralForCausalLM,
    attention_class=MistralAttention,
    tiny={"sliding_window": 7},
)
