"""LLaMA: grouped queries and rotary positions, the plain case."""

from transformers import LlamaForCausalLM

from harness.models.families.language import language_family

FAMILY = language_family(
    "llama",
    "LLaMA: grouped-query attention, rotary positions",
    model_class=LlamaForCausalLM,
    attention_class="LlamaAttention",
    tiny={"attention_bias": True},
)
