"""The swap to variants: every attention replaced, every weight carried over and compared, the original left alone."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import harness
from harness.kernels.call import Kernel
from harness.kernels.eager import eager
from harness.references.mla_block import MlaBlock
from harness.references.sdpa import SdpaAttention
from harness.references.sdpa_mla import ExpandedMLA
from harness.swaps import VARIANT, SwapError, SwapReport, converters
from harness.swaps.converters import Conversion
from harness.swaps.weights import WeightSource
from harness.variants.blocks import EncoderLayer
from harness.variants.gqa import GroupedQueryAttention, MultiHeadAttention
from harness.variants.mla import MultiHeadLatentAttention
from tests.support.attention import (
    assert_same,
    by_sources,
    count_parameters,
    differentiated,
    draw_tokens,
    filled,
    make_case,
)

E, H, S = 16, 4, 6
tokens = functools.partial(draw_tokens, batch=2, length=S, width=E)
mla_case = functools.partial(
    make_case, "mla", embed_dim=E, heads=H, seq_len=S, mask="none", dtype="float64",
    kv_lora_rank=6, rope_head_dim=2, v_head_dim=3,
)  # fmt: skip


def swap(model: nn.Module, **options: Any) -> tuple[nn.Module, SwapReport]:
    return harness.swap(model, to=VARIANT, **options)


SOURCES: dict[str, Any] = {
    "mha": lambda: nn.MultiheadAttention(E, H, batch_first=True),
    "mha_plain": lambda: nn.MultiheadAttention(E, H, bias=False, batch_first=True),
    "sdpa_mqa": lambda: SdpaAttention(E, H, 1, 4, True),
    "sdpa_gqa": lambda: SdpaAttention(E, H, 2, 5, False),
    "mla": lambda: ExpandedMLA(mla_case()),
    "mla_q": lambda: ExpandedMLA(mla_case(q_lora_rank=5, bias=False)),
    "encoder": lambda: nn.TransformerEncoderLayer(E, H, 20, batch_first=True),
    "mla_block": lambda: MlaBlock(mla_case(q_lora_rank=5)),
}
every_source = pytest.mark.parametrize("name", SOURCES)
BECOMES = {
    "MultiheadAttention": MultiHeadAttention,
    "SdpaAttention": GroupedQueryAttention,
    "ExpandedMLA": MultiHeadLatentAttention,
    "TransformerEncoderLayer": EncoderLayer,
    "MlaBlock": EncoderLayer,
}


def make(name: str) -> nn.Module:
    module: nn.Module = filled(SOURCES[name]())
    return module


def call(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.MultiheadAttention):
        out: Tensor = module(x, x, x, need_weights=False)[0]
        return out
    result: Tensor = module(x)
    return result


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


class Model(nn.Module):
    """Attention in many places: direct, in a list, in a dict, one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = make("sdpa_gqa")
        self.twin = self.first
        self.stack = nn.Sequential(nn.Linear(E, E), make("encoder"), nn.Sequential(nn.ReLU(), make("sdpa_mqa")))
        self.more = nn.ModuleDict({"mla": make("mla"), "norm": nn.LayerNorm(E)})
        self.list = nn.ModuleList([self.more["mla"], make("mla_block")])
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x) + self.twin(2 * x)
        x = self.stack(x)
        for layer in self.list:
            x = layer(x)
        out: Tensor = self.more["norm"](x)
        return out


# Weights and outputs.


@every_source
def test_weights_go_along_bit_by_bit_and_outputs_agree(name: str) -> None:
    old = make(name)
    new, report = swap(old)
    sources, origin = report.sources(), dict(old.named_parameters())
    parameters = dict(new.named_parameters())
    assert sources.keys() == parameters.keys()
    for key, parameter in parameters.items():
        expected = sources[key].of(origin[sources[key].name])
        assert parameter.shape == expected.shape
        assert parameter.dtype == expected.dtype
        assert bits(parameter) == bits(expected)
    assert count_parameters(new) == count_parameters(old)
    assert_same(lambda x: call(new, x), lambda x: call(old, x), tokens())


@every_source
def test_the_original_is_untouched(name: str) -> None:
    old = make(name)
    before = {key: (id(value), bits(value)) for key, value in old.state_dict(keep_vars=True).items()}
    modules = [(key, id(module)) for key, module in old.named_modules()]
    new, _ = swap(old)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.zero_()
    assert {key: (id(value), bits(value)) for key, value in old.state_dict(keep_vars=True).items()} == before
    assert [(key, id(module)) for key, module in old.named_modules()] == modules


@every_source
def test_a_root_module_is_replaced_itself(name: str) -> None:
    old = make(name)
    new, report = swap(old)
    (row,) = report.swapped
    assert row.name == ""
    assert type(new) is BECOMES[type(old).__name__]
    assert (row.was, row.became) == (type(old).__name__, type(new).__name__)
    assert row.params_before == row.params_after == count_parameters(old)
    assert all("." not in key.split(".")[0] and not key.startswith(".") for key in row.weights)


@torch.no_grad()
def test_every_attention_of_a_model_is_replaced() -> None:
    model = Model()
    new, report = swap(model)
    left = [type(m).__name__ for m in new.modules() if (VARIANT, type(m)) in converters.CONVERTERS]
    assert left == []
    assert isinstance(new, Model)
    assert [row.name for row in report.swapped] == ["first", "stack.1", "stack.2.1", "more.mla", "list.1"]
    assert [row.was for row in report.swapped] == [
        "SdpaAttention",
        "TransformerEncoderLayer",
        "SdpaAttention",
        "ExpandedMLA",
        "MlaBlock",
    ]
    assert [row.became for row in report.swapped] == [
        "GroupedQueryAttention",
        "EncoderLayer",
        "GroupedQueryAttention",
        "MultiHeadLatentAttention",
        "EncoderLayer",
    ]
    for row in report.swapped:
        assert row.params_before == row.params_after == count_parameters(model.get_submodule(row.name))
    assert count_parameters(new) == count_parameters(model)
    assert_same(new, model, tokens())
    # What is no attention is still itself, with its weights.
    assert torch.equal(new.stack[0].weight, model.stack[0].weight)  # type: ignore[arg-type]


def test_aliases_stay_one_module() -> None:
    new: Any = swap(Model())[0]
    assert new.first is new.twin
    assert new.more["mla"] is new.list[0]
    names = [name for name, _ in new.named_modules(remove_duplicate=False)]
    assert "twin.q_proj" in names


@torch.no_grad()
def test_one_encoder_layer_used_twice_stays_one_and_gets_nothing_extra() -> None:
    """Its second name leads to a replaced layer: the old attention inside must not be planted there again."""
    layer = make("encoder")
    model = nn.Sequential(layer, layer)
    new, report = swap(model)
    assert new[0] is new[1]  # type: ignore[index]
    assert [row.name for row in report.swapped] == ["0"]
    expected = {name for name, _ in swap(layer)[0].named_modules()}
    assert {name for name, _ in new[0].named_modules()} == expected  # type: ignore[index]
    assert count_parameters(new) == count_parameters(model)
    assert_same(new, model, tokens())


def test_sources_name_full_parameters_on_both_sides() -> None:
    model = Model()
    new, report = swap(model)
    sources = report.sources()
    assert sources["first.q_proj.weight"] == WeightSource("first.wq.weight")
    assert sources["stack.1.attention.k_proj.bias"] == WeightSource("stack.1.self_attn.in_proj_bias", (E, 2 * E))
    assert sources["stack.1.linear1.weight"] == WeightSource("stack.1.linear1.weight")
    assert sources["more.mla.kv_a_norm.weight"] == WeightSource("more.mla.kv_norm.weight")
    assert sources["list.1.attention.q_b_proj.weight"] == WeightSource("list.1.attn.wq_b.weight")
    assert sources["list.1.linear2.bias"] == WeightSource("list.1.down.bias")
    old, parameters = dict(model.named_parameters()), dict(new.named_parameters())
    assert sources.keys() <= parameters.keys()
    for key, source in sources.items():
        assert torch.equal(parameters[key], source.of(old[source.name]))
    untouched = parameters.keys() - sources.keys()
    assert untouched == {"stack.0.weight", "stack.0.bias", "more.norm.weight", "more.norm.bias"}


def test_sources_lead_each_gradient_to_its_place() -> None:
    """Swapped names: a gradient looked up under the wrong source would be far off."""
    model = Model()
    new, report = swap(model)
    x, cotangent = tokens(), tokens(seed=2)
    ours = differentiated(new, dict(new.named_parameters()), cotangent)
    theirs = differentiated(model, dict(model.named_parameters()), cotangent)
    sources = {name: WeightSource(name) for name, _ in new.named_parameters()} | report.sources()
    assert_same(ours, lambda x: by_sources(theirs(x), sources), x)


def test_rows_cut_the_packed_projection() -> None:
    _, report = swap(make("mha"))
    sources = report.sources()
    for index, part in enumerate(("q", "k", "v")):
        for kind in ("weight", "bias"):
            expected = WeightSource(f"in_proj_{kind}", (index * E, (index + 1) * E))
            assert sources[f"{part}_proj.{kind}"] == expected
    assert sources["out_proj.weight"] == WeightSource("out_proj.weight")
    packed = torch.arange(3 * E * E, dtype=torch.float64).view(3 * E, E)
    parts = [sources[f"{part}_proj.weight"].of(packed) for part in "qkv"]
    assert torch.equal(torch.cat(parts), packed)


# Flags, dtypes, kernels, options.


@every_source
def test_requires_grad_and_training_are_carried(name: str) -> None:
    old = make(name).train()
    for index, parameter in enumerate(old.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    new, report = swap(old)
    origin = dict(old.named_parameters())
    for key, source in report.sources().items():
        assert new.get_parameter(key).requires_grad == origin[source.name].requires_grad
    assert all(module.training for module in new.modules())
    assert not any(module.training for module in swap(old.eval())[0].modules())


@every_source
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dtype_is_carried(name: str, dtype: torch.dtype) -> None:
    new, _ = swap(make(name).to(dtype))
    assert {p.dtype for p in new.parameters()} == {dtype}


@every_source
def test_models_on_the_meta_device_swap_without_memory(name: str) -> None:
    new, report = swap(make(name).to("meta"))
    assert all(p.is_meta for p in new.parameters())
    assert report.swapped[0].params_after == count_parameters(make(name))


def test_the_kernel_asked_for_runs() -> None:
    calls = []

    def counting(q: Tensor, k: Tensor, v: Tensor, asked: Any) -> tuple[Tensor, Tensor | None]:
        calls.append(q.shape)
        return eager(q, k, v, asked)

    model, x = Model(), tokens()
    new, _ = swap(model, kernel=Kernel("counting", counting))
    assert_same(new, model, x)
    assert len(calls) == 6  # `first` and its alias are two calls of one module
    for name in ("eager", "sdpa"):
        other, _ = swap(model, kernel=name)
        assert other.first.kernel.name == name  # type: ignore[union-attr]
        assert_same(other, model, x)


@pytest.mark.parametrize("mode", ["auto", "naive", "absorbed"])
def test_mla_takes_a_mode(mode: str) -> None:
    for name, path in (("mla", ""), ("mla_block", "attention")):
        inner: Any = swap(make(name), mode=mode)[0].get_submodule(path)
        assert inner.mode == mode
    default: Any = swap(make("mla"))[0]
    assert default.mode == "auto"


def test_nan_weights_go_along_too() -> None:
    old: Any = make("mha")
    with torch.no_grad():
        old.in_proj_weight[0, 0] = float("nan")
        old.in_proj_weight[0, 1] = -0.0
    new: Any = swap(old)[0]
    assert bits(new.q_proj.weight) == bits(old.in_proj_weight[:E])


def test_a_parameter_tied_inside_a_module_is_found_under_both_names() -> None:
    old: Any = make("sdpa_gqa")
    old.wv.weight = old.wk.weight
    new: Any = swap(old)[0]
    assert torch.equal(new.v_proj.weight, old.wk.weight)
    assert_same(new, old, tokens())


# Refusals.


class Louder(nn.MultiheadAttention):
    """Computes something else than its parent."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


class OtherMLA(ExpandedMLA):
    pass


def test_unknown_subclasses_are_refused_wherever_they_stand() -> None:
    loud = Louder(E, H, batch_first=True)
    with pytest.raises(SwapError, match="the model is Louder, an unknown subclass of MultiheadAttention"):
        swap(loud)
    with pytest.raises(SwapError, match=r"0\.0 is Louder, an unknown subclass of MultiheadAttention"):
        swap(nn.Sequential(nn.Sequential(loud)))
    layer = nn.TransformerEncoderLayer(E, H, 20, batch_first=True)
    layer.self_attn = loud
    with pytest.raises(SwapError, match="self_attn is Louder, an unknown subclass"):
        swap(layer)
    with pytest.raises(SwapError, match="OtherMLA, an unknown subclass of ExpandedMLA"):
        swap(OtherMLA(mla_case()))
    layer.self_attn = make("sdpa_mqa")  # type: ignore[assignment]
    with pytest.raises(SwapError, match="self_attn is SdpaAttention: cannot be swapped inside its parent"):
        swap(layer)


def test_an_mla_block_with_another_attention_inside_is_refused() -> None:
    block = MlaBlock(mla_case())
    block.attn = OtherMLA(mla_case())
    with pytest.raises(SwapError, match="attn is OtherMLA, an unknown subclass of ExpandedMLA"):
        swap(block)


def test_nothing_to_swap_is_an_error_that_lists_what_is_known() -> None:
    with pytest.raises(SwapError, match=r"nothing to swap in Sequential: .*MultiheadAttention.*SdpaAttention"):
        swap(nn.Sequential(nn.Linear(E, E), nn.ReLU()))


@pytest.mark.parametrize(
    "options",
    [{"kdim": 8}, {"vdim": 8}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"batch_first": False}],
    ids=str,
)
def test_what_cannot_be_carried_over_is_refused(options: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(E, H, **{"batch_first": True} | options)
    with pytest.raises(SwapError):
        swap(module)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mha", {"mode": "naive"}, "options no swapped module heeds: mode; known here: none"),
        ("mla", {"modus": "naive"}, "options no swapped module heeds: modus; known here: mode"),
        ("mla", {"mode": "fast"}, "mode = 'fast': must be auto, naive or absorbed"),
        ("mha", {"kernel": "flash"}, "unknown kernel 'flash'; known: auto, compiled, eager"),
    ],
)
def test_options_are_heeded_or_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swap(make(name), **options)


# The weights are really compared.


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3))
        self.b = nn.Parameter(torch.randn(3))


def convert_with(monkeypatch: pytest.MonkeyPatch, conversion: Any) -> None:
    def convert(old: Any, kernel: Kernel, request: Any) -> Conversion:
        return Conversion(*conversion())

    registry: dict[Any, Any] = converters.CONVERTERS
    monkeypatch.setitem(registry, (VARIANT, Odd), convert)
    monkeypatch.setitem(converters.OPTIONS, convert, ())


A, B_ = WeightSource("a"), WeightSource("b")


def test_a_tampered_copy_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Tensor.clone

    def off_by_a_bit(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied = original(self, *args, **kwargs)
        if copied.shape == (E, E):  # one rounding of one element
            copied.view(-1)[7] = torch.nextafter(copied.view(-1)[7], torch.tensor(9.0, dtype=copied.dtype))
        return copied

    old = make("mha")
    monkeypatch.setattr(Tensor, "clone", off_by_a_bit)
    with pytest.raises(SwapError, match=r"q_proj\.weight differs from its source in_proj_weight after the swap"):
        harness.swap(old, to=VARIANT, inplace=True)
    monkeypatch.undo()
    assert swap(old)[1].swapped[0].became == "MultiHeadAttention"


def test_a_weight_of_another_shape_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Odd()
    wide.a = nn.Parameter(torch.zeros(4, 3))
    convert_with(monkeypatch, lambda: (wide, {"a": A, "b": B_}))
    with pytest.raises(SwapError, match=r"a has shape \(4, 3\), its source \(3,\)"):
        swap(Odd())


def test_a_parameter_without_a_source_or_without_a_taker_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    convert_with(monkeypatch, lambda: (Odd(), {"a": A}))
    with pytest.raises(SwapError, match="parameters without a source: b"):
        swap(Odd())
    convert_with(monkeypatch, lambda: (Odd(), {"a": A, "b": A}))
    with pytest.raises(SwapError, match="parameters that nothing takes over: b"):
        swap(nn.Sequential(Odd()))
    convert_with(monkeypatch, lambda: (Odd(), {"a": A, "b": B_}))
    report: SwapReport = swap(nn.Sequential(Odd()))[1]
    assert report.sources() == {"0.a": WeightSource("0.a"), "0.b": WeightSource("0.b")}


def test_two_converters_for_one_class_are_refused() -> None:
    with pytest.raises(ValueError, match="two converters of MultiheadAttention to variant"):
        converters.converts(nn.MultiheadAttention, to=VARIANT)(lambda old, kernel, request: Conversion(Odd(), {}))
