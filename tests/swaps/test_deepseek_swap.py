"""DeepSeek's latent attention against transformers' own: both ways, cached, padded, trained, and broken on purpose."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache
from transformers.cache_utils import StaticCache
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

import harness
from harness.kernels.call import AttentionCall, Kernel, Unsupported
from harness.kernels.eager import eager
from harness.kernels.front import find_kernel
from harness.models.families.family import Family, find_family
from harness.swaps.converters import DROP_IN, Request, SwapError
from harness.swaps.deepseek import AbsorbingDeepseekV2Attention, AbsorbingDeepseekV3Attention, LatentAttention, convert
from harness.variants.specs.latent import LatentSizes, choose, latent_params

H, r, N, R, V = 4, 16, 8, 4, 10
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "num_key_value_heads": H,
    "kv_lora_rank": r,
    "qk_nope_head_dim": N,
    "qk_rope_head_dim": R,
    "v_head_dim": V,
    "first_k_dense_replace": 1,
    # All experts are chosen: a last-bit difference cannot send a token elsewhere.
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": True,
    "attn_implementation": "sdpa",  # transformers' eager takes its softmax in float32 whatever the dtype
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "v2": (DeepseekV2Config, {"q_lora_rank": None}),
    "v2-q-lora": (DeepseekV2Config, {"q_lora_rank": 12}),
    "v2-yarn": (DeepseekV2Config, {"q_lora_rank": 12, "rope_parameters": YARN}),
    "v3": (DeepseekV3Config, {"q_lora_rank": 12}),
    "v3-halves": (DeepseekV3Config, {"q_lora_rank": None, "rope_interleave": False}),
    "v3-yarn": (DeepseekV3Config, {"q_lora_rank": 12, "rope_parameters": YARN}),
}
MODES = ("naive", "absorbed", "auto")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_mode = pytest.mark.parametrize("mode", MODES)


def make_config(kind: str, **more: Any) -> Any:
    factory, own = KINDS[kind]
    return factory(**TINY | own | more)


def fill(module: nn.Module, std: float = 0.3) -> None:
    """Random everywhere: a bias of 0 or a norm of 1 would hide what is lost."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, std)


def request(mode: str) -> Request:
    return Request(DROP_IN, None, find_kernel("eager"), {"mode": mode}, lambda name, module: True)


def ours(module: nn.Module, mode: str, kernel: Kernel | None = None) -> Any:
    new = convert(module, kernel or find_kernel("eager"), request(mode))
    assert new is not None
    return new


class Seen:
    """A kernel that notes the shapes it is called with."""

    def __init__(self) -> None:
        self.shapes: list[tuple[tuple[int, ...], ...]] = []

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        self.shapes.append((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return eager(q, k, v, call)

    def as_kernel(self) -> Kernel:
        return Kernel("seen", self.run, gives_weights=True)


@dataclass
class Layer:
    """One attention of transformers, with all that its model would hand it."""

    kind: str
    dtype: torch.dtype = torch.float64
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.config = make_config(self.kind, **self.more)
        v2 = isinstance(self.config, DeepseekV2Config)
        self.theirs = (DeepseekV2Attention if v2 else DeepseekV3Attention)(self.config, layer_idx=0)
        self.theirs.kv_b_proj = nn.Linear(r, H * (N + V), bias=True)  # transformers gives it none
        fill(self.theirs)
        self.theirs.to(self.dtype).eval()
        self.rope = (DeepseekV2RotaryEmbedding if v2 else DeepseekV3RotaryEmbedding)(self.config)

    def hidden(self, batch: int, length: int) -> Tensor:
        return torch.randn(batch, length, 32, dtype=self.dtype)

    def call(self, module: nn.Module, x: Tensor, mask: Tensor | None, *, start: int = 0, **kwargs: Any) -> Any:
        positions = torch.arange(start, start + x.shape[1]).expand(x.shape[0], -1)
        return module(hidden_states=x, position_embeddings=self.rope(x, positions), attention_mask=mask, **kwargs)


def causal(real: Tensor, queries: int) -> Tensor:
    """real (B, S), False = padding -> (B, 1, L, S) for the last L queries, True = attends."""
    S = real.shape[1]
    return (torch.ones(S, S, dtype=torch.bool).tril()[-queries:] & real[:, None, None, :]).contiguous()


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """As transformers' eager gets it: least, but not -inf."""
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)


def padding(side: str, batch: int, length: int) -> Tensor:
    real = torch.ones(batch, length, dtype=torch.bool)
    if side == "left":
        real[0, :2] = False
    elif side == "right":
        real[0, -2:] = False
    return real


def far(a: Tensor, b: Tensor) -> float:
    return float(((a - b).abs().max() / b.abs().max()).detach())


LIMIT = {torch.float64: 1e-12, torch.float32: 2e-6}


@every_kind
@every_mode
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_prefill_is_equal(kind: str, mode: str, side: str, dtype: torch.dtype) -> None:
    layer = Layer(kind, dtype)
    x, mask = layer.hidden(2, 7), causal(padding(side, 2, 7), 7)
    new = ours(layer.theirs, mode)
    for given in (mask, additive(mask, dtype)):
        expected, _ = layer.call(layer.theirs, x, given)
        found, weights = layer.call(new, x, given)
        assert far(found, expected) < LIMIT[dtype] and weights is None
    dead = ~mask.any(-1)[:, 0]  # (B, L): padding that attends nothing
    found = layer.call(new, x, mask)[0][dead]
    assert torch.equal(found, new.o_proj.bias.expand_as(found))  # the value bias must not come back there
    assert bool(dead.any()) == (side == "left")


@every_kind
@every_mode
@pytest.mark.parametrize("side", ["none", "left"])
def test_decode_with_the_models_own_cache_is_equal(kind: str, mode: str, side: str) -> None:
    layer = Layer(kind)
    seen = Seen()
    new = ours(layer.theirs, mode, seen.as_kernel())
    caches = DynamicCache(config=layer.config), DynamicCache(config=layer.config)
    start = 0
    for length in (45, 1, 1, 3, 1):
        x, end = layer.hidden(2, length), start + length
        mask = causal(padding(side, 2, end), length)
        expected, found = (
            layer.call(module, x, mask, start=start, past_key_values=cache)[0]
            for module, cache in zip((layer.theirs, new), caches, strict=True)
        )
        assert far(found, expected) < 1e-12
        held, held_by_theirs = caches[1].layers[0], caches[0].layers[0]
        assert torch.equal(held.keys, held_by_theirs.keys) and torch.equal(held.values, held_by_theirs.values)
        assert held.keys.shape == (2, 1, end, r) and held.values.shape == (2, 1, end, R)  # latents alone
        cheaper = choose(LatentSizes(H, N, R, V, r), length, end, itemsize=held.keys.itemsize).absorbs
        absorbed = mode == "absorbed" or (mode == "auto" and cheaper)
        heads, width, value = (1, r + R, r) if absorbed else (H, N + R, V)
        rows = (1, H) if absorbed and length == 1 else (H, length)
        assert seen.shapes[-1] == ((2, *rows, width), (2, heads, end, width), (2, heads, end, value))
        start = end
    # In auto both ways were gone: the prefill decompresses, a single token does not.
    assert mode != "auto" or {shapes[1][1] for shapes in seen.shapes} == {1, H}


def decode_step(layer: Layer, module: nn.Module, mask: Tensor | None = None) -> Tensor:
    """The last of 7 tokens, after a prefill of 6."""
    torch.manual_seed(9)
    cache = DynamicCache(config=layer.config)
    layer.call(module, layer.hidden(2, 6), None, past_key_values=cache)
    return layer.call(module, layer.hidden(2, 1), mask, start=6, past_key_values=cache)[0]


@every_mode
@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_without_a_mask_one_query_sees_all_keys(kind: str, mode: str) -> None:
    layer = Layer(kind)
    assert far(decode_step(layer, ours(layer.theirs, mode)), decode_step(layer, layer.theirs)) < 1e-12


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("masked_heads", [1, H])
@pytest.mark.parametrize("float_mask", [False, True])
def test_one_query_whose_heads_become_rows(kernel: str, masked_heads: int, float_mask: bool) -> None:
    layer = Layer("v3")
    new = ours(layer.theirs, "absorbed", find_kernel(kernel))
    mask = torch.randn(2, masked_heads, 1, 7, dtype=torch.float64)
    mask = mask if float_mask else mask > 0
    mask[1] = False if mask.dtype == torch.bool else float("-inf")  # this row attends nothing
    assert far(decode_step(layer, new, mask), decode_step(layer, layer.theirs, mask)) < 1e-12


@every_mode
@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_static_cache(kind: str, mode: str) -> None:
    """It gives more keys than there are tokens; the mask, or its absence in a prefill, must hide the rest."""
    layer = Layer(kind)
    new = ours(layer.theirs, mode)
    caches = [StaticCache(config=layer.config, max_cache_len=9) for _ in range(2)]
    x = layer.hidden(2, 5)
    expected, _ = layer.call(layer.theirs, x, None, past_key_values=caches[0])
    found, _ = layer.call(new, x, None, past_key_values=caches[1])
    assert far(found, expected) < 1e-12
    x, mask = layer.hidden(2, 1), (torch.arange(9) <= 5).expand(2, 1, 1, 9)
    expected, _ = layer.call(layer.theirs, x, mask, start=5, past_key_values=caches[0])
    found, _ = layer.call(new, x, mask, start=5, past_key_values=caches[1])
    assert far(found, expected) < 1e-12


@every_mode
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_no_mask_means_what_the_implementation_means_by_it(implementation: str, mode: str) -> None:
    layer = Layer("v3", more={"attn_implementation": implementation})
    new, x = ours(layer.theirs, mode), layer.hidden(2, 7)
    outputs = []
    for kwargs in ({}, {"is_causal": False}):
        expected, _ = layer.call(layer.theirs, x, None, **kwargs)
        outputs.append(expected)
        assert far(layer.call(new, x, None, **kwargs)[0], expected) < 1e-6
    assert torch.equal(*outputs) == (implementation == "eager")


class Called(nn.Module):
    """An attention as a function of its input alone."""

    def __init__(self, layer: Layer, attn: nn.Module, mask: Tensor) -> None:
        super().__init__()
        self.attn, self.mask, self.call = attn, mask, layer.call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.attn, x, self.mask)[0]


@every_kind
@every_mode
def test_outputs_and_gradients_pass_the_acceptance_rule(kind: str, mode: str) -> None:
    layer = Layer(kind, torch.float32)
    x, mask = layer.hidden(2, 7), causal(padding("right", 2, 7), 7)
    new = Called(layer, ours(copy.deepcopy(layer.theirs), mode), mask)
    harness.assert_equivalent(new, Called(layer, layer.theirs, mask), x, gradients=True)


@every_mode
@pytest.mark.parametrize("kind", ["v3", "v3-halves", "v3-yarn"])
def test_gradients_in_float64(kind: str, mode: str) -> None:
    """V2 turns its channels in float32 whatever the dtype, and both generations norm so: no float64 gradients there."""
    layer = Layer(kind)
    layer.theirs.kv_a_layernorm = nn.RMSNorm(r, dtype=torch.float64)
    if layer.theirs.q_lora_rank is not None:
        layer.theirs.q_a_layernorm = nn.RMSNorm(12, dtype=torch.float64)
    x, mask = layer.hidden(2, 7).requires_grad_(), causal(padding("right", 2, 7), 7)
    cotangent = torch.randn(2, 7, 32, dtype=torch.float64)
    wanted = {"x": x} | dict(layer.theirs.named_parameters())
    expected, found = (
        torch.autograd.grad(layer.call(module, x, mask)[0], list(wanted.values()), cotangent)
        for module in (layer.theirs, ours(layer.theirs, mode))
    )
    for name, theirs, mine in zip(wanted, expected, found, strict=True):
        assert far(mine, theirs) < 1e-12, name


MUTATIONS: dict[str, Callable[[Any], None]] = {
    "rope not turned": lambda new: setattr(new, "rotate", lambda x, at: x),
    "rope on the queries alone": lambda new: setattr(new, "rotate", _only_queries(new.rotate)),
    "scale of the rank": lambda new: setattr(new, "scaling", r**-0.5),
    "scale of nope alone": lambda new: setattr(new, "scaling", N**-0.5),
    "value bias dropped": lambda new: setattr(new, "_value_bias", lambda q, k, rules: 0.0),
    "rope before nope in the queries": lambda new: setattr(new, "kernel", Kernel("swapped", _queries_swapped)),
    "values with rope in them": lambda new: setattr(new, "kernel", Kernel("shifted", _values_shifted)),
    "causal mask lost": lambda new: setattr(new, "_rules", _without_mask(new._rules)),
}


def _only_queries(rotate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, at: x if x.shape[1] == 1 else rotate(x, at)


def _queries_swapped(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    return eager(torch.cat((q[..., r:], q[..., :r]), dim=-1), k, v, call)


def _values_shifted(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    return eager(q, k, k[..., R:], call)


def _without_mask(rules: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda mask, queries, kwargs: rules(mask, queries, kwargs) | {"mask": None, "causal": False}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_a_wrong_one_is_far_off(kind: str, mutation: str) -> None:
    layer = Layer(kind)
    x, mask = layer.hidden(2, 7), causal(padding("none", 2, 7), 7)
    expected, _ = layer.call(layer.theirs, x, mask)
    new = ours(layer.theirs, "absorbed")
    assert far(layer.call(new, x, mask)[0], expected) < 1e-12
    MUTATIONS[mutation](new)
    assert far(layer.call(new, x, mask)[0], expected) > 1e-3


def test_the_wrong_rope_layout_is_far_off() -> None:
    layer = Layer("v3")
    x, mask = layer.hidden(2, 7), causal(padding("none", 2, 7), 7)
    expected, _ = layer.call(layer.theirs, x, mask)
    new = ours(layer.theirs, "absorbed")
    new.config = make_config("v3", rope_interleave=False)
    assert far(layer.call(new, x, mask)[0], expected) > 1e-3


@every_mode
def test_dropout_draws_the_same_and_is_never_absorbed(mode: str) -> None:
    layer = Layer("v3", more={"attention_dropout": 0.4})
    seen = Seen()
    new = ours(layer.theirs, mode, seen.as_kernel())
    x, mask = layer.hidden(2, 1), torch.ones(2, 1, 1, 1, dtype=torch.bool)
    outputs = []
    for module in (layer.theirs.train(), new.train()):
        torch.manual_seed(5)
        outputs.append(layer.call(module, x, mask)[0])
    assert far(outputs[1], outputs[0]) < 1e-12
    assert far(outputs[0], layer.call(layer.theirs.eval(), x, mask)[0]) > 1e-3  # it did drop
    assert seen.shapes[-1][1] == (2, H, 1, N + R)


@every_mode
@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_autocast(kind: str, mode: str) -> None:
    layer = Layer(kind, torch.float32)
    x, mask = layer.hidden(2, 7), causal(padding("none", 2, 7), 7)
    exact, _ = layer.call(layer.theirs, x, mask)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = layer.call(layer.theirs, x, mask)
        found, _ = layer.call(ours(layer.theirs, mode), x, mask)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert far(found.float(), exact) < 2 * far(expected.float(), exact)


@every_mode
def test_the_same_parts_stay_in_place(mode: str) -> None:
    layer = Layer("v3")
    calls: list[str] = []
    layer.theirs.register_forward_hook(lambda *_: calls.append("attention"))
    layer.theirs.q_b_proj.register_forward_hook(lambda *_: calls.append("q_b_proj"))
    layer.theirs.q_a_proj.requires_grad_(False)
    layer.theirs.train()
    new = ours(layer.theirs, mode)
    assert isinstance(new, AbsorbingDeepseekV3Attention) and new.training
    assert list(new.state_dict()) == list(layer.theirs.state_dict())
    for (name, mine), (_, theirs) in zip(new.named_parameters(), layer.theirs.named_parameters(), strict=True):
        assert mine is theirs, name
    layer.call(new, layer.hidden(1, 3), None)
    assert calls == ["q_b_proj", "attention"]


@every_mode
@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_copies_and_pickles(kind: str, mode: str) -> None:
    layer = Layer(kind)
    x = layer.hidden(2, 3)
    new = ours(layer.theirs, mode)
    expected = layer.call(new, x, None)[0]
    for clone in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        assert type(clone) is type(new) and clone.mode == mode
        assert torch.equal(layer.call(clone, x, None)[0], expected)
        with torch.no_grad():
            clone.o_proj.bias.zero_()
        assert torch.equal(layer.call(new, x, None)[0], expected)  # nothing is shared with the clone


def test_swapped_again_to_another_mode() -> None:
    layer = Layer("v2")
    again = ours(ours(layer.theirs, "naive"), "absorbed", find_kernel("sdpa"))
    assert type(again) is AbsorbingDeepseekV2Attention and (again.mode, again.kernel.name) == ("absorbed", "sdpa")
    x, mask = layer.hidden(2, 7), causal(padding("none", 2, 7), 7)
    expected, _ = layer.call(layer.theirs, x, mask)
    assert far(layer.call(again, x, mask)[0], expected) < 1e-12


def test_what_it_does_not_know_it_leaves_or_refuses() -> None:
    class Other(DeepseekV3Attention):
        pass

    assert convert(nn.Linear(2, 2), find_kernel("eager"), request("auto")) is None
    with pytest.raises(SwapError, match="Other is an unknown subclass"):
        ours(Other(make_config("v3"), layer_idx=0), "auto")
    layer = Layer("v3")
    with pytest.raises(SwapError, match="mode = 'fast': must be auto, naive, absorbed"):
        ours(layer.theirs, "fast")
    with pytest.raises(ValueError, match=r"attention_mask \(2, 7\): must be a tensor of shape"):
        layer.call(ours(layer.theirs, "auto"), layer.hidden(2, 7), torch.ones(2, 7))
    with pytest.raises(Unsupported, match="AbsorbingDeepseekV3Attention cannot heed softcap"):
        layer.call(ours(layer.theirs, "auto"), layer.hidden(2, 7), None, softcap=5.0)
    layer.theirs.forward = lambda *_: None
    with pytest.raises(SwapError, match="forward was replaced"):
        ours(layer.theirs, "auto")


class LoRA(nn.Linear):
    """Like peft's: its weight is not all that it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1.5 * x.sum(-1, keepdim=True)


@pytest.mark.parametrize("added", ["subclass", "hook"])
def test_a_decompressor_that_does_more_than_its_weight_is_called_or_refused(added: str) -> None:
    layer = Layer("v3")
    if added == "subclass":
        layer.theirs.kv_b_proj = LoRA(r, H * (N + V), dtype=torch.float64)
    else:
        layer.theirs.kv_b_proj.register_forward_hook(lambda module, args, out: 2 * out)
    seen = Seen()
    expected, found = decode_step(layer, layer.theirs), decode_step(layer, ours(layer.theirs, "auto", seen.as_kernel()))
    assert far(found, expected) < 1e-12
    assert seen.shapes[-1][1] == (2, H, 7, N + R)  # where it would otherwise have been absorbed
    with pytest.raises(SwapError, match="mode = 'absorbed': kv_b_proj"):
        ours(layer.theirs, "absorbed")


def make_model(kind: str, **more: Any) -> Any:
    torch.manual_seed(1)
    config = make_config(kind, eos_token_id=None, **more)
    model = (DeepseekV2ForCausalLM if isinstance(config, DeepseekV2Config) else DeepseekV3ForCausalLM)(config)
    fill(model)
    return model.eval()


def swapped_by_hand(model: Any, mode: str, kernel: Kernel) -> Any:
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.self_attn = ours(layer.self_attn, mode, kernel)
    return model


@every_mode
@pytest.mark.parametrize("kind", ["v2", "v2-q-lora", "v3", "v3-yarn"])
def test_generates_the_same_tokens(kind: str, mode: str) -> None:
    model, seen = make_model(kind), Seen()
    new = swapped_by_hand(model, mode, seen.as_kernel())
    tokens = torch.randint(3, 97, (2, 6))
    options = {"attention_mask": padding("left", 2, 6).long(), "max_new_tokens": 10, "do_sample": False}
    options |= {"pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    expected, found = (m.generate(tokens, **options) for m in (model, new))
    assert torch.equal(found.sequences, expected.sequences)
    assert far(torch.stack(found.logits), torch.stack(expected.logits)) < 1e-5
    assert len(seen.shapes) == 2 * 10
    if mode != "naive":  # every step after the prefill attends in latent space
        assert {(k[1], k[3]) for _, k, _ in seen.shapes[2:]} == {(1, r + R)}


def test_records_attentions_as_before() -> None:
    model = make_model("v3", attn_implementation="eager")
    new = swapped_by_hand(model, "absorbed", find_kernel("eager"))
    tokens = torch.randint(3, 97, (2, 6))
    expected, found = (m(tokens, output_attentions=True).attentions for m in (model, new))
    assert len(found) == len(expected) == 2
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("overrides", [{}, {"q_lora_rank": 12}, {"num_attention_heads": 8}], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_family_through_the_engine_and_back(name: str, overrides: dict[str, Any]) -> None:
    family = find_family(name)
    model: Any = family.build(overrides)
    structure = family.inspect(model)
    heads = overrides.get("num_attention_heads", 4)
    assert (structure.attentions, structure.heads, structure.kv_heads, structure.head_dim) == (2, heads, heads, 12)
    batch = family.batches(model, torch.Generator().manual_seed(0))["left-padded"]
    with torch.no_grad():
        before, tokens = family.output(model(**batch.kwargs)), generated(family, model)
        _, report = harness.swap(model, inplace=True, **family.swap_options)
        assert all(isinstance(layer.self_attn, LatentAttention) for layer in model.model.layers)
        assert far(family.output(model(**batch.kwargs))[batch.real], before[batch.real]) < 1e-5
        assert torch.equal(generated(family, model), tokens)
        assert len(report.swapped) == 2 and not report.uncalled
        report.undo()
        assert {type(layer.self_attn).__name__ for layer in model.model.layers} == {structure.attention_class}
        assert torch.equal(family.output(model(**batch.kwargs)), before)


def generated(family: Family, model: nn.Module) -> Tensor:
    assert family.generate is not None
    return family.generate(model, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mutation", ["rope not turned", "scale of the rank", "causal mask lost"])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_a_family_generates_other_tokens_if_it_is_wrong(name: str, mutation: str) -> None:
    """Tiny random models like to repeat a token whatever attention says; these must not."""
    family = find_family(name)
    model = family.build({})
    swapped: Any = harness.swap(model, **family.swap_options)[0]
    for layer in swapped.model.layers:
        MUTATIONS[mutation](layer.self_attn)
    assert not torch.equal(generated(family, swapped), generated(family, model))


@pytest.mark.parametrize(
    ("sizes", "params"),
    [
        ((2048, 16, 128, 64, 128, 512, None), 13_763_072),  # DeepSeek-V2-Lite
        ((5120, 128, 128, 64, 128, 512, 1536), 149_227_520),  # DeepSeek-V2
        ((7168, 128, 128, 64, 128, 512, 1536), 187_107_328),  # DeepSeek-V3
    ],
)
def test_published_sizes(sizes: Any, params: int) -> None:
    embed_dim, heads, nope, rope, value, rank, q_rank = sizes
    attention_class, config_class = DeepseekV3Attention, DeepseekV3Config
    if embed_dim != 7168:
        attention_class, config_class = DeepseekV2Attention, DeepseekV2Config
    config = config_class(
        hidden_size=embed_dim,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        kv_lora_rank=rank,
        q_lora_rank=q_rank,
    )
    with torch.device("meta"):
        module = ours(attention_class(config, layer_idx=0), "auto")
    assert (
        sum(p.numel() for p in module.parameters())
        == latent_params(embed_dim, LatentSizes(heads, nope, rope, value, rank), q_rank)
        == params
    )
