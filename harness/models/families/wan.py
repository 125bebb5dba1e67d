"""Wan: video tokens attend each other with a rotary over time, height and width, then the text (and an image)."""

from typing import Any

import torch
from diffusers import UniPCMultistepScheduler, WanTransformer3DModel
from torch import Tensor

from harness.models.families.diffusion import Draw, diffusion_family
from harness.models.families.family import Structure

GRID = (2, 4, 4)  # patches: time, height, width
TEXT, IMAGE = 6, 5  # tokens
TEXT_BESIDE_IMAGE = 512  # the processor counts the image's tokens as those beyond 512


def structure(config: Any) -> Structure:
    return Structure(
        layers=config.num_layers,
        attentions=2 * config.num_layers,  # self and cross
        attention_class="WanAttention",
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
    )


def inputs(model: Any, draw: Draw, batch: int) -> dict[str, Any]:
    config = model.config
    size = [count * patch for count, patch in zip(GRID, config.patch_size, strict=True)]
    text = TEXT if config.added_kv_proj_dim is None else TEXT_BESIDE_IMAGE
    image_tokens = config.pos_embed_seq_len or IMAGE
    return {
        "hidden_states": draw(batch, config.in_channels, *size),
        "encoder_hidden_states": draw(batch, text, config.text_dim),
        "encoder_hidden_states_image": None
        if config.image_dim is None
        else draw(batch, image_tokens, config.image_dim),
    }


def timestep(times: Tensor, dtype: torch.dtype) -> Tensor:
    return times.long()  # its sines are taken in float32, whatever the model's dtype


FAMILY = diffusion_family(
    "wan",
    "Wan: video self-attention with 3-D rotary, cross-attention to text, qk-norm across heads",
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
    structure=structure,
    inputs=inputs,
    timestep=timestep,
    scheduler=lambda: UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    channel_dim=1,
)
