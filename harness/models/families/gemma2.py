"""Gemma 2: capped scores, a scale of its own, and every other layer sees a sliding window."""

from transformers import Gemma2ForCausalLM

from harness.models.families.language import language_family

FAMILY = language_family(
    "gemma2",
    "Gemma 2: softcapped scores, alternating sliding windows",
    model_class=Gemma2ForCausalLM,
    attention_class="Gemma2Attention",
    tiny={
        "head_dim": 16,
        "query_pre_attn_scalar": 6,  # not the head dim: a kernel that makes up its own scale is seen
        "attn_logit_softcapping": 5.0,  # of scores that reach beyond 20
        "sliding_window": 7,
        "attention_bias": True,
    },
)
