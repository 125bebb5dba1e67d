"""The sizes of real models, as published, and the kinds of attention that each could have.

A model's own kind comes first, then MHA, GQA, MQA and MLA of the same width. Everything else about them is arithmetic.
"""

from dataclasses import dataclass
from typing import Any

from harness.case import Case
from harness.errors import BadInput
from harness.registry import Registry
from harness.variants.specs import VARIANTS, Impossible

GROUPS = (8, 4)  # key/value heads of the GQA candidates


@dataclass(frozen=True, slots=True)
class Model:
    """`kv_heads` is None for latent attention, the ranks for the others. `head_dim` is N in a latent model."""

    name: str
    embed_dim: int
    layers: int
    heads: int
    head_dim: int
    kv_heads: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    rope_head_dim: int | None = None
    v_head_dim: int | None = None
    qk_norm: bool = False  # one more weight for each channel of a q and a k head
    window: int | None = None  # keys that any layer keeps; None: all of them
    params: int | None = None  # of the whole model; None: not known
    existing: bool = True  # False: to be designed, so no variant is the one it has

    @property
    def is_latent(self) -> bool:
        return self.kv_lora_rank is not None


MODELS: Registry[Model] = Registry("model")


def _deepseek(name: str, embed_dim: int, layers: int, heads: int, q_lora_rank: int | None, params: int) -> Model:
    ranks = (q_lora_rank, 512, 64, 128)  # of queries and of keys and values, then the channels with RoPE and of values
    return Model(name, embed_dim, layers, heads, 128, None, *ranks, params=params)


# Llama, Qwen2.5 and Mistral: attention is counted without biases (Qwen2.5 has 10,240 a layer).
for _model in (
    Model("llama-2-7b", 4096, 32, 32, 128, 32, params=6_738_415_616),
    Model("llama-2-70b", 8192, 80, 64, 128, 8, params=68_976_648_192),
    Model("llama-3-8b", 4096, 32, 32, 128, 8, params=8_030_261_248),
    Model("llama-3.1-70b", 8192, 80, 64, 128, 8, params=70_553_706_496),
    Model("llama-3.1-405b", 16384, 126, 128, 128, 8, params=405_853_388_800),
    # Version 0.1; the later ones have no window (`--window none`).
    Model("mistral-7b", 4096, 32, 32, 128, 8, window=4096, params=7_241_732_096),
    Model("qwen2.5-72b", 8192, 80, 64, 128, 8, params=72_706_203_648),
    Model("qwen3-8b", 4096, 36, 32, 128, 8, qk_norm=True, params=8_190_735_360),
    _deepseek("deepseek-v2-lite", 2048, 27, 16, None, 15_706_484_224),
    _deepseek("deepseek-v2", 5120, 60, 128, 1536, 235_741_434_880),
    _deepseek("deepseek-v3", 7168, 61, 128, 1536, 671_026_419_200),
):
    MODELS.add(_model.name, _model)


@dataclass(frozen=True, slots=True)
class Candidate:
    """`case` is one token of one layer; `kv_heads` counts the key/value heads that queries tell apart."""

    label: str
    case: Case
    kv_heads: int
    own: bool = False
    extra_params: int = 0  # what the variant's formula does not know: the norms of q and k

    @property
    def attention_params(self) -> int:
        """Of one layer, without biases."""
        return VARIANTS[self.case.variant].params(self.case) + self.extra_params

    @property
    def bytes_per_token_layer(self) -> int:
        cached = VARIANTS[self.case.variant].kv_cache_bytes(self.case)
        assert cached is not None
        return cached


def candidates(model: Model, dtype: str) -> list[Candidate]:
    """GQA with as many key/value heads as the model has, or that do not divide its heads, is left out."""
    own = [_own(model, dtype)] if model.existing else []
    groups = [f"gqa-{number}" for number in GROUPS if number < model.heads and not model.heads % number]
    labels = [label for label in ("mha", *groups, "mqa") if label not in [one.label for one in own]]
    latent = [] if model.existing and model.is_latent else [_latent(model, dtype)]
    return [*own, *(_grouped(model, label, dtype) for label in labels), *latent]


def own_attention_params(model: Model) -> int:
    """Of one layer as the model has it."""
    return _own(model, "float32").attention_params  # a count: the same in every dtype


def _own(model: Model, dtype: str) -> Candidate:
    if model.is_latent:
        return _latent(model, dtype, own=True)
    names = {1: "mqa", model.heads: "mha", None: "mha"}  # one head of its own is MHA
    return _grouped(model, names.get(model.kv_heads, f"gqa-{model.kv_heads}"), dtype, own=True)


def _grouped(model: Model, label: str, dtype: str, *, own: bool = False) -> Candidate:
    """`label` is mha, mqa, or gqa and its key/value heads."""
    variant, _, kv_heads = label.partition("-")
    case = _case(model, variant, dtype, kv_heads=int(kv_heads) if kv_heads else None, head_dim=model.head_dim)
    assert case.kv_heads is not None
    return Candidate(label, case, case.kv_heads, own, 2 * model.head_dim if model.qk_norm else 0)


def _latent(model: Model, dtype: str, *, own: bool = False) -> Candidate:
    """Ranks that the model does not have follow DeepSeek's proportions: r = 4 N, R = N / 2, V = N."""
    ranks = ("q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim")
    given = {name: getattr(model, name) for name in ranks}
    case = _case(model, "mla_absorbed", dtype, head_dim=model.head_dim, **given)
    return Candidate("mla", case, case.heads, own)


def _case(model: Model, variant: str, dtype: str, **axes: Any) -> Case:
    raw = dict.fromkeys(("kv_heads", "q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim"))
    raw |= {"embed_dim": model.embed_dim, "heads": model.heads, **axes}
    try:
        resolved = VARIANTS[variant].resolve(raw)
    except Impossible as error:
        raise BadInput(f"{model.name}: {error}") from error
    return Case(
        variant=variant,
        kernel="grouped",
        embed_dim=model.embed_dim,
        heads=model.heads,
        seq_len=1,
        batch=1,
        mask="none",
        dtype=dtype,
        phase="decode",
        bias=False,
        **resolved,
    )
