"""Whole encoder layers: attention, feed-forward of 4 E, two LayerNorms."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.case import Case
from harness.variants.specs import MATMUL, VARIANTS, VariantSpec, resolve_head_dim
from harness.variants.specs import grouped as grouped  # registers mha
from harness.variants.specs import latent as latent  # registers mla_naive

FEEDFORWARD_FACTOR = 4


def _rest_params(case: Case) -> int:
    d, f = case.embed_dim, FEEDFORWARD_FACTOR * case.embed_dim
    return 2 * d * f + 2 * d + (f + d + 2 * d if case.bias else 0)


def _rest_flops(case: Case) -> int:
    forward = case.batch * case.seq_len * MATMUL * 2 * case.embed_dim * FEEDFORWARD_FACTOR * case.embed_dim
    return 3 * forward if case.phase == "train" else forward


def _resolve_mha(raw: Mapping[str, Any]) -> dict[str, Any]:
    # nn.TransformerEncoderLayer fixes head_dim, so a given one does not apply.
    return {"kv_heads": raw["heads"], "head_dim": resolve_head_dim({**raw, "head_dim": None})}


def _add(name: str, title: str, inner: VariantSpec, reference: str) -> None:
    """The variant `inner`, with the rest of an encoder layer around it."""
    block = replace(
        inner,
        name=name,
        title=title,
        phases=("prefill", "train"),
        params=lambda case: _rest_params(case) + inner.params(case),
        kv_elements_per_token=None,
        flops=lambda case: _rest_flops(case) + inner.flops(case),
        reference=lambda _: reference,
    )
    VARIANTS.add(name, block)


_MHA = replace(VARIANTS["mha"], resolve=_resolve_mha)
_add("block_post_ln", "encoder layer, LayerNorm after each sub-layer (torch's default)", _MHA, "torch_encoder_layer")
_add("block_pre_ln", "encoder layer, LayerNorm before each sub-layer", _MHA, "torch_encoder_layer")
_add("block_mla", "pre-LN encoder layer around MLA", VARIANTS["mla_naive"], "mla_block")
