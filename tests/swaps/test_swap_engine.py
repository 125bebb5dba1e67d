"""The swap of nn.MultiheadAttention inside models: what it finds, what goes along, what it refuses, and its undoing."""

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import harness
from harness.cell.build import randomise
from harness.cell.draws import fast_path_off
from harness.swaps import SwapError
from harness.variants.dropin import EagerMultiheadAttention, EagerMultiheadAttentionWithInProj
from harness.variants.multihead import DropInAttention

E, H = 8, 2
both = pytest.mark.parametrize("use_in_proj", [False, True])
in_place_or_not = pytest.mark.parametrize("inplace", [False, True])


class Cross(nn.Module):
    """Attention in many places: a list, a shared module, one with kdim, one whose weights are tied to another's."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.MultiheadAttention(E, H, batch_first=True) for _ in range(3)]
        self.layers = nn.ModuleList(layers)
        self.again = layers[0]
        self.cross = nn.MultiheadAttention(E, H, kdim=3, vdim=3, batch_first=True, add_bias_kv=True)
        self.tied = nn.MultiheadAttention(E, H, batch_first=True)
        self.tied.in_proj_weight = layers[1].in_proj_weight
        self.tied.out_proj.weight = layers[1].out_proj.weight
        self.head = nn.Linear(E, E)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for layer in [*self.layers, self.again, self.tied]:
            x = x + layer(x, x, x, need_weights=False)[0]
        x = x + self.cross(x, memory, memory)[0]
        out: Tensor = self.head(x)
        return out


def model() -> Any:
    made = Cross()
    randomise(made, torch.Generator().manual_seed(0))
    return made.double()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, 5, n, generator=generator, dtype=torch.float64) for n in (E, 3))  # type: ignore[return-value]


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13 * max(1.0, float(expected.detach().abs().max())))


# ---- finding ---------------------------------------------------------------------------------------------------------


@both
@in_place_or_not
def test_every_attention_is_replaced_and_the_report_tells(use_in_proj: bool, inplace: bool) -> None:
    old = model()
    expected = old(*inputs())
    params = sum(p.numel() for p in old.parameters())
    new, report = harness.swap(old, use_in_proj=use_in_proj, inplace=inplace)
    assert (new is old) == inplace
    kind = EagerMultiheadAttentionWithInProj if use_in_proj else EagerMultiheadAttention
    assert not any(isinstance(module, nn.MultiheadAttention) for module in new.modules())
    assert new.layers[0] is new.again  # type: ignore[index]
    names = [row.name for row in report.swapped]
    assert names == ["layers.0", "layers.1", "layers.2", "cross", "tied"]  # an alias is no module of its own
    assert {row.was for row in report.swapped} == {"MultiheadAttention"}
    assert {row.became for row in report.swapped} == {kind.__name__}
    assert all(row.params_before == row.params_after > 0 for row in report.swapped)
    assert sum(p.numel() for p in new.parameters()) == params
    assert report.uncalled == tuple(names)
    assert_close(new(*inputs()), expected)
    assert [row.calls for row in report.swapped] == [2, 1, 1, 1, 1]
    assert report.uncalled == () and report.exact
    assert list(report.table()["calls"]) == [2, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("layers.*", ["layers.0", "layers.1", "layers.2"]),
        ("cross", ["cross"]),
        (nn.MultiheadAttention, ["layers.0", "layers.1", "layers.2", "cross", "tied"]),
        (lambda name, module: module.kdim == 3, ["cross"]),
    ],
)
def test_some_modules_only(only: Any, names: list[str]) -> None:
    old = model()
    new, report = harness.swap(old, only=only, use_in_proj=True)
    assert [row.name for row in report.swapped] == names
    assert_close(new(*inputs()), old(*inputs()))


def test_a_root_is_replaced_itself_and_undone() -> None:
    old = nn.MultiheadAttention(E, H)
    new, report = harness.swap(old, inplace=True)
    assert isinstance(new, EagerMultiheadAttention)
    assert report.undo() is old


def test_replace_mha_with_eager_is_the_short_form() -> None:
    old = model()
    before = copy.deepcopy(old.state_dict())
    for use_in_proj, kind in ((False, EagerMultiheadAttention), (True, EagerMultiheadAttentionWithInProj)):
        new: Any = harness.replace_mha_with_eager(old, use_in_proj=use_in_proj)
        assert type(new.cross) is kind
        assert_close(new(*inputs()), old(*inputs()))
    assert isinstance(old.cross, nn.MultiheadAttention)
    assert all(torch.equal(before[key], value) for key, value in old.state_dict().items())


def test_a_shared_module_is_asked_for_by_any_of_its_names() -> None:
    new: Any = harness.swap(model(), only="again", use_in_proj=True)[0]
    assert new.layers[0] is new.again
    assert isinstance(new.again, DropInAttention)


@both
def test_a_swapped_model_can_be_swapped_again(use_in_proj: bool) -> None:
    old = model()
    once = harness.swap(old, use_in_proj=use_in_proj)[0]
    twice, report = harness.swap(once, to="sdpa", dead_rows="torch", only=lambda name, module: name != "cross")
    assert {row.became for row in report.swapped} == {type(once.cross).__name__}
    assert twice.layers[0].kernel.name == "sdpa" and twice.layers[0].dead_rows == "torch"  # type: ignore[index, union-attr]
    assert_close(twice(*inputs()), old(*inputs()))
    again = report.undo()
    assert again.layers[0].kernel.name == "eager"  # type: ignore[index, union-attr]


# ---- what goes along -------------------------------------------------------------------------------------------------


def test_parameters_that_keep_their_shape_stay_the_same_objects() -> None:
    old = model()
    before = dict(old.named_parameters())
    optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
    new, _ = harness.swap(old, use_in_proj=True, inplace=True)
    after = dict(new.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    new(*inputs()).square().sum().backward()
    weight = after["layers.0.in_proj_weight"].clone()
    optimizer.step()
    assert not torch.equal(after["layers.0.in_proj_weight"], weight)  # the optimizer made before still trains it


def test_split_projections_keep_all_but_the_packed_parameters() -> None:
    old = model()
    before = dict(old.named_parameters())
    new: Any = harness.swap(old, inplace=True)[0]
    assert new.layers[0].out_proj.weight is before["layers.0.out_proj.weight"]
    assert new.cross.k_proj.weight is before["cross.k_proj_weight"]
    assert new.cross.bias_k is before["cross.bias_k"]


@both
def test_tied_parameters_stay_tied(use_in_proj: bool) -> None:
    new: Any = harness.swap(model(), use_in_proj=use_in_proj)[0]
    assert new.tied.out_proj.weight is new.layers[1].out_proj.weight
    if use_in_proj:
        assert new.tied.in_proj_weight is new.layers[1].in_proj_weight
    else:
        for part in ("q_proj", "k_proj", "v_proj"):
            assert getattr(new.tied, part).weight is getattr(new.layers[1], part).weight
            assert getattr(new.tied, part).bias is not getattr(new.layers[1], part).bias
    assert sum(p.numel() for p in new.parameters()) == sum(p.numel() for p in model().parameters())


@both
@in_place_or_not
def test_flags_of_single_modules_and_parameters_are_kept(use_in_proj: bool, inplace: bool) -> None:
    old = model().train()
    old.layers[1].eval()
    old.layers[0].in_proj_bias.requires_grad_(False)
    old.cross.k_proj_weight.requires_grad_(False)
    new: Any = harness.swap(old, use_in_proj=use_in_proj, inplace=inplace)[0]
    assert [layer.training for layer in new.layers] == [True, False, True]
    frozen = {name for name, parameter in new.named_parameters() if not parameter.requires_grad}
    if use_in_proj:
        assert frozen == {"layers.0.in_proj_bias", "cross.k_proj_weight"}
    else:
        assert frozen == {*(f"layers.0.{part}.bias" for part in ("q_proj", "k_proj", "v_proj")), "cross.k_proj.weight"}


@both
@in_place_or_not
def test_hooks_go_along_and_their_handles_still_work(use_in_proj: bool, inplace: bool) -> None:
    old = model()
    seen: list[str] = []
    layer = old.layers[2]
    handles = [
        layer.register_forward_pre_hook(lambda module, args: seen.append("before")),
        layer.register_forward_hook(lambda module, args, kwargs, out: seen.append("after"), with_kwargs=True),
        layer.register_full_backward_hook(lambda module, grads, more: seen.append("backward")),
    ]
    new: Any = harness.swap(old, use_in_proj=use_in_proj, inplace=inplace)[0]
    x, memory = inputs()
    new(x.requires_grad_(), memory).sum().backward()
    assert seen == ["before", "after", "backward"]
    if inplace:
        for handle in handles:
            handle.remove()
        new(x, memory).sum().backward()
        assert len(seen) == 3


@both
def test_gradients_so_far_go_along(use_in_proj: bool) -> None:
    old = model()
    old(*inputs()).square().sum().backward()
    expected = old.layers[0].in_proj_weight.grad.clone()
    new, report = harness.swap(old, use_in_proj=use_in_proj, inplace=True)
    layer: Any = new.layers[0]  # type: ignore[index]
    parts = [layer.in_proj_weight.grad] if use_in_proj else [getattr(layer, p).weight.grad for p in layer.PARTS]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(report.undo().layers[0].in_proj_weight.grad, expected)  # type: ignore[index, union-attr]


def test_what_the_user_hung_on_a_module_goes_along() -> None:
    old = model()
    old.cross.tag = "mine"
    assert harness.swap(old)[0].cross.tag == "mine"  # type: ignore[union-attr]


@both
def test_a_parametrized_output_projection_goes_along(use_in_proj: bool) -> None:
    old = model()
    parametrizations.weight_norm(old.layers[0].out_proj)
    expected = old(*inputs())
    new: Any = harness.swap(old, use_in_proj=use_in_proj)[0]
    assert parametrize.is_parametrized(new.layers[0].out_proj, "weight")
    assert_close(new(*inputs()), expected)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


@in_place_or_not
def test_a_parametrized_in_projection_goes_along_packed(inplace: bool) -> None:
    old = model()
    parametrize.register_parametrization(old.layers[0], "in_proj_weight", Doubled())
    expected = old(*inputs())
    before = copy.deepcopy(old.state_dict())
    new, report = harness.swap(old, use_in_proj=True, inplace=inplace)
    layer: Any = new.layers[0]  # type: ignore[index]
    assert isinstance(layer, EagerMultiheadAttentionWithInProj)
    assert parametrize.is_parametrized(layer, "in_proj_weight")
    assert_close(new(*inputs()), expected)
    assert new.state_dict().keys() == before.keys()
    back = report.undo()
    assert torch.equal(back(*inputs()), expected)


def test_a_parametrized_in_projection_cannot_be_split() -> None:
    old = model()
    parametrize.register_parametrization(old.layers[0], "in_proj_weight", Doubled())
    with pytest.raises(SwapError, match=r"layers\.0: its in_proj_weight is parametrized.*use_in_proj=True"):
        harness.swap(old)


@pytest.mark.parametrize("only", [None, "layers.*"])
def test_a_split_that_would_untie_is_refused(only: str | None) -> None:
    old = model()
    if only is None:
        old.head.weight = nn.Parameter(torch.zeros(3 * E, E, dtype=torch.float64))
        old.head.weight = old.layers[0].in_proj_weight
    types = [type(module) for module in old.modules()]
    with pytest.raises(SwapError, match="tied to a packed projection that is split here"):
        harness.swap(old, only=only, inplace=True)
    assert [type(module) for module in old.modules()] == types


def test_pruned_weights_are_refused() -> None:
    old = model()
    prune.l1_unstructured(old.layers[0], "in_proj_weight", 0.3)
    with pytest.raises(SwapError, match=r"layers\.0: its in_proj_weight is made from something else"):
        harness.swap(old, inplace=True)  # such a module cannot even be copied


# ---- refusals leave the model as it was ------------------------------------------------------------------------------


class Louder(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


def test_an_unknown_subclass_is_refused_unless_left_out() -> None:
    old = model()
    old.tied = Louder(E, H, batch_first=True).double()
    types = [type(module) for module in old.modules()]
    with pytest.raises(SwapError, match="tied is Louder, an unknown subclass of MultiheadAttention"):
        harness.swap(old, inplace=True)
    assert [type(module) for module in old.modules()] == types  # nothing is half swapped
    new, report = harness.swap(old, only=lambda name, module: not isinstance(module, Louder))
    assert len(report.swapped) == 4
    assert_close(new(*inputs()), old(*inputs()))


def test_a_forward_replaced_on_the_instance_is_refused() -> None:
    old = model()
    old.cross.forward = lambda *args, **kwargs: (args[0], None)
    with pytest.raises(SwapError, match="cross: its forward was replaced on the instance"):
        harness.swap(old)


def test_parameters_and_buffers_that_nothing_takes_over_are_refused() -> None:
    old = model()
    old.cross.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(SwapError, match="cross: parameters that nothing takes over: extra"):
        harness.swap(old)
    old = model()
    old.cross.register_buffer("extra", torch.ones(1))
    with pytest.raises(SwapError, match="cross: buffers that nothing takes over: extra"):
        harness.swap(old)


def test_nothing_found_and_unheeded_options_are_errors() -> None:
    with pytest.raises(SwapError, match="nothing to swap in Linear"):
        harness.swap(nn.Linear(2, 2))
    old = model()
    with pytest.raises(SwapError, match="nothing to swap in Cross: no module that was asked for"):
        harness.swap(old, only="nowhere.*")
    with pytest.raises(SwapError, match="heeds: use_inproj; known here: dead_rows, fast_path, use_in_proj"):
        harness.swap(old, use_inproj=True, inplace=True)
    assert isinstance(old.cross, nn.MultiheadAttention)
    with pytest.raises(ValueError, match="unknown kernel 'flash'"):
        harness.swap(old, to="flash")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": None}, "to = None: must be the name"),
        ({"to": "variant-2"}, "takes no number"),
        ({"to": "fused-"}, "after fused- must come a positive number"),
        ({"to": "gqa-0"}, "after gqa- must come a positive number"),
        ({"only": ["cross"]}, r"only = \['cross'\]: must be"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SwapError, match=message):
        harness.swap(model(), **arguments)
    with pytest.raises(SwapError, match=r"model is str: must be a torch\.nn\.Module"):
        harness.swap("model")  # type: ignore[arg-type]


def test_each_replacement_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "harness"):
        harness.swap(model())
    assert "cross: MultiheadAttention -> EagerMultiheadAttention" in caplog.messages
    assert len(caplog.messages) == 5


# ---- undo ------------------------------------------------------------------------------------------------------------


@both
@in_place_or_not
def test_undo_is_bitwise(use_in_proj: bool, inplace: bool) -> None:
    old = model()
    state, expected = copy.deepcopy(old.state_dict()), old(*inputs())
    modules = dict(old.named_modules(remove_duplicate=False))
    new, report = harness.swap(old, use_in_proj=use_in_proj, inplace=inplace)
    new(*inputs())
    back: Any = report.undo()
    assert {type(module) for module in back.modules()} == {type(module) for module in modules.values()}
    assert back.layers[0] is back.again
    assert back.state_dict().keys() == state.keys()
    assert all(torch.equal(state[key], value) for key, value in back.state_dict().items())
    assert torch.equal(back(*inputs()), expected)
    assert back.tied.in_proj_weight is back.layers[1].in_proj_weight
    if inplace:
        assert back is old
        assert all(modules[name] is m for name, m in back.named_modules(remove_duplicate=False))


@both
def test_undo_keeps_what_was_learnt_meanwhile(use_in_proj: bool) -> None:
    new, report = harness.swap(model(), use_in_proj=use_in_proj)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.5)
    new.eval()
    expected = new(*inputs())
    back: Any = report.undo()
    assert isinstance(back.cross, nn.MultiheadAttention)
    assert not any(module.training for module in back.modules())
    assert_close(back(*inputs()), expected)


@both
def test_a_second_undo_does_nothing(use_in_proj: bool) -> None:
    _, report = harness.swap(model(), use_in_proj=use_in_proj)
    back: Any = report.undo()
    with torch.no_grad():
        back.layers[0].in_proj_weight.add_(1.0)
    weight = back.layers[0].in_proj_weight.clone()
    assert torch.equal(report.undo().layers[0].in_proj_weight, weight)  # type: ignore[index, union-attr]


@both
def test_undo_takes_flags_and_gradients_of_now(use_in_proj: bool) -> None:
    old = model()
    old(*inputs()).sum().backward()
    new, report = harness.swap(old, use_in_proj=use_in_proj, inplace=True)
    new.zero_grad()
    new.requires_grad_(False)
    back = report.undo()
    assert all(parameter.grad is None for parameter in back.parameters())
    assert not any(parameter.requires_grad for parameter in back.parameters())


def test_undo_of_a_fusion_keeps_what_was_learnt_meanwhile() -> None:
    split = harness.swap(model())[0]
    fused, report = harness.swap(split, to="fused")
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.mul_(1.5)
    expected = fused(*inputs())
    back: Any = report.undo()
    assert isinstance(back.cross, EagerMultiheadAttention)
    assert_close(back(*inputs()), expected)


@both
def test_undo_after_a_change_of_precision(use_in_proj: bool) -> None:
    new, report = harness.swap(model(), use_in_proj=use_in_proj)
    new.float()
    back = report.undo()
    assert {parameter.dtype for parameter in back.parameters()} == {torch.float32}
    assert back(*(t.float() for t in inputs())).dtype == torch.float32


# ---- torch's own containers ------------------------------------------------------------------------------------------


CONTAINERS: dict[str, Any] = {
    "encoder layer": (lambda: nn.TransformerEncoderLayer(E, H, 16, batch_first=True, dropout=0.0), 1),
    "decoder layer": (lambda: nn.TransformerDecoderLayer(E, H, 16, batch_first=True, dropout=0.0), 2),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 16, batch_first=True, dropout=0.0), 2),
        1,
    ),
    "decoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(E, H, 16, batch_first=True, dropout=0.0), 2),
        2,
    ),
    "transformer": (lambda: nn.Transformer(E, H, 1, 1, 16, batch_first=True, dropout=0.0), 2),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference_mode"])
@pytest.mark.parametrize("name", CONTAINERS)
@both
def test_containers_call_the_swapped_module_with_the_fast_path_on(
    name: str, use_in_proj: bool, mode: str, frozen: bool
) -> None:
    build, count = CONTAINERS[name]
    old = build()
    randomise(old, torch.Generator().manual_seed(2))
    old.double().train(mode == "train").requires_grad_(not frozen)
    new, report = harness.swap(old, use_in_proj=use_in_proj)
    x = [torch.randn(2, 5, E, dtype=torch.float64) for _ in range(count)]
    guard = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, torch.enable_grad)
    assert torch.backends.mha.get_fastpath_enabled()
    with guard():
        found, expected = new(*x), old(*x)
    assert report.uncalled == ()  # torch's fast path would never have called them
    assert_close(found, expected)


def test_a_wrong_kernel_shows_even_on_the_fast_path() -> None:
    """A wrong subclass of nn.MultiheadAttention passes there, because it is never called."""
    old = nn.TransformerEncoderLayer(E, H, 16, batch_first=True).eval()
    randomise(old, torch.Generator().manual_seed(2))
    x = torch.randn(2, 5, E)
    new, _ = harness.swap(old, kernel=lambda q, k, v, **rest: 1.01 * v)
    with torch.no_grad():
        assert float((new(x) - old(x)).abs().max()) > 1e-3
        with fast_path_off():
            assert float((new(x) - old(x)).abs().max()) > 1e-3


# ---- copies ----------------------------------------------------------------------------------------------------------


@both
def test_swapped_models_copy_and_pickle(use_in_proj: bool) -> None:
    new, report = harness.swap(model(), use_in_proj=use_in_proj)
    expected = new(*inputs())
    calls = [row.calls for row in report.swapped]
    for again in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        assert torch.equal(again(*inputs()), expected)
        assert isinstance(again.cross, DropInAttention)
    assert [row.calls for row in report.swapped] == calls  # a copy counts for itself


def test_state_goes_between_the_swapped_and_the_original() -> None:
    old = model()
    new = harness.swap(old)[0]
    fresh = Cross().double()
    fresh.load_state_dict(new.state_dict())
    assert_close(fresh(*inputs()), old(*inputs()))
    other = harness.swap(Cross().double())[0]
    other.load_state_dict(old.state_dict())
    assert_close(other(*inputs()), old(*inputs()))


def test_a_thousand_modules_swap_and_undo() -> None:
    """Their time is measured in bench/; here only that none is lost."""
    old = nn.Sequential(*(nn.MultiheadAttention(E, H) for _ in range(1000)))
    new, report = harness.swap(old, inplace=True)
    assert len(report.swapped) == 1000
    assert all(isinstance(module, EagerMultiheadAttention) for module in new)  # type: ignore[attr-defined]
    report.undo()
    assert all(isinstance(module, nn.MultiheadAttention) for module in old)
