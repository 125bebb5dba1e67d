"""GQA with something around its softmax: a gate, a difference of two, sinks and a window, another layer's keys.

All have rotary positions over whole heads, in halves (channel i turns with i + D / 2), as transformers' models have.
"""

from collections.abc import Callable, Mapping
from typing import Any

from harness.case import PHASES, Case
from harness.variants.specs import VARIANTS, Impossible, VariantSpec
from harness.variants.specs.grouped import _gqa, grouped_case_params, grouped_flops, grouped_kv_elements

WINDOW = 32  # keys that a query of `sinks_sliding` sees, itself included
CAUSAL = ("causal", "causal_padding")


def _resolve(raw: Mapping[str, Any]) -> dict[str, Any]:
    resolved = _gqa(raw)
    if resolved["head_dim"] % 2:
        raise Impossible("head_dim", resolved["head_dim"], "must be even: RoPE turns pairs of channels")
    return resolved


def _resolve_differential(raw: Mapping[str, Any]) -> dict[str, Any]:
    resolved = _resolve(raw)
    if resolved["kv_heads"] % 2:
        raise Impossible("kv_heads", resolved["kv_heads"], "must be even: half of them are subtracted from the others")
    return resolved


def _elements(case: Case) -> int:
    assert case.kv_heads is not None
    return grouped_kv_elements(case.kv_heads, case.head_dim)


def _gated_params(case: Case) -> int:
    gates = case.embed_dim * case.heads * case.head_dim + (case.heads * case.head_dim if case.bias else 0)
    return grouped_case_params(case) + gates + 2 * case.head_dim


def _shared_params(case: Case) -> int:
    """Two layers: the second has queries and an output alone, and each a norm for what it makes of q and k."""
    wide = case.heads * case.head_dim
    second = 2 * case.embed_dim * wide + (wide + case.embed_dim if case.bias else 0)
    return grouped_case_params(case) + second + 3 * case.head_dim


def _sliding_bytes(case: Case) -> int:
    return case.batch * min(case.kv_len, WINDOW) * _elements(case) * case.item_bytes


def _shared_flops(case: Case) -> int:
    assert case.kv_heads is not None
    queries = 1 if case.phase == "decode" else case.seq_len
    kv = 2 * 2 * case.embed_dim * case.kv_heads * case.head_dim * queries * case.batch
    return 2 * grouped_flops(case) - kv * (3 if case.phase == "train" else 1)


def _differential_flops(case: Case) -> int:
    """Values of both halves go with each key."""
    queries = 1 if case.phase == "decode" else case.seq_len
    more = 2 * case.batch * queries * case.heads * case.kv_len * case.head_dim
    return grouped_flops(case) + more * (3 if case.phase == "train" else 1)


def _gated_flops(case: Case) -> int:
    queries = 1 if case.phase == "decode" else case.seq_len
    gates = 2 * case.embed_dim * case.heads * case.head_dim * queries * case.batch
    return grouped_flops(case) + gates * (3 if case.phase == "train" else 1)


def _add(name: str, title: str, params: Callable[[Case], int], **other: Any) -> None:
    facts: dict[str, Any] = {"resolve": _resolve, "flops": grouped_flops, "kv_elements_per_token": _elements, **other}
    VARIANTS.add(
        name,
        VariantSpec(
            name=name,
            title=title,
            axes=frozenset({"kv_heads"}),
            phases=PHASES,
            params=params,
            reference=lambda _: "composed",
            core="composed",
            **facts,
        ),
    )


_add("gated_gqa", "Qwen3-Next's: each head's output times a sigmoid gate; q and k normed", _gated_params,
     flops=_gated_flops)  # fmt: skip
_add("differential", "the difference of two softmaxes over the same values, normed (DiffLlama)",
     lambda case: grouped_case_params(case) + 4 * case.head_dim,
     resolve=_resolve_differential, flops=_differential_flops)  # fmt: skip
_add("sinks", "gpt-oss's: a logit for each head joins the softmax and carries no value",
     lambda case: grouped_case_params(case) + case.heads, masks=CAUSAL)  # fmt: skip
_add("sinks_sliding", f"the same in a window of {WINDOW} keys, which are all that its cache keeps",
     lambda case: grouped_case_params(case) + case.heads, masks=("causal",), state_bytes=_sliding_bytes)  # fmt: skip
_add("kv_shared", "two layers, the second with the first's keys and values (Gemma 3n)", _shared_params,
     flops=_shared_flops)  # fmt: skip
