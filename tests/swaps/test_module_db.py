"""Every input that torch tests its own attention layers with, before and after the swap."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

import harness
from harness.cell.build import randomise
from harness.cell.draws import fast_path_off
from harness.variants.dropin import EagerMultiheadAttention, EagerMultiheadAttentionWithInProj

LAYERS = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.Transformer,
)
# torch remarks on its layers that cannot take the nested path, and on those that do.
pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]
INFOS = [info for info in module_db if info.module_cls in LAYERS]
CLASSES = {False: EagerMultiheadAttention, True: EagerMultiheadAttentionWithInProj}


def inputs_of(info: ModuleInfo, training: bool, dtype: torch.dtype) -> list[ModuleInput]:
    torch.manual_seed(0)  # torch draws its samples from the global generator
    found = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=False, training=training)
    return [each for each in found if each.forward_input is not None]


def build(info: ModuleInfo, sample: ModuleInput, training: bool, dtype: torch.dtype) -> nn.Module:
    arguments = sample.constructor_input
    model: nn.Module = info.module_cls(*arguments.args, **arguments.kwargs)
    randomise(model, torch.Generator().manual_seed(0))
    return model.to(dtype).train(training)


def tensors(result: Any) -> list[Tensor]:
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


def swapped_versions(model: nn.Module) -> Iterator[tuple[nn.Module, harness.SwapReport]]:
    for use_in_proj, kind in CLASSES.items():
        new, report = harness.swap(model, use_in_proj=use_in_proj)
        assert not any(isinstance(module, nn.MultiheadAttention) for module in new.modules())
        assert {row.became for row in report.swapped} == {kind.__name__}
        yield new, report


def test_all_layers_have_inputs() -> None:
    assert {info.module_cls for info in INFOS} == {*LAYERS}
    assert all(len(inputs_of(info, training, torch.float64)) >= 32 for info in INFOS for training in (True, False))


@pytest.mark.parametrize("fast_path", [True, False], ids=["fast path on", "fast path off"])
@pytest.mark.parametrize("mode", ["train", "eval", "eval no_grad", "inference_mode"])
@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.module_cls.__name__)
def test_float64_outputs_equal(info: ModuleInfo, mode: str, fast_path: bool) -> None:
    training = mode == "train"
    guards = {"eval no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    for sample in inputs_of(info, training, torch.float64):
        model = build(info, sample, training, torch.float64)
        arguments = sample.forward_input
        with nullcontext() if fast_path else fast_path_off(), guards.get(mode, nullcontext)():
            expected = tensors(model(*arguments.args, **arguments.kwargs))
            for new, report in swapped_versions(model):
                found = tensors(new(*arguments.args, **arguments.kwargs))
                assert report.uncalled == ()
                assert len(found) == len(expected)
                for ours, theirs in zip(found, expected, strict=True):
                    torch.testing.assert_close(
                        ours, theirs, rtol=0, atol=1e-13 * max(1.0, float(theirs.detach().abs().max()))
                    )


@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.module_cls.__name__)
def test_float32_passes_the_acceptance_rule_with_gradients(info: ModuleInfo) -> None:
    for sample in inputs_of(info, True, torch.float32):
        model = build(info, sample, True, torch.float32)
        arguments = sample.forward_input
        inputs = {str(index): value for index, value in enumerate(arguments.args)} | arguments.kwargs
        inputs = {key: value for key, value in inputs.items() if value is not None}
        for new, _ in swapped_versions(model):
            found = harness.check(new, model, inputs, gradients=True)
            assert found.status == "ok", f"{sample.desc}: {found.worst}"


@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.module_cls.__name__)
def test_a_wrong_weight_is_seen(info: ModuleInfo) -> None:
    sample = inputs_of(info, False, torch.float64)[0]
    model = build(info, sample, False, torch.float64)
    new, report = harness.swap(model, use_in_proj=True)
    arguments = sample.forward_input
    with torch.no_grad():
        new.get_submodule(report.swapped[0].name).in_proj_bias[-1] *= 1.01  # type: ignore[index, operator]
        found, expected = (tensors(m(*arguments.args, **arguments.kwargs)) for m in (new, model))
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) > 1e-6
