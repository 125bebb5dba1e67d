"""CogVideoX: text and video tokens in one attention, rotary on the video's part alone."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed

from harness.models.families.diffusion import Diffusion, ExactNoise, half_hidden_text
from harness.models.families.family import FamilyError

GRID = (2, 4, 4)  # patches: time, height, width


def grid(config: Any) -> tuple[int, int, int]:
    """Learned positions exist for one size alone; else a small one will do."""
    if not config.use_learned_positional_embeddings:
        return GRID
    frames = (config.sample_frames - 1) // config.temporal_compression_ratio + 1
    patch_t = config.patch_size_t or 1
    return frames // patch_t, config.sample_height // config.patch_size, config.sample_width // config.patch_size


def inputs(model: Any, noise: ExactNoise, batch: int) -> dict[str, Any]:
    config = model.config
    time, height, width = grid(config)
    frames = time * (config.patch_size_t or 1)
    pixels = (height * config.patch_size, width * config.patch_size)
    return {
        "hidden_states": noise(batch, frames, config.in_channels, *pixels),
        "encoder_hidden_states": noise(batch, config.max_text_seq_length, config.text_embed_dim),
        "image_rotary_emb": rotary(config, noise.device) if config.use_rotary_positional_embeddings else None,
        "ofs": torch.full((1,), 2.0, device=noise.device, dtype=noise.dtype) if config.ofs_embed_dim else None,
    }


def rotary(config: Any, device: torch.device) -> Any:
    head_dim = config.attention_head_dim
    if head_dim % 16:
        raise FamilyError(f"cogvideox: attention_head_dim = {head_dim}: must be a multiple of 16 for its rotary")
    time, height, width = grid(config)
    return get_3d_rotary_pos_embed(head_dim, ((0, 0), (height, width)), (height, width), time, device=device)


def hide_text(model: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    time, height, width = grid(model.config)
    text = kwargs["encoder_hidden_states"].shape[1]
    visible = half_hidden_text(kwargs["encoder_hidden_states"], text, text + time * height * width)
    return {"attention_kwargs": {"attention_mask": visible[:, None]}}  # (B, 1, S)


FAMILY = Diffusion(
    name="cogvideox",
    title="CogVideoX: joint text-video attention, qk-norm, 3-D rotary on the video",
    model_class=CogVideoXTransformer3DModel,
    tiny={
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 2,
        "text_embed_dim": 8,
        "num_layers": 2,
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": 8,
        "patch_size": 2,
        "max_text_seq_length": 8,
        "use_rotary_positional_embeddings": True,
    },
    attention_class="Attention",
    inputs=inputs,
    scheduler=lambda: CogVideoXDDIMScheduler(
        prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_shift_scale=3.0, timestep_spacing="trailing"
    ),
    channel_dim=2,
    hide_text=hide_text,
).family
