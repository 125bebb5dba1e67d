"""gpt-oss: a learnt sink in every softmax, and every other layer sees a sliding window."""

from transformers import GptOssForCausalLM

from harness.models.families.language import language_family

FAMILY = language_family(
    "gpt_oss",
    "gpt-oss: attention sinks, alternating sliding windows, experts",
    model_class=GptOssForCausalLM,
    attention_class="GptOssAttention",
    tiny={
        "head_dim": 16,
        "sliding_window": 7,
        "max_position_embeddings": 131072,  # what its rotary scaling is made for; costs nothing
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
)
