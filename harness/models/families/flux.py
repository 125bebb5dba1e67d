"""Flux: text and image tokens in one joint attention with rotary embeddings, then blocks of a single stream."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

from harness.models.families.diffusion import Diffusion, ExactNoise, half_hidden_text

SIDE, TEXT = 4, 6  # image tokens a side, text tokens


def inputs(model: Any, noise: ExactNoise, batch: int) -> dict[str, Any]:
    config = model.config
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    positions = torch.stack([torch.zeros_like(row), row, column], dim=-1).flatten(0, 1)  # (SIDE*SIDE, 3)
    guidance = torch.full((batch,), 3.5, device=noise.device, dtype=noise.dtype)
    return {
        "hidden_states": noise(batch, SIDE * SIDE, config.in_channels),
        "encoder_hidden_states": noise(batch, TEXT, config.joint_attention_dim),
        "pooled_projections": noise(batch, config.pooled_projection_dim),
        "img_ids": positions.to(noise.device),
        "txt_ids": torch.zeros(TEXT, 3, dtype=torch.long, device=noise.device),
        "guidance": guidance if config.guidance_embeds else None,
    }


def hide_text(model: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    visible = half_hidden_text(kwargs["hidden_states"], TEXT, TEXT + kwargs["hidden_states"].shape[1])
    return {"joint_attention_kwargs": {"attention_mask": visible[:, None, None]}}  # (B, 1, 1, S)


FAMILY = Diffusion(
    name="flux",
    title="Flux: joint text-image attention, qk-norm, rotary over three axes",
    model_class=FluxTransformer2DModel,
    tiny={
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 4, 8),
    },
    attention_class="FluxAttention",
    layer_keys=("num_layers", "num_single_layers"),
    inputs=inputs,
    timestep=lambda times, dtype: times.to(dtype) / 1000,
    scheduler=lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
    channel_dim=2,
    hide_text=hide_text,
).family
