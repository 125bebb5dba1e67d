"""Wan: video tokens attend each other with a rotary over time, height and width, then the text (and an image)."""

from typing import Any

from diffusers import UniPCMultistepScheduler, WanTransformer3DModel

from harness.models.families.diffusion import Diffusion, ExactNoise

GRID = (2, 4, 4)  # patches: time, height, width
TEXT, IMAGE = 6, 5  # tokens
TEXT_BESIDE_IMAGE = 512  # the processor counts the image's tokens as those beyond 512


def inputs(model: Any, noise: ExactNoise, batch: int) -> dict[str, Any]:
    config = model.config
    size = [count * patch for count, patch in zip(GRID, config.patch_size, strict=True)]
    text = TEXT if config.added_kv_proj_dim is None else TEXT_BESIDE_IMAGE
    image = None if config.image_dim is None else (batch, config.pos_embed_seq_len or IMAGE, config.image_dim)
    return {
        "hidden_states": noise(batch, config.in_channels, *size),
        "encoder_hidden_states": noise(batch, text, config.text_dim),
        "encoder_hidden_states_image": None if image is None else noise(*image),
    }


FAMILY = Diffusion(
    name="wan",
    title="Wan: video self-attention with 3-D rotary, cross-attention to text, qk-norm across heads",
    model_class=WanTransformer3DModel,
    tiny={
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 256,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    },
    attention_class="WanAttention",
    attentions_per_layer=2,  # self and cross
    inputs=inputs,
    scheduler=lambda: UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    channel_dim=1,
).family
