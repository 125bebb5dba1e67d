"""A decode step of MLA: absorbed and naive (ours) beside transformers' DeepseekV3Attention, with the same weights."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernel_study import counts
from bench.kernel_study.cell import Cell, Golden, Point, Sides, Work
from harness.cell.build import randomise
from harness.variants.cache import KVCache
from harness.variants.mla import MultiHeadLatentAttention

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
# Ours -> transformers'
NAMES = {"kv_a_norm": "kv_a_layernorm", "kv_a_proj": "kv_a_proj_with_mqa", "out_proj": "o_proj"}


@dataclass(frozen=True)
class LatentSizes:
    """DeepSeek-V2-Lite's; heads and the nope dim are the cell's own."""

    embed_dim: int = 2048
    rank: int = 512
    rope: int = 64
    value: int = 128


def latent_points(*, quick: bool, sizes: LatentSizes | None = None) -> Iterator[Point]:
    sizes = sizes or LatentSizes()
    targets = [Cell("mla", 1, S, 16, 16, 128, required=True) for S in (2048, 4096, 8192)]
    rest = [Cell("mla", 1, S, 16, 16, 128, dtype=dtype) for dtype in ("float32", "bfloat16") for S in LENGTHS]
    cells = {cell.label: cell for cell in [*([] if quick else rest), *targets]}
    for cell in sorted(cells.values(), key=lambda cell: not cell.required):
        work = partial(_work_of, "transformers", sizes=sizes)
        yield Point(cell, partial(build_latent, sizes=sizes), work, ("absorbed", "naive", "transformers"))


def build_latent(cell: Cell, *, sizes: LatentSizes) -> Sides:
    generator = cell.generator()
    absorbed, naive = (_ours(cell, sizes, mode) for mode in ("absorbed", "naive"))
    randomise(absorbed, generator)
    naive.load_state_dict(absorbed.state_dict())
    held = torch.randn(cell.batch, 1, cell.keys - 1, sizes.rank + sizes.rope, generator=generator)
    held = held.to(cell.torch_dtype)  # what a cache of normed latents and rotated k_pe holds
    x = torch.randn(cell.batch, 1, sizes.embed_dim, generator=generator).to(cell.torch_dtype)
    calls = {
        "absorbed": _step(absorbed, x, (held,)),
        "naive": _step(naive, x, naive._expand(held)),
        "transformers": _step_of_transformers(cell, sizes, absorbed, x, held),
    }
    work = {name: _work_of(name, cell, sizes=sizes) for name in calls}
    return Sides(calls, "naive", partial(_golden, naive, x, held), work)


def _ours(cell: Cell, sizes: LatentSizes, mode: Any) -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(
        sizes.embed_dim,
        cell.heads,
        kv_lora_rank=sizes.rank,
        nope_head_dim=cell.head_dim,
        rope_head_dim=sizes.rope,
        v_head_dim=sizes.value,
        mode=mode,
        dtype=cell.torch_dtype,
    ).eval()


def _step(module: MultiHeadLatentAttention, x: Tensor, held: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    length = held[0].shape[2]
    cache = KVCache(length + 1)
    cache.append(*held)

    def step() -> Tensor:
        cache.crop(length)
        out: Tensor = module(x, causal=True, cache=cache)
        return out

    return step


def _step_of_transformers(
    cell: Cell, sizes: LatentSizes, ours: MultiHeadLatentAttention, x: Tensor, held: Tensor
) -> Callable[[], Tensor]:
    from transformers import DeepseekV3Config, DynamicCache
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    config = DeepseekV3Config(
        hidden_size=sizes.embed_dim,
        num_attention_heads=cell.heads,
        num_key_value_heads=cell.heads,
        q_lora_rank=None,
        kv_lora_rank=sizes.rank,
        qk_nope_head_dim=cell.head_dim,
        qk_rope_head_dim=sizes.rope,
        v_head_dim=sizes.value,
        num_hidden_layers=1,
        vocab_size=8,
        max_position_embeddings=cell.keys,
    )
    config._attn_implementation = "sdpa"  # its default, and its fastest here
    module = DeepseekV3Attention(config, layer_idx=0).to(cell.torch_dtype).eval()
    state = {}
    for key, value in ours.state_dict().items():
        part, _, kind = key.partition(".")
        state[f"{NAMES.get(part, part)}.{kind}"] = value
    module.load_state_dict(state)  # strict: every weight has its place on both sides
    angles = DeepseekV3RotaryEmbedding(config)(x, torch.tensor([[cell.keys - 1]]))
    latents, pe = held.split((sizes.rank, sizes.rope), dim=-1)
    cache = DynamicCache()
    # It keeps k_pe de-interleaved: evens, then odds.
    cache.update(latents.clone(), torch.cat((pe[..., 0::2], pe[..., 1::2]), dim=-1), 0)

    def step() -> Tensor:
        out: Tensor = module(x, angles, None, past_key_values=cache)[0]
        cache.crop(-1)
        return out

    return step


def _golden(naive: MultiHeadLatentAttention, x: Tensor, held: Tensor) -> Golden:
    exact = copy.deepcopy(naive).double()
    return Golden(_step(exact, x.double(), exact._expand(held.double()))())


def _work_of(side: str, cell: Cell, *, sizes: LatentSizes) -> Work:
    latents, heads = sizes.rank + sizes.rope, cell.heads * (cell.head_dim + sizes.rope + sizes.value)
    return counts.latent_step(
        cell,
        embed_dim=sizes.embed_dim,
        rank=sizes.rank,
        rope=sizes.rope,
        value=sizes.value,
        absorbed=side == "absorbed",
        fresh=cell.keys if side == "transformers" else 1,
        cached=heads if side == "naive" else latents,
    )
