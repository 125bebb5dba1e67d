"""Flux: text and image tokens in one joint attention with rotary embeddings, then blocks of a single stream."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch import Tensor

from harness.models.families.diffusion import Draw, diffusion_family
from harness.models.families.family import Structure

SIDE, TEXT = 4, 6  # image tokens a side, text tokens


def structure(config: Any) -> Structure:
    layers = config.num_layers + config.num_single_layers
    return Structure(
        layers=layers,
        attentions=layers,
        attention_class="FluxAttention",
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
    )


def inputs(model: Any, draw: Draw, batch: int) -> dict[str, Any]:
    config = model.config
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    positions = torch.stack([torch.zeros_like(row), row, column], dim=-1).flatten(0, 1)  # (SIDE*SIDE, 3)
    return {
        "hidden_states": draw(batch, SIDE * SIDE, config.in_channels),
        "encoder_hidden_states": draw(batch, TEXT, config.joint_attention_dim),
        "pooled_projections": draw(batch, config.pooled_projection_dim),
        "img_ids": positions.to(draw.device),
        "txt_ids": torch.zeros(TEXT, 3, dtype=torch.long, device=draw.device),
        "guidance": torch.full((batch,), 3.5, device=draw.device, dtype=draw.dtype) if config.guidance_embeds else None,
    }


def timestep(times: Tensor, dtype: torch.dtype) -> Tensor:
    return times.to(dtype) / 1000


def hide_text(model: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    hidden = kwargs["hidden_states"]
    visible = torch.ones(hidden.shape[0], TEXT + hidden.shape[1], dtype=torch.bool, device=hidden.device)
    visible[-1, TEXT // 2 : TEXT] = False  # the text comes first in the joint sequence
    return {"joint_attention_kwargs": {"attention_mask": visible[:, None, None]}}  # (B, 1, 1, S)


FAMILY = diffusion_family(
    "flux",
    "Flux: joint text-image attention, qk-norm, rotary over three axes",
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
    structure=structure,
    inputs=inputs,
    timestep=timestep,
    scheduler=lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
    channel_dim=2,
    hide_text=hide_text,
)
