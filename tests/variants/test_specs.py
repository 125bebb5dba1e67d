"""The arithmetic of each variant: against published models, real modules, transformers' classes and torch's counter."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from harness.case import Case
from harness.cell.build import build_pair
from harness.cell.side import run_steps
from harness.kernels.front import find_kernel
from harness.variants.gqa import GroupedQueryAttention
from harness.variants.mla import MultiHeadLatentAttention
from harness.variants.specs import VARIANTS, Impossible, VariantSpec, resolve_head_dim
from harness.variants.specs.grouped import grouped_kv_elements, grouped_params
from harness.variants.specs.latent import LatentSizes, latent_params

BF16_BYTES = 2


@dataclass(frozen=True)
class Published:
    """One row of the table that every model's paper and config agree on. MLA rows have a rank and no kv_heads."""

    name: str
    embed_dim: int
    layers: int
    heads: int
    kv_heads: int | None
    head_dim: int
    layer_bytes: int  # KV cache, per token and layer, bf16
    token_bytes: int  # KV cache, per token, all layers
    params: int  # attention, per layer
    qk_norm: bool = False
    q_rank: int | None = None

    def module(self, **options: Any) -> nn.Module:
        options |= {"device": "meta", "dtype": torch.bfloat16}
        if self.kv_heads is not None:
            return GroupedQueryAttention(self.embed_dim, self.heads, self.kv_heads, head_dim=self.head_dim, **options)
        sizes: dict[str, Any] = {
            "kv_lora_rank": 512,
            "nope_head_dim": self.head_dim,
            "rope_head_dim": 64,
            "v_head_dim": 128,
        }
        return MultiHeadLatentAttention(self.embed_dim, self.heads, q_lora_rank=self.q_rank, **sizes, **options)

    @property
    def norm_params(self) -> int:
        """Qwen3 norms each head of q and of k: two RMSNorms of head_dim. Our modules have none, so they count apart."""
        return 2 * self.head_dim if self.qk_norm else 0


GROUPED = (
    Published("Llama-2-7B", 4096, 32, 32, 32, 128, 16384, 524288, 67_108_864),
    Published("Llama-2-70B", 8192, 80, 64, 8, 128, 4096, 327680, 150_994_944),
    Published("Llama-3.1-70B", 8192, 80, 64, 8, 128, 4096, 327680, 150_994_944),
    Published("Qwen2.5-72B", 8192, 80, 64, 8, 128, 4096, 327680, 150_994_944),
    Published("Llama-3-8B", 4096, 32, 32, 8, 128, 4096, 131072, 41_943_040),
    Published("Mistral-7B", 4096, 32, 32, 8, 128, 4096, 131072, 41_943_040),
    Published("Llama-3.1-405B", 16384, 126, 128, 8, 128, 4096, 516096, 570_425_344),
    Published("Qwen3-8B", 4096, 36, 32, 8, 128, 4096, 147456, 41_943_296, qk_norm=True),
)
LATENT = (
    Published("DeepSeek-V2-Lite", 2048, 27, 16, None, 128, 1152, 31104, 13_763_072),
    Published("DeepSeek-V2", 5120, 60, 128, None, 128, 1152, 69120, 149_227_520, q_rank=1536),
    Published("DeepSeek-V3", 7168, 61, 128, None, 128, 1152, 70272, 187_107_328, q_rank=1536),
)


def named(model: Published) -> str:
    return model.name


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("model", GROUPED, ids=named)
def test_published_grouped_models_by_formula(model: Published) -> None:
    assert model.kv_heads is not None
    params = grouped_params(model.embed_dim, model.heads, model.kv_heads, model.head_dim, bias=False)
    assert params + model.norm_params == model.params
    assert grouped_kv_elements(model.kv_heads, model.head_dim) * BF16_BYTES == model.layer_bytes
    assert model.layer_bytes * model.layers == model.token_bytes


@pytest.mark.parametrize("model", LATENT, ids=named)
def test_published_latent_models_by_formula(model: Published) -> None:
    sizes = LatentSizes(model.heads, 128, 64, 128, 512)
    assert latent_params(model.embed_dim, sizes, model.q_rank) == model.params
    assert sizes.latent_kv_elements * BF16_BYTES == model.layer_bytes
    assert model.layer_bytes * model.layers == model.token_bytes
    # What the latent saves: expanded, the cache of V3 is 71 times as large.
    assert sizes.expanded_kv_elements == model.heads * 320


@pytest.mark.parametrize("model", [*GROUPED, *LATENT], ids=named)
def test_published_models_as_real_modules_on_the_meta_device(model: Published) -> None:
    module = model.module()
    assert all(p.is_meta for p in module.parameters())
    assert count(module) + model.norm_params == model.params
    tokens, batch = 3, 2
    cache = module.new_cache(tokens)  # type: ignore[operator]
    x = torch.empty(batch, tokens, model.embed_dim, device="meta", dtype=torch.bfloat16)
    assert module(x, causal=True, cache=cache).shape == x.shape
    held = sum(t.numel() * t.element_size() for t in cache.streams())
    assert held == model.layer_bytes * tokens * batch
    assert cache.allocated_bytes == held
    assert module.kv_elements_per_token() * BF16_BYTES == model.layer_bytes  # type: ignore[operator]


@pytest.mark.parametrize("model", LATENT, ids=named)
def test_published_latent_models_with_an_expanded_cache(model: Published) -> None:
    module = model.module(mode="naive")
    cache = module.new_cache(2)  # type: ignore[operator]
    module(torch.empty(1, 2, model.embed_dim, device="meta", dtype=torch.bfloat16), cache=cache)
    held = sum(t.numel() for t in cache.streams())
    assert held == 2 * LatentSizes(model.heads, 128, 64, 128, 512).expanded_kv_elements
    assert count(module) == model.params


@pytest.mark.parametrize("model", GROUPED, ids=named)
def test_parameters_equal_transformers_grouped_classes(model: Published) -> None:
    from transformers import LlamaConfig, Qwen3Config
    from transformers.models.llama.modeling_llama import LlamaAttention
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

    config_class, attention_class = (Qwen3Config, Qwen3Attention) if model.qk_norm else (LlamaConfig, LlamaAttention)
    config = config_class(
        hidden_size=model.embed_dim,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        num_hidden_layers=1,
    )
    with torch.device("meta"):
        theirs = attention_class(config, layer_idx=0)
    assert count(theirs) == model.params
    assert count(theirs) == count(model.module()) + model.norm_params


@pytest.mark.parametrize("model", LATENT, ids=named)
def test_parameters_equal_transformers_deepseek(model: Published) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    config = DeepseekV3Config(
        hidden_size=model.embed_dim,
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads,
        q_lora_rank=model.q_rank,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_hidden_layers=1,
    )
    with torch.device("meta"):
        theirs = DeepseekV3Attention(config, layer_idx=0)
    assert count(theirs) == model.params == count(model.module())
    shapes = {tuple(p.shape) for p in theirs.parameters()}
    assert shapes == {tuple(p.shape) for p in model.module().parameters()}


def test_head_dim_is_not_embed_dim_over_heads() -> None:
    """Qwen3-0.6B: d = 1024, 16 heads of 128, so q is twice as wide as the model."""
    raw = {"embed_dim": 1024, "heads": 16, "head_dim": 128, "kv_heads": 8}
    assert VARIANTS["gqa"].resolve(raw) == {"kv_heads": 8, "head_dim": 128}
    module = GroupedQueryAttention(1024, 16, 8, head_dim=128, device="meta")
    assert module.q_proj.weight.shape == (2048, 1024)
    assert module.k_proj.weight.shape == (1024, 1024)
    assert module.out_proj.weight.shape == (1024, 2048)
    assert count(module) == grouped_params(1024, 16, 8, 128, bias=False) == 2 * 1024 * 2048 + 2 * 1024 * 1024
    assert module.kv_elements_per_token() == grouped_kv_elements(8, 128) == 2048
    derived = {**raw, "head_dim": None}
    assert resolve_head_dim(derived) == 64  # only where none is given


@pytest.mark.parametrize("heads", [1, 2, 4, 16, 64])
def test_mqa_saves_half_of_all_but_one_head(heads: int) -> None:
    """(1 - 1/h) / 2 of the attention parameters: 47 % at 16 heads."""
    head_dim = 8
    embed_dim = heads * head_dim
    full = count(GroupedQueryAttention(embed_dim, heads, heads, device="meta"))
    shared = count(GroupedQueryAttention(embed_dim, heads, 1, device="meta"))
    assert (full - shared) * 2 * heads == full * (heads - 1)
    if heads == 16:
        assert round(100 * (full - shared) / full) == 47


# Small cells of every variant: the formulas against what really runs.
RAW = {"embed_dim": 32, "heads": 4, "kv_heads": 2}
SEQ_LEN, BATCH = 9, 2


def small_case(variant: str, phase: str, *, dtype: str = "float32", seq_len: int = SEQ_LEN, **axes: Any) -> Case:
    spec = VARIANTS[variant]
    raw = dict.fromkeys(("head_dim", "q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim")) | RAW | axes
    geometry: dict[str, Any] = {"embed_dim": raw["embed_dim"], "heads": raw["heads"]} | spec.resolve(raw)
    return Case(
        variant=variant,
        kernel="eager",
        seq_len=seq_len,
        batch=BATCH,
        mask=(VARIANTS[variant].masks or ("none",))[0],
        dtype=dtype,
        phase=phase,
        bias=axes.get("bias", True),
        **geometry,
    )


def cells() -> list[Any]:
    found = []
    for variant in VARIANTS:
        for phase in VARIANTS[variant].phases:
            for bias in (True, False):
                axes: list[dict[str, Any]] = [{}]
                if "block" not in variant and bias:
                    axes.append({"head_dim": 12})
                if "mla" in variant and bias:
                    sizes = {"q_lora_rank": 6, "kv_lora_rank": 10, "rope_head_dim": 6, "v_head_dim": 5}
                    # Heads so narrow that even a decode step is cheaper decompressed than absorbed. (Not narrower: a
                    # sum of one term is a multiplication to einsum, and the counter counts matrix products alone.)
                    narrow = {"head_dim": 2, "v_head_dim": 1, "rope_head_dim": 2, "kv_lora_rank": 10, "seq_len": 2}
                    axes += [{"q_lora_rank": 6}, sizes, narrow]
                for index, extra in enumerate(axes):
                    case = small_case(variant, phase, bias=bias, **extra)
                    found.append(pytest.param(case, id=f"{variant}-{phase}-{'bias' if bias else 'plain'}-{index}"))
    return found


@pytest.mark.parametrize("case", cells())
def test_flops_parameters_and_cache_equal_what_runs(case: Case) -> None:
    """torch's counter sees every matrix product of the eager candidate; training: forward and backward, x included."""
    spec = VARIANTS[case.variant]
    pair = build_pair(case, find_kernel("eager"), seed=0)
    side = pair.candidate
    assert count(side.module) == spec.params(case) == count(pair.reference.module)

    x = torch.randn(BATCH, case.seq_len, case.embed_dim)
    if spec.core != "recurrence" or case.phase != "train":  # a triangular system has its own way back
        assert counted_flops(pair, case, x) == spec.flops(case)

    if not spec.keeps_cache or case.phase == "train":
        assert spec.kv_cache_bytes(case) is None
        return
    assert side.new_cache is not None
    with torch.no_grad():
        if case.phase == "decode":
            _, cache = run_steps(side, pair.steps, x)
        else:
            cache = side.new_cache(case.kv_len)
            side.forward(side.module, x, side.views[0], cache, False)
    assert cache.length == case.kv_len
    assert cache.allocated_bytes == spec.kv_cache_bytes(case)


def counted_flops(pair: Any, case: Case, x: torch.Tensor) -> int:
    """One prefill, one training step, or the last one-token step of a decode."""
    side = pair.candidate
    counter = FlopCounterMode(display=False)
    if case.phase == "train":
        leaf = x.requires_grad_()
        with counter:
            out, _ = side.forward(side.module, leaf, side.views[0], None, False)
            out.backward(torch.randn_like(out))  # the counter's module tracker refuses autograd.grad
        assert leaf.grad is not None
    elif case.phase == "prefill":
        with torch.no_grad(), counter:
            side.forward(side.module, x, side.views[0], None, False)
    else:
        with torch.no_grad():
            _, cache = run_steps(side, pair.steps, x)
            if hasattr(cache, "crop"):  # a state is as it is
                cache.crop(case.kv_len - 1)
            with counter:
                side.forward(side.module, x[:, -1:], side.views[-1], cache, False)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("variant", ["mla", "mla_absorbed", "mla_naive"])
def test_flops_of_deepseek_v3_at_4096_tokens_on_the_meta_device(variant: str, phase: str) -> None:
    """Full size, no memory: the counter runs over meta tensors."""
    model, keys = LATENT[-1], 4096
    mode = VARIANTS[variant].swap_options["mode"]
    module = model.module(mode=mode)
    case = small_case(
        variant,
        phase,
        embed_dim=model.embed_dim,
        heads=model.heads,
        head_dim=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        rope_head_dim=64,
        v_head_dim=128,
        dtype="bfloat16",
        seq_len=keys,
    )
    cache = module.new_cache(keys)  # type: ignore[operator]
    x = torch.empty(BATCH, keys, model.embed_dim, device="meta", dtype=torch.bfloat16)
    counter = FlopCounterMode(display=False)
    with torch.no_grad():
        if phase == "decode":
            module(x[:, 1:], cache=cache)
            x = x[:, :1]
        with counter:
            module(x, cache=cache)
    assert counter.get_total_flops() == VARIANTS[variant].flops(case)


def test_fewer_kv_heads_save_projections_never_scores() -> None:
    scores = 2 * BATCH * SEQ_LEN * 2 * 4 * SEQ_LEN * 8  # QK^T and PV: 2 L S D per query head
    for variant in ("mha", "mqa", "gqa"):
        case = small_case(variant, "prefill")
        assert case.kv_heads is not None
        projections = grouped_params(32, 4, case.kv_heads, 8, bias=False)
        assert VARIANTS[variant].flops(case) - 2 * BATCH * SEQ_LEN * projections == scores


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("variant", ["mha", "mqa", "gqa", "mla", "mla_absorbed", "mla_naive"])
def test_cache_bytes_in_every_dtype(variant: str, dtype: str) -> None:
    case = small_case(variant, "decode", dtype=dtype)
    pair = build_pair(case, find_kernel("eager"), seed=0)
    x = torch.randn(BATCH, SEQ_LEN, 32).to(getattr(torch, dtype))
    with torch.no_grad():
        _, cache = run_steps(pair.candidate, pair.steps, x)
    assert cache.allocated_bytes == VARIANTS[variant].kv_cache_bytes(case)
    assert all(t.dtype == getattr(torch, dtype) for t in cache.streams())


def test_a_cache_outgrown_occupies_more_than_the_formula() -> None:
    """Why the formula is about a cache of the right capacity, and why the measurement reads storages."""
    module = GroupedQueryAttention(32, 4, 2)
    cache = module.new_cache(4)
    with torch.no_grad():
        module(torch.randn(1, 5, 32), cache=cache)
        module(torch.randn(1, 1, 32), cache=cache)
    assert cache.length == 6
    assert cache.allocated_bytes > 6 * module.kv_elements_per_token() * 4
    assert sum(t.numel() for t in cache.streams()) == 6 * module.kv_elements_per_token()


@pytest.mark.parametrize(
    ("variant", "axes", "key", "rule"),
    [
        ("mha", {"embed_dim": 30}, "heads", "must divide embed_dim (30)"),
        ("mha", {"heads": 0}, "heads", "must be at least 1"),
        ("mqa", {"head_dim": 0}, "head_dim", "must be at least 1"),
        ("gqa", {"kv_heads": 3}, "kv_heads", "must divide heads (4)"),
        ("gqa", {"kv_heads": None}, "kv_heads", "gqa needs the kv_heads axis"),
        ("mla", {"rope_head_dim": 3}, "rope_head_dim", "must be even"),
        ("mla", {"kv_lora_rank": 0}, "kv_lora_rank", "must be at least 1"),
        ("mla_naive", {"q_lora_rank": 0}, "q_lora_rank", "must be at least 1"),
        ("mla_absorbed", {"v_head_dim": -1}, "v_head_dim", "must be at least 1"),
        ("block_mla", {"rope_head_dim": 0}, "rope_head_dim", "must be at least 1"),
        ("block_pre_ln", {"embed_dim": 30}, "heads", "must divide embed_dim (30)"),
    ],
)
def test_impossible_geometry_names_key_value_and_rule(variant: str, axes: dict[str, Any], key: str, rule: str) -> None:
    with pytest.raises(Impossible) as caught:
        small_case(variant, "prefill", **axes)
    value = ({**RAW} | axes)[key]
    assert caught.value.key == key
    assert caught.value.value == value
    assert rule in str(caught.value)
    assert str(caught.value).startswith(f"{key} = {value!r}")


def test_ranks_not_given_follow_deepseek() -> None:
    case = small_case("mla", "prefill", embed_dim=512, heads=4)
    assert (case.head_dim, case.kv_lora_rank, case.rope_head_dim, case.v_head_dim) == (128, 512, 64, 128)
    assert case.q_lora_rank is None
    assert case.kv_heads is None
    tiny = small_case("mla", "prefill", embed_dim=4, heads=4)
    assert tiny.rope_head_dim == 2  # never odd, never none


def test_every_variant_says_what_it_is() -> None:
    assert set(VARIANTS) >= {"mha", "mqa", "gqa", "mla", "mla_naive", "mla_absorbed"}
    for name in VARIANTS:
        spec: VariantSpec = VARIANTS[name]
        assert spec.name == name
        assert spec.title
        assert set(spec.phases) <= {"prefill", "decode", "train"}
    assert VARIANTS["mha"].reference(small_case("mha", "prefill")) == "torch_mha"
    assert VARIANTS["mha"].reference(small_case("mha", "decode")) == "sdpa"  # torch's has no cache
    assert VARIANTS["mha"].reference(small_case("mha", "prefill", head_dim=12)) == "sdpa"  # nor a head_dim
