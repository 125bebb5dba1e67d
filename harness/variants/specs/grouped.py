"""MHA, MQA and GQA: H query heads that share H_kv key/value heads."""

from collections.abc import Mapping
from typing import Any

from harness.case import PHASES, Case
from harness.variants.specs import MATMUL, VARIANTS, Impossible, VariantSpec, resolve_head_dim


def grouped_params(embed_dim: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool) -> int:
    weights = 2 * embed_dim * heads * head_dim + 2 * embed_dim * kv_heads * head_dim
    biases = heads * head_dim + 2 * kv_heads * head_dim + embed_dim
    return weights + (biases if bias else 0)


def grouped_kv_elements(kv_heads: int, head_dim: int) -> int:
    return 2 * kv_heads * head_dim


def grouped_flops(case: Case) -> int:
    """Fewer kv heads save projections and cache traffic, never QK^T or PV: those are done per query head."""
    assert case.kv_heads is not None
    queries = 1 if case.phase == "decode" else case.seq_len
    projections = grouped_params(case.embed_dim, case.heads, case.kv_heads, case.head_dim, bias=False)
    forward = case.batch * queries * MATMUL * (projections + 2 * case.heads * case.kv_len * case.head_dim)
    return 3 * forward if case.phase == "train" else forward


def grouped_case_params(case: Case) -> int:
    assert case.kv_heads is not None
    return grouped_params(case.embed_dim, case.heads, case.kv_heads, case.head_dim, bias=case.bias)


def _kv_elements(case: Case) -> int:
    assert case.kv_heads is not None
    return grouped_kv_elements(case.kv_heads, case.head_dim)


def _reference(case: Case) -> str:
    # nn.MultiheadAttention has no KV cache and no head_dim of its own: there the cached SDPA module stands in.
    if case.variant == "mha" and case.phase != "decode" and case.heads * case.head_dim == case.embed_dim:
        return "torch_mha"
    return "sdpa"


def _mha(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"kv_heads": raw["heads"], "head_dim": resolve_head_dim(raw)}


def _mqa(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"kv_heads": 1, "head_dim": resolve_head_dim(raw)}


def _gqa(raw: Mapping[str, Any]) -> dict[str, Any]:
    heads, kv_heads = raw["heads"], raw["kv_heads"]
    if kv_heads is None:
        raise Impossible("kv_heads", None, "gqa needs the kv_heads axis")
    if heads % kv_heads:
        raise Impossible("kv_heads", kv_heads, f"must divide heads ({heads})")
    return {"kv_heads": kv_heads, "head_dim": resolve_head_dim(raw)}


for _name, _title, _axes, _resolve in (
    ("mha", "multi-head: every query head has its own key/value head", frozenset(), _mha),
    ("mqa", "multi-query: all query heads share one key/value head", frozenset(), _mqa),
    ("gqa", "grouped-query: heads/kv_heads query heads share a key/value head", frozenset({"kv_heads"}), _gqa),
):
    VARIANTS.add(
        _name,
        VariantSpec(
            name=_name,
            title=_title,
            axes=_axes,
            phases=PHASES,
            resolve=_resolve,
            params=grouped_case_params,
            kv_elements_per_token=_kv_elements,
            flops=grouped_flops,
            reference=_reference,
        ),
    )
