"""The contract of nn.MultiheadAttention beyond its numbers: state, errors, precision, compilers, nested tensors."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import harness
from harness.cell.build import randomise
from harness.variants.dropin import EagerMultiheadAttention, EagerMultiheadAttentionWithInProj
from harness.variants.multihead import DropInAttention

CLASSES = (EagerMultiheadAttention, EagerMultiheadAttentionWithInProj)
every_class = pytest.mark.parametrize("kind", CLASSES)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "kdim and vdim": {"kdim": 6, "vdim": 5},
    "kdim without bias": {"kdim": 6, "bias": False},
    "more tokens": {"add_bias_kv": True, "add_zero_attn": True},
    "double": {"dtype": torch.float64},
}
every_form = pytest.mark.parametrize("form", FORMS)
E, H = 8, 2
FUSED = "torch._transformer_encoder_layer_fwd"


def pair(
    kind: type[DropInAttention], form: str = "plain", **more: Any
) -> tuple[nn.MultiheadAttention, DropInAttention]:
    """Random weights, biases too, the same in both."""
    theirs = nn.MultiheadAttention(E, H, **FORMS[form], **more)
    randomise(theirs, torch.Generator().manual_seed(1))
    ours = kind(E, H, **FORMS[form], **more)
    ours.load_state_dict(theirs.state_dict())
    return theirs.eval(), ours.eval()


def self_inputs(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(*shape, E, generator=torch.Generator().manual_seed(2))
    return x, x, x


# ---- state -----------------------------------------------------------------------------------------------------------


@every_class
def test_is_no_multihead_attention_of_torchs(kind: type[DropInAttention]) -> None:
    assert not issubclass(kind, nn.MultiheadAttention)
    assert getattr(harness, kind.__name__) is kind


@every_form
@every_class
def test_the_same_seed_gives_torchs_weights_under_torchs_keys(kind: type[DropInAttention], form: str) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, **FORMS[form]).state_dict()
    torch.manual_seed(0)
    ours = kind(E, H, **FORMS[form]).state_dict()
    assert ours.keys() == theirs.keys()
    for key in theirs:
        assert torch.equal(ours[key], theirs[key]), key
        assert ours[key].dtype == theirs[key].dtype


@every_form
@every_class
def test_state_goes_to_torch_and_back(kind: type[DropInAttention], form: str) -> None:
    theirs, ours = pair(kind, form)
    back = nn.MultiheadAttention(E, H, **FORMS[form])
    back.load_state_dict(ours.state_dict())
    for key, value in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key


@every_class
def test_state_inside_a_model_has_torchs_keys(kind: type[DropInAttention]) -> None:
    theirs = nn.ModuleDict({"a": nn.MultiheadAttention(E, H), "b": nn.Linear(2, 2)})
    ours = nn.ModuleDict({"a": kind(E, H), "b": nn.Linear(2, 2)})
    assert ours.load_state_dict(theirs.state_dict()) == ([], [])
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert theirs.load_state_dict(ours.state_dict()) == ([], [])


def test_split_projections_load_their_own_names_too() -> None:
    source, target = EagerMultiheadAttention(E, H), EagerMultiheadAttention(E, H)
    own = {name: parameter.detach() for name, parameter in source.named_parameters()}
    assert "q_proj.weight" in own
    target.load_state_dict(own)
    assert torch.equal(target.q_proj.weight, source.q_proj.weight)


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"])
@every_form
def test_writes_under_torchs_names_reach_the_split_projections(form: str, name: str) -> None:
    theirs, ours = pair(EagerMultiheadAttention, form)
    expected = getattr(theirs, name)
    if expected is None:
        assert (getattr(ours, name) is None) == (name in ("in_proj_weight", "in_proj_bias"))
        return

    def same() -> None:
        for key, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[key], value), key

    for module in (theirs, ours):
        nn.init.constant_(getattr(module, name), 0.5)
    same()
    for module in (theirs, ours):
        getattr(module, name).data[1:3].mul_(3)
    same()
    fresh = torch.randn(expected.shape, dtype=expected.dtype)
    for module in (theirs, ours):
        setattr(module, name, nn.Parameter(fresh.clone(), requires_grad=False))
    same()
    assert not getattr(ours, name).requires_grad
    ours = copy.deepcopy(ours)
    for module in (theirs, ours):
        module.state_dict()[name].fill_(2)  # as averaging of weights does
    same()
    with pytest.raises(ValueError, match=rf"{name} = \(2,\): must be"):
        setattr(ours, name, nn.Parameter(torch.zeros(2)))


@every_form
@every_class
def test_who_reads_torchs_flag_finds_the_weights_it_speaks_of(kind: type[DropInAttention], form: str) -> None:
    """False keeps torch's encoder layers off their fast path; then the three weights must be there."""
    theirs, ours = pair(kind, form)
    dtype = theirs.out_proj.weight.dtype
    query, key, value = (torch.randn(5, 3, size, dtype=dtype) for size in (E, theirs.kdim, theirs.vdim))
    module: Any = ours
    assert module._qkv_same_embed_dim == (theirs._qkv_same_embed_dim and theirs.in_proj_bias is None)
    found, weights = torch.nn.functional.multi_head_attention_forward(
        query, key, value, E, H, None, module.in_proj_bias, module.bias_k, module.bias_v, module.add_zero_attn, 0.0,
        module.out_proj.weight, module.out_proj.bias, use_separate_proj_weight=True,
        q_proj_weight=module.q_proj_weight, k_proj_weight=module.k_proj_weight, v_proj_weight=module.v_proj_weight,
    )  # fmt: skip
    expected, expected_weights = theirs(query, key, value)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(weights, expected_weights)
    nn.init.constant_(module.k_proj_weight, 0.5)
    name, rows = ("in_proj_weight", slice(E, 2 * E)) if ours.packs else ("k_proj_weight", slice(None))
    assert (ours.state_dict()[name][rows] == 0.5).all()


@every_class
def test_merged_masks_are_torchs(kind: type[DropInAttention]) -> None:
    theirs, ours = pair(kind, batch_first=True)
    x, padding = torch.randn(3, 5, E), torch.rand(3, 5) < 0.3
    for attn_mask in (None, torch.rand(5, 5) < 0.3, torch.rand(3 * H, 5, 5) < 0.3):
        for key_padding_mask in (None, padding):
            (found, kind_found), expected = (m.merge_masks(attn_mask, key_padding_mask, x) for m in (ours, theirs))
            assert kind_found == expected[1]
            torch.testing.assert_close(found, expected[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@every_form
@every_class
def test_scripted_it_is_torchs_own_function_and_says_so(kind: type[DropInAttention], form: str) -> None:
    theirs, ours = pair(kind, form, batch_first=True)
    dtype = theirs.out_proj.weight.dtype
    query, key, value = (torch.randn(3, 5, size, dtype=dtype) for size in (E, theirs.kdim, theirs.vdim))
    with pytest.warns(UserWarning, match=f"{kind.__name__} runs torch's own function there"):
        scripted = torch.jit.script(ours)
    masks = {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "key_padding_mask": torch.zeros(3, 5).bool()}
    for options in ({}, masks, {"need_weights": False}):
        for found, expected in zip(
            scripted(query, key, value, **options), theirs(query, key, value, **options), strict=True
        ):
            torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.jit.script. Eager:UserWarning")
@every_class
def test_a_swapped_encoder_is_scripted_and_stays_swapped(kind: type[DropInAttention]) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    randomise(model, torch.Generator().manual_seed(7))
    new, report = harness.swap(model, use_in_proj=kind is EagerMultiheadAttentionWithInProj)
    scripted, x = torch.jit.script(new), self_inputs(2, 5)[0]
    for context in (torch.enable_grad, torch.no_grad):
        with context():
            torch.testing.assert_close(scripted(x), model(x))
    assert len(report.uncalled) == 2
    new(x)
    assert not report.uncalled


@every_class
def test_three_weights_compile_and_prune_as_torchs(kind: type[DropInAttention]) -> None:
    theirs, ours = pair(kind, "kdim and vdim")
    inputs = tuple(torch.randn(5, 3, size) for size in (E, 6, 5))
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs)[0], theirs(*inputs)[0])
    prune.l1_unstructured(theirs, "q_proj_weight", amount=0.5)
    if isinstance(ours, EagerMultiheadAttention):
        prune.l1_unstructured(ours.q_proj, "weight", amount=0.5)
    else:
        prune.l1_unstructured(ours, "q_proj_weight", amount=0.5)
    torch.testing.assert_close(ours(*inputs)[0], theirs(*inputs)[0])


@every_class
def test_a_bias_of_another_dtype(kind: type[DropInAttention]) -> None:
    theirs, ours = pair(kind, "double", batch_first=True)
    x = torch.randn(2, 5, E, dtype=torch.float64)

    def assign(name: str, dtype: torch.dtype) -> None:
        for module in (theirs, ours):
            value: Tensor = getattr(module, name)
            setattr(module, name, nn.Parameter(value.detach().to(dtype)))

    assign("in_proj_bias", torch.float16)
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x))
    for name in ("in_proj_weight", "in_proj_bias"):
        assign(name, torch.float32)
    for module in (theirs, ours):
        module.out_proj.float()
    y = x.float()
    torch.testing.assert_close(ours(y, y, y), theirs(y, y, y))


def test_gradients_flow_through_the_packed_weight() -> None:
    ours = EagerMultiheadAttention(E, H)
    packed = ours.in_proj_weight
    assert packed is not None
    (packed * torch.arange(3 * E)[:, None]).sum().backward()
    for part, start in ((ours.q_proj, 0), (ours.k_proj, E), (ours.v_proj, 2 * E)):
        assert part.weight.grad is not None
        assert torch.equal(part.weight.grad, torch.arange(start, start + E)[:, None].expand(E, E).float())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias"])
def test_freezing_under_torchs_names_reaches_the_split_projections(name: str, grad: bool) -> None:
    theirs, ours = pair(EagerMultiheadAttention)
    kind = name.rpartition("_")[2]
    parts = [ours.get_parameter(f"{part}.{kind}") for part in EagerMultiheadAttention.PARTS]
    for step in (False, True):
        for module in (theirs, ours):
            with torch.set_grad_enabled(grad):
                getattr(module, name).requires_grad = step
                assert getattr(module, name).requires_grad == step
        assert [part.requires_grad for part in parts] == [step] * 3
        for module in (theirs, ours):
            with torch.set_grad_enabled(grad):
                held = getattr(module, name)
                assert held.requires_grad_(not step) is held and held.requires_grad != step
        assert [part.requires_grad for part in parts] == [not step] * 3
    for module in (theirs, ours):
        getattr(module, name).requires_grad_(False)
        module(*self_inputs(5, 3))[0].sum().backward()
    assert all(part.grad is None for part in parts) and getattr(theirs, name).grad is None
    torch.testing.assert_close(ours.out_proj.weight.grad, theirs.out_proj.weight.grad)


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias"])
def test_data_and_gradients_under_torchs_names_are_those_of_the_split_projections(name: str) -> None:
    """As who casts or clips by hand does: `p.data = p.data.half()`, `p.grad.mul_(...)`."""
    theirs, ours = pair(EagerMultiheadAttention, "double")
    x = [t.double() for t in self_inputs(5, 3)]
    for module in (theirs, ours):
        held = getattr(module, name)
        held.data = held.data * 2
        held.data.mul_(0.7)
        assert held.grad is None and getattr(module, name).grad is None
        module(*x)[0].square().sum().backward()
        getattr(module, name).grad.mul_(0.5)
    torch.testing.assert_close(getattr(ours, name).grad, getattr(theirs, name).grad)
    for module in (theirs, ours):
        module(*x)[0].square().sum().backward()  # adds to what was written
        getattr(module, name).grad.data.add_(1)
    kind = name.rpartition("_")[2]
    parts = [ours.get_parameter(f"{part}.{kind}") for part in EagerMultiheadAttention.PARTS]
    torch.testing.assert_close(
        torch.cat([part.grad for part in parts if part.grad is not None]), getattr(theirs, name).grad
    )
    for module in (theirs, ours):
        held = getattr(module, name)
        held.grad = torch.ones_like(held)
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    for module in (theirs, ours):
        getattr(module, name).grad = None
    assert all(part.grad is None for part in parts)
    for module in (theirs, ours):
        held = getattr(module, name)
        held.data = held.data.half()
    assert getattr(ours, name).dtype == parts[0].dtype == torch.float16
    with pytest.raises(RuntimeError, match="hook those of q_proj, k_proj and v_proj"):
        getattr(ours, name).register_hook(lambda grad: grad * 2)


@every_class
def test_weights_made_in_inference_mode_run_there(kind: type[DropInAttention]) -> None:
    layer, x = nn.TransformerEncoderLayer(E, H, 16, batch_first=True).eval(), self_inputs(5, 3)[0]
    with torch.inference_mode():
        ours = harness.replace_mha_with_eager(layer, use_in_proj=kind is EagerMultiheadAttentionWithInProj)
        torch.testing.assert_close(ours(x), layer(x))
    with torch.no_grad():
        torch.testing.assert_close(ours(x), layer(x))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda module: module.double(),
    "written": lambda module: module.in_proj_bias.add_(1),
    "assigned": lambda module: setattr(module, "in_proj_bias", nn.Parameter(torch.randn(3 * E))),
    "loaded": lambda module: module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()}, assign=True),
    "one of three": lambda module: setattr(module.k_proj, "bias", nn.Parameter(torch.randn(E))),
    "moved": lambda module: setattr(module.v_proj.bias, "data", torch.randn(E)),
    "frozen": lambda module: module.in_proj_bias.requires_grad_(False),
    "none": lambda module: setattr(module, "in_proj_bias", None),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("change", CHANGES)
def test_the_packed_bias_is_never_of_before(change: str, mode: Callable[[], Any]) -> None:
    module: Any = pair(EagerMultiheadAttention)[1]
    for reads in (torch.no_grad, torch.inference_mode, torch.enable_grad, mode):
        with reads():
            assert module.in_proj_bias is not None
    with torch.no_grad():
        CHANGES[change](module)
    for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        linears = (twin.q_proj, twin.k_proj, twin.v_proj)
        with mode():
            if change == "none":
                assert twin.in_proj_bias is None
                continue
            expected = torch.cat([linear.bias for linear in linears])
            assert torch.equal(twin.in_proj_bias, expected) and twin.in_proj_bias.dtype == expected.dtype
            assert twin.in_proj_bias.requires_grad == (change != "frozen")
        with torch.no_grad():
            twin.in_proj_bias.fill_(3)
        assert all((linear.bias == 3).all() for linear in linears)
    if change != "none":
        loss = (torch.ones(3 * E, requires_grad=True) * module.in_proj_bias.to(torch.float32)).sum()
        loss.backward()  # no tensor of inference mode


def test_a_layer_that_ran_in_inference_mode_trains() -> None:
    """torch's layers read the bias at each call, and so have the three laid out in one memory."""
    layer, _ = harness.swap(nn.TransformerEncoderLayer(E, H, 16, batch_first=True).eval())
    x = self_inputs(2, 5)[0]
    with torch.inference_mode():
        layer(x)
    assert not any(parameter.is_inference() for parameter in layer.parameters())
    layer.train()(x).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def test_the_packed_weight_is_a_plain_tensor_to_every_operation() -> None:
    packed = EagerMultiheadAttention(E, H).in_proj_weight
    assert not torch.overrides.has_torch_function((packed,))
    for found in (packed * 2, packed.detach(), packed.data, packed[:2], packed.clone(), packed.chunk(3)[0]):
        assert type(found) is Tensor


@pytest.mark.parametrize("use_in_proj", [True, False])
def test_clips_initialisation_after_a_swap(use_in_proj: bool) -> None:
    """OpenAI CLIP's `initialize_parameters`, on the attention of its residual blocks."""
    theirs: Any = nn.ModuleList(nn.MultiheadAttention(E, H) for _ in range(2))
    ours: Any = harness.replace_mha_with_eager(theirs, use_in_proj=use_in_proj)
    for model in (theirs, ours):
        torch.manual_seed(3)
        for attention in model:
            nn.init.normal_(attention.in_proj_weight, std=E**-0.5)
            nn.init.normal_(attention.out_proj.weight, std=0.1)
    for before, after in zip(theirs, ours, strict=True):
        torch.testing.assert_close(after(*self_inputs(5, 3)), before(*self_inputs(5, 3)))


@every_class
def test_loading_what_does_not_fit_is_refused(kind: type[DropInAttention]) -> None:
    state = nn.MultiheadAttention(E, H).state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        kind(E, H).load_state_dict({key: value for key, value in state.items() if key != "in_proj_bias"})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        kind(E, H).load_state_dict(state | {"more": torch.ones(1)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        kind(E, H).load_state_dict(nn.MultiheadAttention(2 * E, H).state_dict())


def saved(module: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved])
@every_form
@every_class
def test_copies_and_pickles(kind: type[DropInAttention], form: str, travel: Callable[[Any], Any]) -> None:
    theirs, ours = pair(kind, form)
    again = travel(ours)
    options = FORMS[form]
    dtype = options.get("dtype", torch.float32)
    q, k, v = (torch.randn(3, 2, n, dtype=dtype) for n in (E, options.get("kdim", E), options.get("vdim", E)))
    assert torch.equal(again(q, k, v)[0], ours(q, k, v)[0])
    assert again.state_dict().keys() == theirs.state_dict().keys()


@every_class
def test_a_swapped_model_pickles_with_its_kernel(kind: type[DropInAttention]) -> None:
    for kernel in ("eager", "sdpa"):
        ours = kind(E, H, kernel=kernel)
        again = pickle.loads(pickle.dumps(ours))
        x = self_inputs(3, 2)
        assert torch.equal(again(*x, need_weights=False)[0], ours(*x, need_weights=False)[0])


@every_class
def test_on_the_meta_device(kind: type[DropInAttention]) -> None:
    ours = kind(E, H, add_bias_kv=True, device="meta")
    assert {parameter.device.type for parameter in ours.parameters()} == {"meta"}
    with torch.device("meta"):
        assert {parameter.device.type for parameter in kind(E, H).parameters()} == {"meta"}
    x = torch.randn(3, 2, E, device="meta")
    assert ours(x, x, x)[0].shape == (3, 2, E)


# ---- errors: what torch refuses, we refuse, with the same type -------------------------------------------------------

BAD_CONSTRUCTORS: list[dict[str, Any]] = [
    {"embed_dim": 0, "num_heads": 2},
    {"embed_dim": 8, "num_heads": 0},
    {"embed_dim": 8, "num_heads": -2},
    {"embed_dim": 8, "num_heads": 3},
]


@pytest.mark.parametrize("arguments", BAD_CONSTRUCTORS)
@every_class
def test_constructor_refuses_what_torch_refuses(kind: type[DropInAttention], arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, AssertionError)) as theirs:
        nn.MultiheadAttention(**arguments)
    with pytest.raises(theirs.type, match="embed_dim"):
        kind(**arguments)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


BAD_CALLS: dict[str, dict[str, Any]] = {
    "4-D query": {"query": ones(2, 3, 2, E)},
    "2-D query, 3-D key": {"query": ones(3, E)},
    "key 2-D": {"key": ones(3, E)},
    "wrong embed_dim": {"query": ones(3, 2, E + 2)},
    "wrong key width": {"key": ones(3, 2, E + 1), "value": ones(3, 2, E + 1)},
    "key and value lengths": {"value": ones(4, 2, E)},
    "batch sizes": {"query": ones(3, 1, E)},
    "1-D attn_mask": {"attn_mask": ones(3)},
    "4-D attn_mask": {"attn_mask": ones(2, 2, 3, 3)},
    "attn_mask shape": {"attn_mask": ones(3, 4)},
    "3-D attn_mask shape": {"attn_mask": ones(3, 3, 3)},
    "integer attn_mask": {"attn_mask": ones(3, 3, dtype=torch.int64)},
    "byte attn_mask": {"attn_mask": ones(3, 3, dtype=torch.uint8)},
    "padding shape": {"key_padding_mask": ones(2, 4, dtype=torch.bool)},
    "padding batch": {"key_padding_mask": ones(3, 3, dtype=torch.bool)},
    "1-D padding": {"key_padding_mask": ones(3, dtype=torch.bool)},
    "integer padding": {"key_padding_mask": ones(2, 3, dtype=torch.int32)},
    "a hint without its mask": {"is_causal": True},
    "a hint with padding alone": {"is_causal": True, "key_padding_mask": ones(2, 3, dtype=torch.bool)},
    "unbatched 3-D mask": {
        "query": ones(3, E),
        "key": ones(3, E),
        "value": ones(3, E),
        "attn_mask": ones(1, 3, 3),
    },
    "unbatched 2-D padding": {
        "query": ones(3, E),
        "key": ones(3, E),
        "value": ones(3, E),
        "key_padding_mask": ones(1, 3, dtype=torch.bool),
    },
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("name", BAD_CALLS)
@every_class
def test_forward_refuses_what_torch_refuses(kind: type[DropInAttention], name: str, need_weights: bool) -> None:
    theirs, ours = pair(kind)
    arguments = {"query": ones(3, 2, E), "key": ones(3, 2, E), "value": ones(3, 2, E), "need_weights": need_weights}
    arguments |= BAD_CALLS[name]
    with pytest.raises((AssertionError, RuntimeError)) as expected:
        theirs(**arguments)
    with pytest.raises(expected.type) as found:
        ours(**arguments)
    if "-D" in str(expected.value) or "Expected `attn_mask`" in str(expected.value):  # callers look for these words
        assert str(found.value) == str(expected.value)


@every_class
def test_mask_types_that_differ_are_warned_of(kind: type[DropInAttention]) -> None:
    theirs, ours = pair(kind)
    masks = {"attn_mask": torch.zeros(3, 3), "key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)}
    for module in (theirs, ours):
        with pytest.warns(UserWarning, match="type"):
            module(*self_inputs(3, 2), **masks)


@every_class
def test_dead_rows_policy_must_be_known(kind: type[DropInAttention]) -> None:
    with pytest.raises(ValueError, match="dead_rows = 'nan'"):
        kind(E, H, dead_rows="nan")  # type: ignore[arg-type]


# ---- dead rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("floating", [True, False])
@every_class
def test_dead_rows(kind: type[DropInAttention], floating: bool) -> None:
    theirs, ours = pair(kind)
    blocked = torch.zeros(3, 3, dtype=torch.bool)
    blocked[1] = True
    mask = torch.zeros(3, 3).masked_fill(blocked, float("-inf")) if floating else blocked
    x = self_inputs(3, 2)
    out, weights = ours(*x, attn_mask=mask)
    assert torch.equal(out[1], ours.out_proj.bias.expand(2, -1))
    assert bool((weights[:, 1] == 0).all())
    torch_out, torch_weights = theirs(*x, attn_mask=mask)
    assert bool(torch_out[1].isnan().all())
    ours.dead_rows = "torch"
    for found, expected in zip(ours(*x, attn_mask=mask), (torch_out, torch_weights), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)
    for need in (True, False):
        alike = [m(*x, attn_mask=mask, need_weights=need)[0] for m in (ours, theirs)]
        torch.testing.assert_close(*alike, equal_nan=True)


# ---- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("need_weights", [True, False])
@every_class
def test_acceptance_rule_in_every_precision(
    kind: type[DropInAttention], dtype: torch.dtype, need_weights: bool
) -> None:
    theirs = nn.MultiheadAttention(64, 4, batch_first=True, dtype=dtype)
    randomise(theirs, torch.Generator().manual_seed(3))
    ours = kind(64, 4, batch_first=True, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(4)).to(dtype)

    def call(module: nn.Module) -> Callable[..., Any]:
        class Self(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = module

            def forward(self, x: Tensor) -> Any:
                return self.inner(x, x, x, need_weights=need_weights)

        return Self()

    harness.assert_equivalent(call(ours), call(theirs), x, gradients=True)


@pytest.mark.parametrize("need_weights", [True, False])
@every_class
def test_autocast_keeps_scores_in_float32(kind: type[DropInAttention], need_weights: bool) -> None:
    theirs = nn.MultiheadAttention(64, 1, batch_first=True)
    randomise(theirs, torch.Generator().manual_seed(1))
    ours = kind(64, 1, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x = 4 * torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(5))  # sharp, so that bf16 scores show
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = (module(x, x, x, need_weights=need_weights) for module in (ours, theirs))
            projected = ours._project(x, x, x)
        assert [None if t is None else t.dtype for t in found] == [None if t is None else t.dtype for t in expected]
        # The same bf16 projections through a float64 core: what remains is the rounding of heads and output.
        q, k, v = (t[:, 0].double() for t in projected)  # of the one head
        heads = torch.softmax(q @ k.mT / 8, -1) @ v
        golden = nn.functional.linear(heads, ours.out_proj.weight.bfloat16().double(), ours.out_proj.bias.double())
    # 0.4 eps; with scores rounded to bf16 it is 3.5 eps
    assert bool((found[0] - golden).abs().max() <= torch.finfo(torch.bfloat16).eps * golden.abs().max())


@every_class
def test_dropout_of_the_same_seed_is_torchs(kind: type[DropInAttention]) -> None:
    theirs, ours = pair(kind, dropout=0.5)
    x = self_inputs(5, 3)
    for need_weights in (True, False):
        results = []
        for module in (theirs.train(), ours.train()):
            torch.manual_seed(6)
            results.append(module(*x, need_weights=need_weights)[0])
        torch.testing.assert_close(*results)
        assert not torch.equal(ours(*x)[0], ours(*x)[0])
    assert torch.equal(ours.eval()(*x)[0], ours(*x)[0])


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@every_class
def test_strides_are_torchs(kind: type[DropInAttention], batch_first: bool, need_weights: bool) -> None:
    theirs, ours = pair(kind, batch_first=batch_first)
    for shape in ((5, 3), (1, 3), (5, 1), (5,)):
        expected, found = (module(*self_inputs(*shape), need_weights=need_weights)[0] for module in (theirs, ours))
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())


# What decides whether torch's class calls its fused operator in inference, whose output lies otherwise in memory.
INFERENCE: dict[str, dict[str, Any]] = {
    "no grad": {},
    "frozen": {"grad": True, "module": lambda module: module.requires_grad_(False)},
    "only the output frozen": {"grad": True, "module": lambda module: module.out_proj.requires_grad_(False)},
    "frozen, its query not": {
        "grad": True,
        "module": lambda m: m.requires_grad_(False),
        "query": Tensor.requires_grad_,
    },
    "training": {"module": nn.Module.train},
    "odd heads": {"heads": 1},
    "no bias": {"made": {"bias": False}},
    "token": {"made": {"add_bias_kv": True}},
    "zero token": {"made": {"add_zero_attn": True}},
    "length first": {"made": {"batch_first": False}},
    "cross attention": {"key": torch.clone},
    "bool masks": {"attn_mask": torch.ones(3, 3).triu(1).bool(), "key_padding_mask": torch.zeros(5, 3).bool()},
    "float mask": {"attn_mask": torch.zeros(3, 3)},
    "float padding": {"key_padding_mask": torch.zeros(5, 3)},
    "hint": {"attn_mask": torch.zeros(3, 3), "is_causal": True, "need_weights": False},
    "autocast": {"autocast": True},
    "autocast, cast before": {"autocast": True, "query": torch.Tensor.bfloat16},
    "switched off": {"enabled": False},
    "under a mode": {"device": "cpu"},
}


@pytest.mark.parametrize("what", INFERENCE)
@every_class
def test_strides_in_inference_are_torchs(kind: type[DropInAttention], what: str) -> None:
    """A dropout that follows (Monte Carlo dropout keeps it on) draws in their order."""
    options = dict(INFERENCE[what])
    made = {"batch_first": True} | options.pop("made", {})
    heads, change, query = options.pop("heads", H), options.pop("module", None), options.pop("query", None)
    key, grad, autocasts = options.pop("key", None), options.pop("grad", False), options.pop("autocast", False)
    device, enabled = options.pop("device", None), options.pop("enabled", True)
    theirs = nn.MultiheadAttention(E, heads, **made).eval()
    ours = kind(E, heads, **made).eval()
    ours.load_state_dict(theirs.state_dict())
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=autocasts))
        stack.callback(torch.backends.mha.set_fastpath_enabled, True)
        torch.backends.mha.set_fastpath_enabled(enabled)
        if device:
            stack.enter_context(torch.device(device))
        x = self_inputs(5, 3)[0]
        x = x if query is None else query(x)
        other = x if key is None else key(x)
        results = []
        for module in (theirs, ours):
            if change is not None:
                change(module)
            torch.manual_seed(6)
            results.append(module(x, other, other, **options))
    for expected, found in zip(*results, strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)


@pytest.mark.parametrize("use_in_proj", [True, False])
@torch.no_grad()
def test_monte_carlo_dropout_of_the_same_seed_is_torchs(use_in_proj: bool) -> None:
    attention, dropout = nn.MultiheadAttention(E, H, batch_first=True).eval(), nn.Dropout(0.3)
    ours = harness.replace_mha_with_eager(attention, use_in_proj=use_in_proj)
    results = []
    for module in (attention, ours):
        torch.manual_seed(6)
        results.append(dropout(module(*self_inputs(5, 3))[0]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("use_in_proj", [True, False])
def test_a_dropout_after_attention_of_the_same_seed_is_torchs(use_in_proj: bool, batch_first: bool) -> None:
    theirs = nn.TransformerEncoderLayer(E, H, 16, dropout=0.3, batch_first=batch_first)
    ours = harness.replace_mha_with_eager(theirs, use_in_proj=use_in_proj)
    results = []
    for layer in (theirs, ours):
        torch.manual_seed(6)
        results.append(layer(self_inputs(5, 3)[0]))
    torch.testing.assert_close(*results)


@every_class
def test_the_causal_hint_taken_at_its_word_leaves_the_mask_unread(kind: type[DropInAttention]) -> None:
    theirs, ours = pair(kind)
    x = self_inputs(5, 3)
    for mask in (torch.zeros(2, 7), torch.zeros(4, 9, 9, dtype=torch.bool)):
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": True, "need_weights": False}
        torch.testing.assert_close(ours(*x, **options)[0], theirs(*x, **options)[0])
        for module in (theirs, ours):
            with pytest.raises(RuntimeError):
                module(*x, attn_mask=mask, is_causal=True, need_weights=True)


# ---- compilers -------------------------------------------------------------------------------------------------------

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal hint": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True, "need_weights": False},
    "masks": {
        "attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1),
        "key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2]),
    },
    "float mask": {"attn_mask": torch.randn(5, 5), "average_attn_weights": False},
}


@pytest.mark.parametrize("name", CALLS)
@every_class
def test_compiles_to_one_graph(kind: type[DropInAttention], name: str) -> None:
    theirs, ours = pair(kind, batch_first=True)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = self_inputs(2, 5)
    for found, expected in zip(compiled(*x, **CALLS[name]), theirs(*x, **CALLS[name]), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", CALLS)
@every_class
def test_exports(kind: type[DropInAttention], name: str) -> None:
    theirs, ours = pair(kind, batch_first=True)
    x = self_inputs(2, 5)
    program = torch.export.export(ours, x, CALLS[name])
    for found, expected in zip(program.module()(*x, **CALLS[name]), theirs(*x, **CALLS[name]), strict=True):
        torch.testing.assert_close(found, expected)


@every_class
def test_a_swapped_encoder_compiles_with_gradients(kind: type[DropInAttention]) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True)
    new, _ = harness.swap(layer, use_in_proj=kind is EagerMultiheadAttentionWithInProj)
    torch._dynamo.reset()
    compiled = torch.compile(new, fullgraph=True, backend="aot_eager")
    x = self_inputs(2, 5)[0]
    gradients = []
    for module in (compiled, layer):
        leaf = x.clone().requires_grad_()
        module(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


# ---- nested tensors --------------------------------------------------------------------------------------------------


def nested() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a prototype, says torch
        return torch.nested.nested_tensor([torch.randn(3, E), torch.randn(5, E)])


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@every_class
def test_nested_tensors_as_torchs_fast_path(kind: type[DropInAttention], need_weights: bool, average: bool) -> None:
    theirs, ours = pair(kind, batch_first=True)
    x = nested()
    with torch.no_grad():
        out, weights = ours(x, x, x, need_weights=need_weights, average_attn_weights=average)
        expected, expected_weights = theirs(x, x, x, need_weights=need_weights, average_attn_weights=average)
    assert out.is_nested
    for found, wanted in zip(out.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(found, wanted)
    assert (weights is None) == (expected_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, expected_weights)


@every_class
def test_nested_tensors_are_refused_where_torch_refuses_them(kind: type[DropInAttention]) -> None:
    x, mask = nested(), torch.zeros(5, 5, dtype=torch.bool)
    trained = [module.train() for module in pair(kind, batch_first=True)]
    length_first = pair(kind)
    more = pair(kind, "more tokens", batch_first=True)
    plain = pair(kind, batch_first=True)
    with torch.no_grad():
        for theirs, ours in (trained, length_first, more):
            for module in (theirs, ours):
                with pytest.raises(AssertionError):
                    module(x, x, x)
        for module in plain:
            with pytest.raises(AssertionError):
                module(x, x, x, attn_mask=mask)
            with pytest.raises(AssertionError):
                module(x, nested(), x)
    for module in plain:
        with pytest.raises(AssertionError):
            module(x, x, x)  # gradients are on


WHY: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "gradients": lambda module, x: module(x, x, x),
    "training": lambda module, x: module.train()(x, x, x),
    "two tensors": lambda module, x: module(x, nested(), x),
    "no rows": lambda module, x: module(*[torch.nested.nested_tensor([])] * 3),
}


@pytest.mark.parametrize("why", WHY)
@every_class
def test_nested_tensors_are_refused_in_torchs_words(kind: type[DropInAttention], why: str) -> None:
    said = []
    for module in pair(kind, batch_first=True):
        with torch.set_grad_enabled(why == "gradients"), pytest.raises(AssertionError) as error:
            WHY[why](module, nested())
        said.append(str(error.value))
    assert said[1] == said[0]


@every_class
def test_a_nested_tensor_of_empty_rows(kind: type[DropInAttention]) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True).eval()
    new, _ = harness.swap(layer, use_in_proj=kind is EagerMultiheadAttentionWithInProj)
    with torch.no_grad():
        for model in (layer, new):
            out = model(torch.nested.nested_tensor([torch.zeros(0, E)]))
            assert out.is_nested and [row.shape for row in out.unbind()] == [(0, E)]


@every_class
def test_padding_through_an_encoder_that_nests(kind: type[DropInAttention]) -> None:
    """torch's encoder turns padded input into nested tensors on its fast path; padded rows come back as 0."""
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    randomise(model, torch.Generator().manual_seed(7))
    new, report = harness.swap(model, use_in_proj=kind is EagerMultiheadAttentionWithInProj)
    x = self_inputs(2, 5)[0]
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.testing.assert_close(new(x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding))
        x_nested = nested()
        for found, wanted in zip(new(x_nested).unbind(), model(x_nested).unbind(), strict=True):
            torch.testing.assert_close(found, wanted)
    assert all(row.calls == 2 for row in report.swapped)


# ---- torch's fast path -----------------------------------------------------------------------------------------------


def encoder(**more: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, **more)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not more).eval()
    randomise(model, torch.Generator().manual_seed(7))
    return model


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("hidden", [0, 2, 5], ids=["no padding", "padding", "a row of padding alone"])
@every_class
def test_torchs_encoders_take_their_fast_path_where_it_is_allowed(kind: type[DropInAttention], hidden: int) -> None:
    """Bit for bit torch's own inference, NaN of dead rows included; what trains is ours."""
    theirs = encoder()
    packed = kind is EagerMultiheadAttentionWithInProj
    swapped, report = harness.swap(theirs, use_in_proj=packed, fast_path=True)
    ours: Any = swapped
    x = self_inputs(2, 5)[0]
    padding = torch.arange(5).expand(2, 5) >= torch.tensor([[5], [5 - hidden]])
    for lined_up in (padding, padding.flip(1)):  # nested tensors inside, and not
        with torch.no_grad(), mock.patch(FUSED, wraps=torch._transformer_encoder_layer_fwd) as fused:
            found, expected = (model(x, src_key_padding_mask=lined_up) for model in (ours, theirs))
        assert fused.call_count == 4
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert len(report.uncalled) == 2
    for model in (theirs.train(), ours.train()):
        model(x, src_key_padding_mask=padding).square().sum().backward()
    assert len(report.uncalled) == 0
    for before, after in zip(theirs.layers, ours.layers, strict=True):
        torch.testing.assert_close(after.linear1.weight.grad, before.linear1.weight.grad)
        torch.testing.assert_close(after.self_attn.out_proj.weight.grad, before.self_attn.out_proj.weight.grad)


@every_class
def test_its_own_forward_never_takes_torchs_fast_path(kind: type[DropInAttention]) -> None:
    ours, report = harness.swap(
        nn.MultiheadAttention(E, H, batch_first=True).eval(),
        use_in_proj=kind is EagerMultiheadAttentionWithInProj,
        fast_path=True,
    )
    with torch.no_grad(), mock.patch("torch._native_multi_head_attention") as fused:
        ours(*self_inputs(2, 5))
    assert not fused.called and report.uncalled == ()


@every_class
def test_a_layer_that_cannot_take_its_fast_path_calls_ours(kind: type[DropInAttention]) -> None:
    theirs = encoder(activation=nn.functional.silu)
    ours, report = harness.swap(theirs, use_in_proj=kind is EagerMultiheadAttentionWithInProj, fast_path=True)
    with torch.no_grad():
        torch.testing.assert_close(ours(self_inputs(2, 5)[0]), theirs(self_inputs(2, 5)[0]))
    assert report.uncalled == ()


@every_class
def test_the_fast_path_goes_along(kind: type[DropInAttention]) -> None:
    once = kind(E, H, fast_path=True)
    for to in ("sdpa", "fused" if kind is EagerMultiheadAttention else "split"):
        again: Any = harness.swap(copy.deepcopy(once), to=to)[0]
        assert again.fast_path
    back: Any = harness.swap(once, fast_path=False)[0]
    assert not back.fast_path and not kind(E, H).fast_path
