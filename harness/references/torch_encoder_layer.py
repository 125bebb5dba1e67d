"""nn.TransformerEncoderLayer, post-LN or pre-LN."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from harness.case import Case
from harness.references import Reference, torch_mha
from harness.variants.specs.blocks import FEEDFORWARD_FACTOR


def build(case: Case) -> nn.Module:
    return nn.TransformerEncoderLayer(
        case.embed_dim,
        case.heads,
        dim_feedforward=FEEDFORWARD_FACTOR * case.embed_dim,
        dropout=0.0,
        activation="gelu",  # relu's gradient jumps: a pre-activation near 0 flips with the last bit
        batch_first=True,
        norm_first=case.variant == "block_pre_ln",
        bias=case.bias,
    )


def run(
    module: nn.Module, x: Tensor, view: Mapping[str, Any], cache: Any, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    return module(x, src_mask=view["attn_mask"], is_causal=view["is_causal"]), None


def run_rows(module: nn.Module, x: Tensor, rows: Tensor, view: Mapping[str, Any]) -> Tensor:
    """By the layer's own pieces, as its forward puts them together."""
    assert isinstance(module, nn.TransformerEncoderLayer)
    own = x[:, rows]
    if module.norm_first:
        own = own + torch_mha.run_rows(module.self_attn, module.norm1(x), rows, view)
        return own + feed_forward(module, module.norm2(own))
    own = module.norm1(own + torch_mha.run_rows(module.self_attn, x, rows, view))
    out: Tensor = module.norm2(own + feed_forward(module, own))
    return out


def feed_forward(module: nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
    out: Tensor = module.linear2(F.gelu(module.linear1(x)))
    return out


REFERENCE = Reference("torch_encoder_layer", build, torch_mha.view, run, run_rows=run_rows)
