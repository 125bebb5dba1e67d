"""nn.TransformerEncoderLayer, post-LN or pre-LN."""

from collections.abc import Mapping
from typing import Any

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


REFERENCE = Reference("torch_encoder_layer", build, torch_mha.view, run)
