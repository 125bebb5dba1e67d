"""Mistral: every layer sees a sliding window."""

from transformers import MistralForCausalLM

from harness.models.families.language import language_family

FAMILY = language_family(
    "mistral",
    "Mistral: sliding window in every layer",
    model_class=MistralForCausalLM,
    attention_class="MistralAttention",
    tiny={"sliding_window": 7},
)
