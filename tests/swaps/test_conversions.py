"""Conversions: the exact ones equal the module they came from, the others say how far off they are and never pass."""

import copy
import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

import harness
from harness.cell.rule import Equivalence
from harness.kernels.call import Kernel
from harness.kernels.eager import eager
from harness.kernels.sdpa import KERNEL as SDPA
from harness.swaps import SwapError, conversions
from harness.variants.blocks import EncoderLayer
from harness.variants.cache import KVCache
from harness.variants.dropin import EagerMultiheadAttention, EagerMultiheadAttentionWithInProj
from harness.variants.gqa import GroupedQueryAttention, MultiHeadAttention, MultiQueryAttention
from harness.variants.mla import MultiHeadLatentAttention
from harness.variants.specs.grouped import grouped_kv_elements, grouped_params
from harness.variants.specs.latent import LatentSizes, latent_params
from tests.support import ROOT
from tests.support.attention import assert_same, draw_tokens, filled

B, S, E, H, D = 2, 12, 40, 6, 8


def grouped(kv: int, *, embed: int = E, bias: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    kinds: dict[int, Any] = {1: MultiQueryAttention, H: MultiHeadAttention}
    kind = kinds.get(kv, GroupedQueryAttention)
    sizes = (embed, H) if kv in kinds else (embed, H, kv)
    return filled(kind(*sizes, head_dim=D, bias=bias), dtype, seed)


def tokens(dtype: torch.dtype = torch.float64, embed: int = E, length: int = S, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, length, embed, generator=generator, dtype=torch.float64).to(dtype)


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "padding": {"mask": torch.arange(S) >= torch.tensor([0, 5])[:, None, None, None], "causal": True},  # dead rows
    "float": {"mask": torch.randn(B, H, S, S, generator=torch.Generator().manual_seed(3), dtype=torch.float64)},
}


class Prefill(nn.Module):
    """The module, called with x alone."""

    def __init__(self, module: nn.Module, rules: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.rules = module, rules

    def forward(self, x: Tensor) -> Any:
        rules = {key: value.to(x) if _is_real(value) else value for key, value in self.rules.items()}
        return self.module(x, need_weights=True, **rules)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def decode(module: Any, x: Tensor, cache: KVCache) -> Tensor:
    """Prefill of all but the last 4 tokens, then one by one, through one cache."""
    pieces = (x[:, :-4], *x[:, -4:].split(1, dim=1))
    return torch.cat([module(piece, causal=True, cache=cache) for piece in pieces], dim=1)


class Decode(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return decode(self.module, x, KVCache())


def judged(new: nn.Module, old: nn.Module, x: Tensor, rules: dict[str, Any] | None = None) -> Equivalence:
    """Outputs, weights, and the gradients of the input and of what both have: q_proj and out_proj."""
    pair: list[nn.Module] = []
    for module in (new, old):
        frozen = copy.deepcopy(module)
        for name, parameter in frozen.named_parameters():
            parameter.requires_grad_(name.startswith(("q_proj", "out_proj")))
        pair.append(Decode(frozen) if rules is None else Prefill(frozen, rules))
    candidate, reference = pair
    return harness.check(candidate, reference, x, gradients=True)


def converted(old: nn.Module, to: str, **options: Any) -> tuple[Any, Any]:
    """The new module and its row of the report."""
    new, report = harness.swap(old, to=to, **options)
    (row,) = report.swapped
    assert report.exact is (row.error is None)
    assert row.was == type(old).__name__ and row.became == type(new).__name__
    return new, row


EXACT = [(1, "mha"), (2, "mha"), (3, "mha"), (H, "mha"), (3, "gqa-3"), (H, f"gqa-{H}"), (1, "mqa")]
EXACT += [(kv, "mla") for kv in (1, 2, 3, H)]  # 2 * kv * D = 16, 32 < E = 40 < 48, 96: both ways to be of full rank
EXACT += [(2, "mla-32"), (2, "mla-35"), (H, "mla-40"), (H, "mla-64")]
exact = pytest.mark.parametrize(("kv", "to"), EXACT)
TYPES: dict[str, type[nn.Module]] = {
    "mha": MultiHeadAttention,
    "gqa": GroupedQueryAttention,
    "mqa": MultiQueryAttention,
}
TYPES |= {"mla": MultiHeadLatentAttention}


# Exact conversions of the variants.


@exact
@pytest.mark.parametrize("rules", MASKS)
def test_an_exact_conversion_is_the_same_function(kv: int, to: str, rules: str) -> None:
    for dtype in (torch.float64, torch.float32):
        old = grouped(kv, dtype=dtype)
        new, row = converted(old, to)
        assert type(new) is TYPES[to.partition("-")[0]]
        assert row.error is None
        found = judged(new, old, tokens(dtype), MASKS[rules])
        assert found.passed, found.table().to_string()
    x = tokens()
    old = grouped(kv)
    apart = converted(old, to)[0](x, **MASKS[rules]) - old(x, **MASKS[rules])
    assert float(apart.detach().abs().max()) < 1e-13


@exact
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
def test_an_exact_conversion_decodes_the_same(kv: int, to: str, bias: bool) -> None:
    old = grouped(kv, bias=bias)
    new, _ = converted(old, to)
    found = judged(new, old, tokens())
    assert found.passed, found.table().to_string()
    in_place = harness.check(Decode(new), Decode(old), tokens())  # without gradients the cache is written in place
    assert in_place.passed, in_place.table().to_string()


@pytest.mark.parametrize("to", ["mha", "mla"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_modules_convert_exactly_too(to: str, dtype: torch.dtype) -> None:
    for kv in (2, H):
        old = grouped(kv, dtype=dtype)
        new, row = converted(old, to)
        assert row.error is None
        assert {p.dtype for p in new.parameters()} == {dtype}
        found = judged(new, old, tokens(dtype), {"causal": True})
        assert found.passed, found.table().to_string()


@pytest.mark.parametrize("mode", ["auto", "naive", "absorbed"])
@pytest.mark.parametrize("rules", MASKS)
def test_mla_is_exact_in_all_its_modes(mode: str, rules: str) -> None:
    old = grouped(2)
    new, _ = converted(old, "mla", mode=mode)
    assert new.mode == mode
    assert judged(new, old, tokens(), MASKS[rules]).passed
    assert judged(new, old, tokens()).passed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("unlike", ["columns", "rows"])
def test_mla_is_exact_when_the_weights_are_of_unlike_size(unlike: str, dtype: torch.dtype) -> None:
    """An SVD of full rank fails this by 10^5 N in float64: its rounding is that of the matrix, not of a column."""
    old, x = grouped(2, embed=64, dtype=dtype), tokens(dtype, embed=64)
    columns = torch.logspace(-3, 3, 64, dtype=dtype)
    with torch.no_grad():
        if unlike == "columns":
            for name in ("q_proj", "k_proj", "v_proj"):
                old.get_submodule(name).weight *= columns
            x = x / columns
        else:
            old.k_proj.weight *= 1e-3
            old.q_proj.weight *= 1e3
    new, row = converted(old, "mla")
    assert row.error is None
    found = judged(new, old, x, {"causal": True})
    assert found.passed, found.table().to_string()


@settings(max_examples=60)
@given(
    kv=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.integers(1, 6),
    embed=st.integers(2, 24),
    bias=st.booleans(),
    causal=st.booleans(),
    to=st.sampled_from(["mha", "mla", "gqa", "mqa", "lower"]),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    kv: int, group: int, head_dim: int, embed: int, bias: bool, causal: bool, to: str, seed: int
) -> None:
    """Exact: passes. Not exact: the error is that of the best pooling or rank, and a large one does not pass."""
    old = filled(GroupedQueryAttention(embed, kv * group, kv, head_dim=head_dim, bias=bias), seed=seed)
    full = min(2 * kv * head_dim, embed)
    target = {"gqa": f"gqa-{kv}", "lower": f"mla-{max(1, full - 1)}"}.get(to, to)
    new, row = converted(old, target)
    is_exact = to in ("mha", "mla", "gqa") or (to == "mqa" and kv == 1) or (to == "lower" and full == 1)
    assert (row.error is None) is is_exact
    found = judged(new, old, tokens(embed=embed, seed=seed), {"causal": causal})
    if row.error is None:
        assert found.passed, found.table().to_string()
    elif row.error > 1e-6:
        assert found.status == "mismatch"


def test_repeated_heads_are_the_original_ones_bit_for_bit() -> None:
    old = grouped(2, dtype=torch.float32)
    new, _ = converted(old, "mha")
    for name in ("k_proj", "v_proj"):
        theirs, ours = old.get_submodule(name), new.get_submodule(name)
        for head in range(H):
            mine, source = slice(head * D, (head + 1) * D), slice(head // 3 * D, (head // 3 + 1) * D)
            assert torch.equal(ours.weight[mine], theirs.weight[source])
            assert torch.equal(ours.bias[mine], theirs.bias[source])


def test_gradients_of_repeated_heads_add_up_to_the_shared_ones() -> None:
    old, x = grouped(2), tokens()
    new, _ = converted(old, "mha")
    weights = torch.randn(B, S, E, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for module in (old, new):
        (module(x, causal=True) * weights).sum().backward()
    for name in ("k_proj", "v_proj"):
        theirs, ours = old.get_submodule(name), new.get_submodule(name)
        summed = ours.weight.grad.view(2, H // 2, D, E).sum(1).view(2 * D, E)
        torch.testing.assert_close(summed, theirs.weight.grad, rtol=1e-11, atol=1e-13)


def test_there_and_back_gives_the_same_bits() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        old = grouped(2, dtype=dtype)
        wide, _ = converted(old, "mha")
        back, row = converted(wide, "gqa-2")
        assert row.error is None
        for name, parameter in old.named_parameters():
            assert torch.equal(back.get_parameter(name), parameter), name


def test_the_mean_of_many_equal_heads_is_that_head() -> None:
    """Summed and divided, 11 equal float64 numbers are often another one."""
    wide = filled(MultiHeadAttention(E, 11, head_dim=D, bias=True))
    with torch.no_grad():
        for parameter in (*wide.k_proj.parameters(), *wide.v_proj.parameters()):
            parameter.copy_(parameter[:D].repeat(11, *[1] * (parameter.ndim - 1)))
    new, row = converted(wide, "mqa")
    assert row.error is None
    assert torch.equal(new.k_proj.weight, wide.k_proj.weight[:D])


# Sizes: the formulas, the parameters and the bytes of a real cache.


@pytest.mark.parametrize(
    ("kv", "to", "elements"),
    [(2, "mha", 96), (H, "gqa-2", 32), (H, "mqa", 16), (2, "mla", 32), (H, "mla", 40), (H, "mla-10", 10)],
)
@torch.no_grad()
def test_the_cache_changes_as_the_formulas_say(kv: int, to: str, elements: int) -> None:
    old = grouped(kv, dtype=torch.float32)
    new, row = converted(old, to)
    latent = to.startswith("mla")
    rank = elements
    sizes = LatentSizes(H, D, 0, D, rank)
    formula = sizes.latent_kv_elements if latent else grouped_kv_elements(new.num_kv_heads, D)
    assert new.kv_elements_per_token() == formula == elements
    for module, per_token in ((old, 2 * kv * D), (new, elements)):
        cache = module.new_cache(S)
        decode(module, tokens(torch.float32), cache)
        assert sum(stream.numel() for stream in cache.streams()) == B * S * per_token
        assert cache.allocated_bytes == B * S * per_token * 4
    if latent:
        params = latent_params(E, sizes, None, bias=True, latent_norm=False)
    else:
        params = grouped_params(E, H, new.num_kv_heads, D, bias=True)
    assert row.params_after == sum(p.numel() for p in new.parameters()) == params
    assert row.params_before == grouped_params(E, H, kv, D, bias=True)


@pytest.mark.parametrize("mode", ["naive", "absorbed", "auto"])
@pytest.mark.parametrize("latent_norm", [True, False], ids=["norm", "no_norm"])
@torch.no_grad()
def test_mla_without_positions(mode: Any, latent_norm: bool) -> None:
    """By hand: k and v decompressed from the latent, and the order of the keys does not matter."""
    sizes: dict[str, Any] = {"kv_lora_rank": 10, "nope_head_dim": D, "v_head_dim": 5}
    module = MultiHeadLatentAttention(E, H, rope_head_dim=0, latent_norm=latent_norm, mode=mode, bias=True, **sizes)
    module, x = filled(module), tokens()
    assert ("kv_a_norm.weight" in module.state_dict()) is latent_norm
    params = latent_params(E, LatentSizes(H, D, 0, 5, 10), None, bias=True, latent_norm=latent_norm)
    assert sum(p.numel() for p in module.parameters()) == params
    latent = module.kv_a_norm(module.kv_a_proj(x))
    kv = module.kv_b_proj(latent).view(B, S, H, D + 5).transpose(1, 2)
    q = module.q_proj(x).view(B, S, H, D).transpose(1, 2)
    heads = torch.softmax(q @ kv[..., :D].mT * D**-0.5, dim=-1) @ kv[..., D:]
    torch.testing.assert_close(module(x), module.out_proj(heads.transpose(1, 2).flatten(2)), rtol=1e-11, atol=1e-13)
    order = torch.randperm(S, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(module(x[:, order]), module(x)[:, order], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(Decode(module)(x), module(x, causal=True), rtol=1e-11, atol=1e-13)
    assert copy.deepcopy(module).scale == D**-0.5


def test_mla_refuses_a_negative_rope() -> None:
    with pytest.raises(ValueError, match="rope_head_dim = -2: must be at least 0"):
        MultiHeadLatentAttention(E, H, kv_lora_rank=4, nope_head_dim=D, rope_head_dim=-2, v_head_dim=D)


# Inexact conversions.


def pooling_error(old: Any, number: int) -> float:
    """With loops, from the old module alone."""
    apart = size = 0.0
    for linear in (old.k_proj, old.v_proj):
        for parameter in linear.parameters():
            heads = list(parameter.detach().double().split(D))
            per_group = len(heads) // number
            for first in range(0, len(heads), per_group):
                members = heads[first : first + per_group]
                mean = sum(members) / per_group
                apart += sum(float(((head - mean) ** 2).sum()) for head in members)
                size += sum(float((head**2).sum()) for head in members)
    return float((apart / size) ** 0.5)


@pytest.mark.parametrize(("kv", "to", "number"), [(H, "gqa-3", 3), (H, "gqa-2", 2), (H, "mqa", 1), (3, "gqa-1", 1)])
def test_pooling_reports_its_error_and_does_not_pass(kv: int, to: str, number: int) -> None:
    for dtype, rel in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        old = grouped(kv, dtype=dtype)
        new, row = converted(old, to)
        assert new.num_kv_heads == number
        assert row.error == pytest.approx(pooling_error(old, number), rel=rel)
        assert 0.1 < row.error < 1
        assert judged(new, old, tokens(dtype), {"causal": True}).status == "mismatch"
    wide = old.k_proj.weight.view(number, kv // number, D, E).mean(1).flatten(0, 1)
    torch.testing.assert_close(new.k_proj.weight, wide)


def test_heads_that_differ_in_one_bit_are_not_equal_heads() -> None:
    wide, _ = converted(grouped(2), "mha")
    with torch.no_grad():
        weight = wide.v_proj.weight
        weight[5, 7] = torch.nextafter(weight[5, 7], torch.tensor(9.0).double())
    _, row = converted(wide, "gqa-2")
    assert row.error is not None
    assert 0 < row.error < 1e-15
    with torch.no_grad():
        wide.v_proj.bias[3] = float("nan")
    _, row = converted(wide, "gqa-2")
    assert row.error != row.error  # NaN: no number, but not "exact" either


@pytest.mark.parametrize("kv", [2, H])
def test_a_lower_rank_reports_the_error_of_the_best_one(kv: int) -> None:
    """Eckart and Young: no product through R channels is nearer than the singular values left out."""
    old, x = grouped(kv), tokens()
    s = torch.linalg.svdvals(torch.cat([old.k_proj.weight, old.v_proj.weight]).detach())
    last = float("inf")
    for rank in range(1, len(s)):
        new, row = converted(old, f"mla-{rank}")
        assert row.error == pytest.approx(float(s[rank:].norm() / s.norm()), rel=1e-9)
        assert row.error < last
        last = row.error
        assert new.kv_lora_rank == rank
        if rank in (1, len(s) // 2, len(s) - 1):  # one below full rank too
            assert judged(new, old, x, {"causal": True}).status == "mismatch"
    assert converted(old, f"mla-{len(s)}")[1].error is None


def test_a_stack_of_low_rank_is_kept_by_its_rank_and_the_error_says_so() -> None:
    """Only the shape makes a conversion exact by name; what an SVD leaves out is always told, were it rounding."""
    wide, _ = converted(grouped(1, dtype=torch.float32), "mha")  # 96 rows of rank 16
    new, row = converted(wide, "mla-16")
    assert 0 < row.error < 1e-6
    assert judged(new, wide, tokens(torch.float32), {"causal": True}).passed
    assert converted(wide, "mla-15")[1].error > 1e-2


def test_one_inexact_layer_makes_the_report_inexact() -> None:
    twins, _ = converted(grouped(2), "mha")
    model = nn.ModuleDict({"twins": twins, "mha": grouped(H)})
    _, report = harness.swap(model, to="gqa-2")
    assert [row.error is None for row in report.swapped] == [True, False]
    assert not report.exact
    assert harness.swap(model, to="gqa-2", only="twins")[1].exact
    assert report.table()["error"].notna().tolist() == [False, True]


# The comparison can fail.


@pytest.mark.parametrize("to", ["mha", "mla"])
def test_tiling_heads_is_seen(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tiled(heads: Tensor, number: int) -> Tensor:
        return heads.tile(number // heads.shape[0], *[1] * (heads.ndim - 1))

    old = grouped(2)
    assert judged(converted(old, to)[0], old, tokens(), {"causal": True}).passed
    monkeypatch.setattr(conversions, "_repeated", tiled)
    assert judged(converted(old, to)[0], old, tokens(), {"causal": True}).status == "mismatch"


@pytest.mark.parametrize("mode", ["naive", "absorbed"])
def test_dropping_the_bias_behind_the_latent_is_seen(mode: str) -> None:
    old = grouped(2)
    new, _ = converted(old, "mla", mode=mode)
    with torch.no_grad():
        new.kv_b_proj.bias.zero_()
    assert judged(new, old, tokens(), {"causal": True}).status == "mismatch"


def test_values_before_keys_is_seen() -> None:
    old = grouped(2)
    new, _ = converted(old, "mla")
    with torch.no_grad():
        for parameter in new.kv_b_proj.parameters():
            parameter.copy_(parameter.unflatten(0, (H, 2, D)).flip(1).flatten(0, 2).clone())
    assert judged(new, old, tokens(), {"causal": True}).status == "mismatch"


# What goes along.


@pytest.mark.parametrize("to", ["mha", "gqa-1", "mqa", "mla", "mla-9"])
def test_flags_dropout_kernel_and_hooks_go_along(to: str) -> None:
    old = GroupedQueryAttention(E, H, 2, head_dim=D, bias=True, dropout=0.25, kernel=SDPA, dtype=torch.bfloat16)
    old.train()
    old.out_proj.eval()
    old.k_proj.weight.requires_grad_(False)
    old.q_proj.bias.requires_grad_(False)
    for parameter in (old.k_proj.bias, old.v_proj.bias):
        parameter.requires_grad_(False)
    seen: list[str] = []
    old.register_forward_hook(lambda *_: seen.append("hook"))
    new, _ = converted(old, to)
    assert new.training and new.q_proj.training and not new.out_proj.training
    assert new.dropout == 0.25
    assert new.kernel.name == "sdpa"
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}
    learns = {name: p.requires_grad for name, p in new.named_parameters()}
    expected = {"q_proj.weight": True, "q_proj.bias": False, "out_proj.weight": True, "out_proj.bias": True}
    if to.startswith("mla"):  # of k, which is frozen, and v, which is not
        expected |= {"kv_a_proj.weight": True, "kv_b_proj.weight": True}
        expected |= {"kv_a_proj.bias": False, "kv_b_proj.bias": False}
    else:
        expected |= {"k_proj.weight": False, "v_proj.weight": True, "k_proj.bias": False, "v_proj.bias": False}
    assert learns == expected
    new(tokens(torch.bfloat16))
    assert seen == ["hook"]


def test_a_kernel_that_is_named_replaces_the_old_one_and_calls_are_counted() -> None:
    mine = Kernel("mine", eager, gives_weights=True)
    swapped, report = harness.swap(grouped(2), to="mha", kernel=mine)
    new: Any = swapped
    assert new.kernel.name == "mine"
    assert report.uncalled == ("",)
    new(tokens())
    assert report.swapped[0].calls == 1


@pytest.mark.parametrize("to", ["mha", "mla"])
def test_the_same_seed_drops_the_same_weights(to: str) -> None:
    old = grouped(2)
    old.dropout = 0.4
    new, _ = converted(old.train(), to)
    outputs = []
    for module in (old, new):
        torch.manual_seed(0)
        outputs.append(module(tokens(), causal=True))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-11, atol=1e-13)


class Model(nn.Module):
    """Three layers, of which the first and the last are one, and a variant behind a front."""

    def __init__(self) -> None:
        super().__init__()
        shared = EncoderLayer(grouped(H), E, 48, norm_first=True)
        self.layers = nn.ModuleList([shared, EncoderLayer(grouped(3, seed=1), E, 48), shared])
        self.front = harness.UnifiedAttention(E, H, attention_type="mha", head_dim=D, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, causal=True)
        return x + self.front(x)


@pytest.fixture
def model() -> nn.Module:
    module: nn.Module = filled(Model())
    return module


@pytest.mark.parametrize("to", ["mha", "gqa-3", "mla", "mla-12", "mqa"])
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@torch.no_grad()
def test_in_a_model_and_back(to: str, inplace: bool, model: Any) -> None:
    x = tokens()
    before, state = model(x), copy.deepcopy(model.state_dict())
    original = copy.deepcopy(model)
    swapped: Any
    swapped, report = harness.swap(model, to=to, inplace=inplace)
    assert [row.name for row in report.swapped] == [
        "layers.0.attention",
        "layers.1.attention",
        "front.attention",
    ]  # the shared one once
    assert swapped.layers[0].attention is swapped.layers[2].attention
    kind = TYPES[to.partition("-")[0]]
    assert all(type(layer.attention) is kind for layer in (*swapped.layers, swapped.front))
    found = harness.check(swapped, original, x)
    assert report.exact is (to in ("mha", "mla"))
    assert found.passed is report.exact
    assert report.uncalled == ()
    restored = report.undo()
    assert restored is swapped
    assert {key: value.tolist() for key, value in restored.state_dict().items()} == {
        key: value.tolist() for key, value in state.items()
    }
    assert torch.equal(restored(x), before)
    assert torch.equal(model(x), before)


def test_undo_gives_the_old_keys_and_values_and_what_the_rest_has_learnt_since(model: Any) -> None:
    state = copy.deepcopy(model.state_dict())
    swapped, report = harness.swap(model, to="mla", inplace=True)
    with torch.no_grad():
        for parameter in swapped.parameters():
            parameter.add_(1.0)
    report.undo()
    for name, value in model.state_dict().items():
        moved = 0.0 if ".k_proj." in name or ".v_proj." in name else 1.0
        assert torch.equal(value, state[name] + moved), name


# Fused and split.


TORCH: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    "kdim_vdim": {"kdim": 10, "vdim": 14},
    "kdim_no_bias": {"kdim": 10, "bias": False},
    "extra_tokens": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
}
torch_options = pytest.mark.parametrize("options", TORCH.values(), ids=TORCH)


class Attend(nn.Module):
    """Padding, and a mask of each head's own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        generator = torch.Generator().manual_seed(7)
        blocked = torch.rand(B * 4, 5, 9, generator=generator) < 0.3
        blocked[..., 0] = False
        padding = torch.arange(9) >= torch.tensor([9, 6])[:, None]
        return self.module(query, key, value, key_padding_mask=padding, attn_mask=blocked, average_attn_weights=False)


def torch_attention(options: dict[str, Any], dtype: torch.dtype = torch.float64) -> nn.MultiheadAttention:
    module: nn.MultiheadAttention = filled(nn.MultiheadAttention(16, 4, **options), dtype)
    return module


def cross_tokens(module: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((5, B, 16), (9, B, module.kdim), (9, B, module.vdim))
    made = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return tuple(t.transpose(0, 1).contiguous() if module.batch_first else t for t in made)


def same_state(new: nn.Module, old: nn.Module) -> bool:
    ours, theirs = new.state_dict(), old.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


@torch_options
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("path", ["split", "fused", "split fused", "fused split", "split fused split"])
def test_fused_and_split_are_torchs_attention(path: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    old = torch_attention(options, dtype)
    new: Any = old
    for to in path.split():
        new, row = converted(new, to)
        assert row.error is None
        assert type(new) is (EagerMultiheadAttention if to == "split" else EagerMultiheadAttentionWithInProj)
        assert same_state(new, old)  # under torch's names, bit for bit
        found = harness.check(Attend(new), Attend(old), cross_tokens(old, dtype), gradients=True)
        assert found.passed, found.table().to_string()


@torch_options
def test_fusing_frees_and_freezes_like_its_parts(options: dict[str, Any]) -> None:
    split, _ = converted(torch_attention(options), "split", dead_rows="torch", kernel=SDPA)
    split.k_proj.requires_grad_(False)
    fused, _ = converted(split.train(), "fused")
    assert fused.dead_rows == "torch" and fused.kernel.name == "sdpa" and fused.training
    learns = {name: p.requires_grad for name, p in fused.named_parameters()}
    assert all(learns[name] for name in learns if name != "k_proj_weight")
    assert learns.get("k_proj_weight", False) is False  # apart, it stays frozen; packed, it learns with the others
    split.requires_grad_(False)
    assert not any(p.requires_grad for p in converted(split, "fused")[0].parameters())


def test_undo_of_a_fusion_is_the_split_module_again() -> None:
    split, _ = converted(torch_attention({}), "split")
    model = nn.Sequential(split)
    state = copy.deepcopy(model.state_dict())
    _, report = harness.swap(model, to="fused", inplace=True)
    assert type(model[0]) is EagerMultiheadAttentionWithInProj
    assert report.undo() is model and model[0] is split
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@torch.no_grad()
def test_torchs_attention_becomes_mla_by_way_of_a_variant() -> None:
    old = torch_attention({"batch_first": True})
    variant, _ = converted(old, "variant")
    new, row = converted(variant, "mla")
    assert row.error is None and new.kv_elements_per_token() == 16
    x = tokens(embed=16)
    torch.testing.assert_close(new(x), old(x, x, x)[0], rtol=1e-11, atol=1e-13)


# What cannot be converted.


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class MyLinear(nn.Linear):
    pass


def spoilt(how: str) -> nn.Module:
    old = grouped(2)
    if how == "hook":
        old.k_proj.register_forward_hook(lambda *_: None)
    elif how == "parametrized":
        parametrize.register_parametrization(old.v_proj, "weight", Double())
    elif how == "wrapped":
        old.k_proj = MyLinear(E, 2 * D)
    elif how == "forward":
        old.v_proj.forward = lambda x: x
    elif how == "parameter":
        old.gain = nn.Parameter(torch.ones(1))
    elif how == "nan":
        with torch.no_grad():
            old.k_proj.weight[0, 0] = float("nan")
    elif how == "meta":
        old.to("meta")
    return old


@pytest.mark.parametrize("to", ["mha", "mqa", "mla-8"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("hook", "its k_proj has hooks"),
        ("parametrized", "its v_proj is ParametrizedLinear"),
        ("wrapped", "its k_proj is MyLinear"),
        ("forward", "its v_proj is Linear with a forward of its own"),
        ("parameter", "parameters that nothing takes over: gain"),
    ],
)
def test_what_would_be_lost_is_refused(to: str, how: str, message: str) -> None:
    with pytest.raises(SwapError, match=message):
        harness.swap(spoilt(how), to=to)


def test_weights_without_numbers_are_refused() -> None:
    with pytest.raises(SwapError, match="holds NaN or inf"):
        harness.swap(spoilt("nan"), to="mla-8")
    for to in ("mqa", "mla"):
        with pytest.raises(SwapError, match="on the meta device"):
            harness.swap(spoilt("meta"), to=to)
    assert converted(spoilt("meta"), "mha")[0].k_proj.weight.shape == (H * D, E)


@pytest.mark.parametrize(
    ("source", "to", "message"),
    [
        (lambda: grouped(H), "gqa-4", "gqa-4: 4 must divide the 6 key/value heads of MultiHeadAttention"),
        (lambda: grouped(2), "gqa-3", "gqa-3: 3 must divide the 2 key/value heads of GroupedQueryAttention"),
        (lambda: grouped(H), "gqa", 'to = "gqa": needs the number'),
        (lambda: grouped(H), "gqa-x", "must come a positive number"),
        (lambda: grouped(2), "mha-2", "mha takes no number"),
        (lambda: grouped(2), "mqa-1", "mqa takes no number"),
        (lambda: torch_attention({}), "split-2", "split takes no number"),
        (lambda: torch_attention({}), "mla", "nothing to swap in MultiheadAttention.*GroupedQueryAttention"),
        (lambda: grouped(2), "fused", "nothing to swap in GroupedQueryAttention.*EagerMultiheadAttention"),
    ],
)
def test_what_is_not_known_is_said(source: Any, to: str, message: str) -> None:
    with pytest.raises(SwapError, match=message):
        harness.swap(source(), to=to)


def test_an_option_that_is_not_heeded_is_said() -> None:
    with pytest.raises(SwapError, match="mode"):
        harness.swap(grouped(2), to="mha", mode="naive")
    with pytest.raises(SwapError, match="use_in_proj"):
        harness.swap(torch_attention({}), to="split", use_in_proj=True)


def test_a_parametrized_in_projection_cannot_be_split() -> None:
    fused, _ = converted(torch_attention({}), "fused")
    parametrize.register_parametrization(fused, "in_proj_weight", Double())
    with pytest.raises(SwapError, match="in_proj_weight is parametrized"):
        harness.swap(fused, to="split")


def test_projections_around_keys_and_values_may_be_anything() -> None:
    """They are kept whole: a wrapped query projection works on, hooks and all."""
    old, x = grouped(2), tokens()
    old.q_proj = nn.Sequential(old.q_proj, nn.Tanh())
    parametrize.register_parametrization(old.out_proj, "weight", Double())
    for to in ("mha", "mla"):
        new, _ = converted(old, to)
        torch.testing.assert_close(new(x, causal=True), old(x, causal=True), rtol=1e-11, atol=1e-13)


# The page about it.


def test_the_documentation_runs_and_its_table_is_what_the_code_gives(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "conversions.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    exec(compile(example, "conversions.md", "exec"), {"__name__": "docs"})
    printed = capsys.readouterr().out.splitlines()
    assert printed
    for line in printed:
        assert line in page, line


# The decompressor of a latent layer as a product


@pytest.mark.parametrize("mode", ["naive", "absorbed", "auto"])
@pytest.mark.parametrize("bias", [False, True])
def test_lora_of_full_rank_is_exact_and_below_it_the_nearest_product(mode: Any, bias: bool) -> None:
    sizes: dict[str, Any] = {"kv_lora_rank": 10, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 5}
    sizes |= {"q_lora_rank": 7}
    old: Any = filled(harness.MultiHeadLatentAttention(24, 4, **sizes, bias=bias, mode=mode))
    x = draw_tokens(batch=2, length=7, width=24)
    whole, report = harness.swap(old, to="lora-10")
    assert report.exact
    assert_same(lambda x: whole(x, causal=True), lambda x: old(x, causal=True), x)
    expected = torch.linalg.svdvals(old.kv_b_proj.weight)
    low: Any
    for rank in (7, 3):
        low, report = harness.swap(old, to=f"lora-{rank}")
        error = (expected[rank:].square().sum() / expected.square().sum()).sqrt().item()
        assert report.swapped[0].error == pytest.approx(error, rel=1e-9)
        by_formula = latent_params(24, old.sizes, 7, decompress_rank=rank, bias=bias)
        assert sum(p.numel() for p in low.parameters()) == by_formula
        cache = low.new_cache()
        steps = torch.cat([low(part, causal=True, cache=cache) for part in x.split([4, 1, 2], dim=1)], dim=1)
        product = low.kv_b_proj.up.weight @ low.kv_b_proj.down.weight
        plain = copy.deepcopy(old)
        with torch.no_grad():
            plain.kv_b_proj.weight.copy_(product)
        assert_same(partial(low, causal=True), partial(plain, causal=True), x)
        assert torch.allclose(steps, plain(x, causal=True), rtol=0, atol=1e-13)
    back: Any = report.undo()
    assert back.kv_b_proj.weight.shape == (4 * (6 + 5), 10)


def test_lora_says_what_it_needs() -> None:
    sizes: dict[str, Any] = {"kv_lora_rank": 10, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 5}
    layer = harness.MultiHeadLatentAttention(24, 4, **sizes)
    with pytest.raises(SwapError, match='to = "lora": needs the rank'):
        harness.swap(layer, to="lora")
    with pytest.raises(SwapError, match="a product already, of rank 4"):
        harness.swap(harness.swap(layer, to="lora-4")[0], to="lora-2")
