"""nn.MultiheadAttention and nn.TransformerEncoderLayer to harness's modules."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from harness.swaps.engine import Conversion, SwapError, WeightSource, convert_child, converts
from harness.variants.blocks import EncoderLayer
from harness.variants.mha import MultiHeadAttention


@converts(nn.MultiheadAttention)
def convert_mha(old: nn.MultiheadAttention, options: Mapping[str, Any]) -> Conversion:
    if not old._qkv_same_embed_dim or old.bias_k is not None or old.add_zero_attn or not old.batch_first:
        raise SwapError("only batch-first self-attention without kdim, vdim, bias_kv and zero_attn can be swapped yet")
    E = old.embed_dim
    has_bias = old.in_proj_bias is not None
    new = MultiHeadAttention(
        E,
        old.num_heads,
        bias=has_bias,
        dropout=old.dropout,
        kernel=options["kernel"],
        device=old.in_proj_weight.device,
        dtype=old.in_proj_weight.dtype,
    )
    weights = {}
    for kind in ("weight", "bias") if has_bias else ("weight",):
        for index, part in enumerate(("q_proj", "k_proj", "v_proj")):
            weights[f"{part}.{kind}"] = WeightSource(f"in_proj_{kind}", (index * E, (index + 1) * E))
        weights[f"out_proj.{kind}"] = WeightSource(f"out_proj.{kind}")
    return Conversion(new, weights)


@converts(nn.TransformerEncoderLayer)
def convert_encoder_layer(old: nn.TransformerEncoderLayer, options: Mapping[str, Any]) -> Conversion:
    attention = convert_child("self_attn", old.self_attn, convert_mha, options)
    known = {torch.nn.functional.relu: "relu", torch.nn.functional.gelu: "gelu"}
    if old.activation not in known:
        raise SwapError(f"activation {old.activation}: only relu and gelu are known")
    new = EncoderLayer(
        attention.module,
        old.linear1.in_features,
        old.linear1.out_features,
        norm_first=old.norm_first,
        activation=known[old.activation],
        dropout=old.dropout.p,
        norm_eps=old.norm1.eps,
        bias=old.linear1.bias is not None,
        device=old.linear1.weight.device,
        dtype=old.linear1.weight.dtype,
    )
    weights = {
        f"attention.{key}": WeightSource(f"self_attn.{source.name}", source.rows)
        for key, source in attention.weights.items()
    }
    weights |= {key: WeightSource(key) for key, _ in new.named_parameters() if not key.startswith("attention.")}
    return Conversion(new, weights)
