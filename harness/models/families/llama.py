"""LLaMA: grouped queries and rotary positions, the plain case."""

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from harness.models.families.language import language_family

FAMILY = language_family(
    "llama",
    "LLaMA: grouped-query attention, rotary positions",
    config_class=LlamaConfig,
    model_class=LlamaForCausalLM,
    attention_class=LlamaAttention,
    tiny={"attention_bias": True},
)
