"""Whole encoder layers: attention, feed-forward of 4 E, two LayerNorms."""

from collections.abc import Mapping
from typing import Any

from harness.case import Case
from harness.variants.specs import MATMUL, VARIANTS, VariantSpec, resolve_head_dim
from harness.variants.specs.grouped import grouped_case_params, grouped_flops
from harness.variants.specs.latent import latent_case_params, latent_flops, resolve_latent

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


for _name, _title in (
    ("block_post_ln", "encoder layer, LayerNorm after each sub-layer (torch's default)"),
    ("block_pre_ln", "encoder layer, LayerNorm before each sub-layer"),
):
    VARIANTS.add(
        _name,
        VariantSpec(
            name=_name,
            title=_title,
            axes=frozenset(),
            phases=("prefill", "train"),
            resolve=_resolve_mha,
            params=lambda case: _rest_params(case) + grouped_case_params(case),
            kv_elements_per_token=None,
            flops=lambda case: _rest_flops(case) + grouped_flops(case),
            reference=lambda _: "torch_encoder_layer",
        ),
    )

VARIANTS.add(
    "block_mla",
    VariantSpec(
        name="block_mla",
        title="pre-LN encoder layer around MLA",
        axes=frozenset({"q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim"}),
        phases=("prefill", "train"),
        resolve=resolve_latent,
        params=lambda case: _rest_params(case) + latent_case_params(case),
        kv_elements_per_token=None,
        flops=lambda case: _rest_flops(case) + latent_flops(case),
        reference=lambda _: "mla_block",
        swap_options={"mode": "naive"},
    ),
)
