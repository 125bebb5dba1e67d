"""torch's own layers: nn.MultiheadAttention to a drop-in or a variant, nn.TransformerEncoderLayer to ours."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from harness.kernels.call import Kernel
from harness.swaps.converters import DROP_IN, VARIANT, Conversion, Request, SwapError, convert_child, converts
from harness.swaps.weights import WeightSource
from harness.variants.blocks import EncoderLayer
from harness.variants.dropin import EagerMultiheadAttention, EagerMultiheadAttentionWithInProj
from harness.variants.gqa import MultiHeadAttention
from harness.variants.multihead import DropInAttention

PARTS = ("q_proj", "k_proj", "v_proj")
IN_PARAMETERS = ("in_proj_weight", "in_proj_bias", *(f"{part}_weight" for part in PARTS))
POLICIES = ("dead_rows", "fast_path")  # of a drop-in: torch has none of them, so they go along from drop-in to drop-in


@converts(nn.MultiheadAttention, to=DROP_IN, options=("use_in_proj", *POLICIES))
def convert_to_drop_in(old: nn.MultiheadAttention, kernel: Kernel, request: Request) -> Conversion:
    packed = bool(request.options.get("use_in_proj", False))
    kind = EagerMultiheadAttentionWithInProj if packed else EagerMultiheadAttention
    new = drop_in_like(old, kind, kernel, request.options)
    if packed:
        return Conversion(new, _take_in_projection(old, new))
    if parametrize.is_parametrized(old):
        names = ", ".join(old.parametrizations)  # type: ignore[arg-type]
        raise SwapError(f"its {names} is parametrized: split, it could not be; swap with use_in_proj=True")
    return Conversion(new, split_sources(old))


@converts(EagerMultiheadAttention, EagerMultiheadAttentionWithInProj, to=DROP_IN, options=("use_in_proj", *POLICIES))
def convert_again(old: DropInAttention, kernel: Kernel, request: Request) -> Conversion:
    """Another kernel for what was swapped before."""
    packed = isinstance(old, EagerMultiheadAttentionWithInProj)
    if request.options.get("use_in_proj", packed) != packed:
        raise SwapError(f'is {type(old).__name__}: swap to="{"split" if packed else "fused"}" instead of use_in_proj')
    if parametrize.is_parametrized(old):
        raise SwapError("is parametrized and was swapped before: undo that swap first")
    new = drop_in_like(old, type(old), kernel, request.options)
    if packed:
        held = [name for name in IN_PARAMETERS if old._parameters.get(name) is not None]
        return Conversion(new, {name: WeightSource(name) for name in held})
    for part in PARTS:
        setattr(new, part, getattr(old, part))
    return Conversion(new, {})


def drop_in_like(
    old: nn.MultiheadAttention | DropInAttention,
    kind: type[DropInAttention],
    kernel: Kernel,
    options: Mapping[str, Any],
) -> DropInAttention:
    """With the old module's own output projection and bias tokens; its input projections are still to come."""
    policies = {name: getattr(old, name) for name in POLICIES} if isinstance(old, DropInAttention) else {}
    policies |= {name: options[name] for name in POLICIES if name in options}
    new = kind(
        old.embed_dim,
        old.num_heads,
        dropout=old.dropout,
        bias=old.in_proj_bias is not None,
        add_zero_attn=old.add_zero_attn,
        kdim=old.kdim,
        vdim=old.vdim,
        batch_first=old.batch_first,
        device="meta",  # no memory and no random numbers: every weight comes from the old module
        dtype=old.out_proj.weight.dtype,
        kernel=kernel,
        **policies,
    )
    new.out_proj = old.out_proj  # the module itself, with its hooks and parametrizations
    new.bias_k, new.bias_v = old.bias_k, old.bias_v
    return new


def split_sources(old: nn.MultiheadAttention | DropInAttention) -> dict[str, WeightSource]:
    """Rows of torch's packed projection as three."""
    weights = {}
    for part, rows in thirds(old.embed_dim):
        whole = WeightSource(f"{part}_weight")
        weights[f"{part}.weight"] = whole if old.in_proj_weight is None else WeightSource("in_proj_weight", rows)
        if old.in_proj_bias is not None:
            weights[f"{part}.bias"] = WeightSource("in_proj_bias", rows)
    return weights


def thirds(embed_dim: int) -> list[tuple[str, tuple[int, int]]]:
    """Which rows of a packed projection are each part's."""
    return [(part, (index * embed_dim, (index + 1) * embed_dim)) for index, part in enumerate(PARTS)]


def _take_in_projection(old: nn.MultiheadAttention, new: nn.Module) -> dict[str, WeightSource]:
    """Parameters under the same names; a parametrization moves over whole."""
    moved = [name for name in IN_PARAMETERS if parametrize.is_parametrized(old, name)]
    if parametrize.is_parametrized(old):
        for name in moved:
            delattr(new, name)
        new.parametrizations = old.parametrizations
        parametrize._inject_new_class(new)
        for name in moved:
            parametrize._inject_property(new, name)
    return {name: WeightSource(name) for name in IN_PARAMETERS if name not in moved and getattr(old, name) is not None}


@converts(nn.MultiheadAttention, to=VARIANT)
def convert_to_variant(old: nn.MultiheadAttention, kernel: Kernel, request: Request) -> Conversion:
    if not old._qkv_same_embed_dim or old.bias_k is not None or old.add_zero_attn or not old.batch_first:
        raise SwapError("only batch-first self-attention without kdim, vdim, bias_kv and zero_attn has a variant")
    new = MultiHeadAttention(
        old.embed_dim,
        old.num_heads,
        bias=old.in_proj_bias is not None,
        dropout=old.dropout,
        kernel=kernel,
        device="meta",
        dtype=old.in_proj_weight.dtype,
    )
    weights = split_sources(old)
    weights |= {f"out_proj.{key}": WeightSource(f"out_proj.{key}") for key, _ in old.out_proj.named_parameters()}
    return Conversion(new, weights)


@converts(nn.TransformerEncoderLayer, to=VARIANT)
def convert_encoder_layer(old: nn.TransformerEncoderLayer, kernel: Kernel, request: Request) -> Conversion:
    attention = convert_child("self_attn", old.self_attn, convert_to_variant, kernel, request)
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
        device="meta",
        dtype=old.linear1.weight.dtype,
    )
    weights = {
        f"attention.{key}": WeightSource(f"self_attn.{source.name}", source.rows)
        for key, source in attention.weights.items()
    }
    weights |= {key: WeightSource(key) for key, _ in new.named_parameters() if not key.startswith("attention.")}
    return Conversion(new, weights)
