"""HunyuanDiT: image tokens attend each other, then two texts; rotary on queries, and on keys of self-attention."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import DDIMScheduler, HunyuanDiT2DModel
from diffusers.models.embeddings import get_2d_rotary_pos_embed

from harness.models.families.diffusion import Diffusion, ExactNoise

SIDE = 4  # patches a side


def inputs(model: Any, noise: ExactNoise, batch: int) -> dict[str, Any]:
    config = model.config
    pixels = SIDE * config.patch_size
    with_sizes = config.use_style_cond_and_image_meta_size
    sizes = torch.tensor([1024, 768, 1024, 768, 0, 0], device=noise.device, dtype=noise.dtype)
    return {
        "hidden_states": noise(batch, config.in_channels, pixels, pixels),
        "encoder_hidden_states": noise(batch, config.text_len, config.cross_attention_dim),
        "text_embedding_mask": torch.ones(batch, config.text_len, dtype=torch.long, device=noise.device),
        "encoder_hidden_states_t5": noise(batch, config.text_len_t5, config.cross_attention_dim_t5),
        "text_embedding_mask_t5": torch.ones(batch, config.text_len_t5, dtype=torch.long, device=noise.device),
        "image_meta_size": sizes.repeat(batch, 1) if with_sizes else None,
        "style": torch.zeros(batch, dtype=torch.long, device=noise.device) if with_sizes else None,
        "image_rotary_emb": get_2d_rotary_pos_embed(
            config.attention_head_dim, ((0, 0), (SIDE, SIDE)), (SIDE, SIDE), device=noise.device
        ),
    }


def hide_text(model: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    masks = {}
    for key in ("text_embedding_mask", "text_embedding_mask_t5"):
        masks[key] = kwargs[key].clone()
        masks[key][-1, masks[key].shape[1] // 2 :] = 0
    return masks


FAMILY = Diffusion(
    name="hunyuandit",
    title="HunyuanDiT: self-attention with 2-D rotary, cross-attention to two texts, qk-norm, long skips",
    model_class=HunyuanDiT2DModel,
    tiny={
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "patch_size": 2,
        "sample_size": 8,
        "hidden_size": 16,
        "num_layers": 4,  # the fewest with a long skip connection
        "cross_attention_dim": 8,
        "cross_attention_dim_t5": 8,
        "pooled_projection_dim": 4,
        "text_len": 4,
        "text_len_t5": 4,
    },
    attention_class="Attention",
    attentions_per_layer=2,  # self and cross; its pooling of the text is no processor's
    inputs=inputs,
    timestep=lambda times, dtype: times.to(dtype),  # the dtype of the timestep is that of the embeddings
    scheduler=lambda: DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.03,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        clip_sample=False,
    ),
    channel_dim=1,
    hide_text=hide_text,
).family
