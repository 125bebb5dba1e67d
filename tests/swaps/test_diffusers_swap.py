"""Models of diffusers after the swap: the same outputs, the same denoised latents, and no way round our kernel."""

import copy
import functools
import inspect
import json
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

pytest.importorskip("diffusers")

import diffusers
from diffusers.models import attention_processor
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor

import harness
from harness.cell.rule import judge
from harness.kernels.eager import KERNEL
from harness.models.families.diffusion import ExactNoise
from harness.models.families.family import FamilyError, find_family
from harness.models.verify import verify
from harness.swaps import SwapError, diffusers_models

FAMILIES = ("cogvideox", "flux", "hunyuandit", "wan")


@pytest.fixture(params=FAMILIES)
def family(request):
    return find_family(request.param)


@pytest.fixture
def model(family):
    return family.build({})


@pytest.fixture(autouse=True)
def _backend_as_before():
    """`set_attention_backend` of one model changes the default of all."""
    before = _AttentionBackendRegistry._active_backend
    yield
    _AttentionBackendRegistry.set_active_backend(before)


def tiny(name, overrides=None) -> Any:
    """Any, because mypy takes every attribute of a module for a tensor."""
    return find_family(name).build(overrides or {})


def swap(model, **options) -> Any:
    return harness.swap(model, **options)


def batches(family, model):
    return {name: batch.kwargs for name, batch in family.batches(model, torch.Generator().manual_seed(1)).items()}


def latents(family, model):
    return family.generate(model, torch.Generator().manual_seed(2))


@torch.no_grad()
def output(family, model, kwargs):
    return family.output(model(**kwargs))


def mine(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    assert not is_causal and not enable_gqa and dropout_p == 0
    scores = q @ k.mT * scale
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    return scores.softmax(-1) @ v


def one_percent_off(q, k, v, scale=None, **rest):
    return F.scaled_dot_product_attention(q, k, v, scale=1.01 * scale, **rest)


def zeros(q, k, v, **rest):
    return torch.zeros_like(q)


def blind_to_masks(q, k, v, attn_mask=None, **rest):
    return F.scaled_dot_product_attention(q, k, v, **rest)


class AllInFloat64(TorchFunctionMode):
    """These models round to float32 here and there whatever their dtype; here they do not."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        to_float = func is torch.Tensor.float or (func is torch.Tensor.to and torch.float32 in args[1:])
        if to_float and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


# Equality


@pytest.mark.parametrize("kernel", ["eager", "sdpa", mine], ids=["eager", "sdpa", "mine"])
def test_every_batch_is_equal_and_each_attention_is_called(family, model, kernel):
    swapped, report = swap(model, kernel=kernel)
    for count, kwargs in enumerate(batches(family, model).values(), start=1):
        harness.assert_equivalent(swapped, model, kwargs)
        assert [row.calls for row in report.swapped] == [count] * family.inspect(model).attentions


def test_equal_to_the_last_digits_of_float64(family, model):
    model = model.double()
    swapped, _ = swap(model)
    with AllInFloat64():
        for kwargs in batches(family, model).values():
            expected = output(family, model, kwargs)
            torch.testing.assert_close(output(family, swapped, kwargs), expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(latents(family, swapped), latents(family, model), rtol=1e-11, atol=1e-11)


def test_gradients_are_equal(family, model):
    swapped, _ = swap(model)
    harness.assert_equivalent(swapped, model, batches(family, model)["plain"], gradients=True)


def judged_latents(family, model, swapped):
    golden = latents(family, copy.deepcopy(model).double())
    return judge("latents", latents(family, swapped), [latents(family, model)], [golden])


def test_denoised_latents_are_equal(family, model):
    swapped, report = swap(model)
    assert judged_latents(family, model, swapped).status == "ok"
    assert {row.calls for row in report.swapped} <= {3, 4} and report.uncalled == ()


@pytest.mark.parametrize("wrong", [one_percent_off, zeros])
def test_a_wrong_kernel_is_caught(family, model, wrong):
    swapped, _ = swap(model, kernel=wrong)
    for kwargs in batches(family, model).values():
        assert harness.check(swapped, model, kwargs).status == "mismatch"
    assert judged_latents(family, model, swapped).status == "mismatch"


@pytest.mark.parametrize("name", ["cogvideox", "flux"])
def test_a_kernel_blind_to_masks_is_caught_by_the_masked_batch_alone(name):
    family = find_family(name)
    model = tiny(name)
    swapped, _ = swap(model, kernel=blind_to_masks)
    found = {key: harness.check(swapped, model, kwargs).status for key, kwargs in batches(family, model).items()}
    assert found == {"plain": "ok", "two times": "ok", "masked text": "mismatch"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family, model, dtype):
    model = model.to(dtype)
    swapped, _ = swap(model)
    for kwargs in batches(family, model).values():
        harness.assert_equivalent(swapped, model, kwargs)


def test_fused_projections(family, model):
    model.fuse_qkv_projections()
    swapped, report = swap(model)
    harness.assert_equivalent(swapped, model, batches(family, model)["two times"])
    assert {row.calls for row in report.swapped} == {1}


@pytest.mark.parametrize("name", ["hunyuandit", "wan"])  # one that calls SDPA, one that dispatches
def test_compiled_with_breaks_around_the_attentions(name):
    family = find_family(name)
    model = tiny(name, {"num_layers": 1})
    swapped, report = swap(model)
    kwargs = batches(family, model)["plain"]
    expected = output(family, swapped, kwargs)
    torch._dynamo.reset()
    torch.testing.assert_close(output(family, torch.compile(swapped, backend="eager"), kwargs), expected)
    assert {row.calls for row in report.swapped} == {2}


# Keyword arguments


def test_signatures_of_processors_stay(model):
    swapped, report = swap(model)
    for row in report.swapped:
        old, new = model.get_submodule(row.name).processor, swapped.get_submodule(row.name).processor
        assert inspect.signature(new.__call__) == inspect.signature(old.__call__)
        assert isinstance(new, type(old)) and type(new) is not type(old)


@pytest.mark.parametrize("name", ["cogvideox", "hunyuandit"])
def test_without_their_signature_the_rotary_would_be_lost_and_that_is_caught(name, monkeypatch):
    family = find_family(name)
    model = tiny(name)
    monkeypatch.setattr(diffusers_models, "redirected", diffusers_models.redirected.__wrapped__)  # without its cache
    monkeypatch.setattr(functools, "wraps", lambda wrapped: lambda wrapper: wrapper)
    swapped, _ = swap(model)
    monkeypatch.undo()
    assert harness.check(swapped, model, batches(family, model)["plain"]).status == "mismatch"


def test_image_attention_of_wan_counts_twice():
    family = find_family("wan")
    model = tiny("wan", {"image_dim": 16, "added_kv_proj_dim": 24, "in_channels": 6})
    swapped, report = swap(model)
    harness.assert_equivalent(swapped, model, batches(family, model)["plain"])
    assert {row.name.rpartition(".")[2]: row.calls for row in report.swapped} == {"attn1": 1, "attn2": 2}
    assert judged_latents(family, model, swapped).status == "ok"  # two channels of six condition the steps


def test_a_processor_with_weights_keeps_them():
    family = find_family("flux")
    model = tiny("flux")
    torch.manual_seed(0)
    for block in model.transformer_blocks:
        block.attn.set_processor(FluxIPAdapterAttnProcessor(hidden_size=32, cross_attention_dim=8))
    kwargs = batches(family, model)["plain"]
    kwargs = {**kwargs, "joint_attention_kwargs": {"ip_hidden_states": [torch.randn(1, 3, 8)]}}
    model.eval()  # the new processors too
    keys, before = model.state_dict().keys(), list(model.parameters())
    originals = [block.attn.processor for block in model.transformer_blocks]
    expected = output(family, model, kwargs)

    swapped, report = swap(model, inplace=True)
    assert swapped.state_dict().keys() == keys
    assert all(new is old for new, old in zip(swapped.parameters(), before, strict=True))
    torch.testing.assert_close(output(family, swapped, kwargs), expected, rtol=1e-5, atol=1e-5)
    assert [row.calls for row in report.swapped] == [2, 2, 1, 1]
    pickle.loads(pickle.dumps(swapped)).train()
    swapped.train()
    report.undo()
    assert [block.attn.processor for block in model.transformer_blocks] == originals
    assert all(processor.training for processor in originals)
    assert torch.equal(output(family, model.eval(), kwargs), expected)


# What the swap leaves as it was


def test_state_dict_stays(model):
    swapped, report = swap(model)
    new, old = swapped.state_dict(), model.state_dict()
    assert new.keys() == old.keys() and all(torch.equal(new[key], old[key]) for key in old)
    assert all(row.params_before == row.params_after > 0 for row in report.swapped)


def test_undo_puts_the_same_processors_back(family, model):
    kwargs = batches(family, model)["two times"]
    before, traces = dict(model.attn_processors), [vars(p).copy() for p in model.attn_processors.values()]
    expected = output(family, model, kwargs)
    swapped, report = swap(model, inplace=True)
    assert swapped is model
    output(family, swapped, kwargs)
    assert report.undo() is model
    after = model.attn_processors
    assert after.keys() == before.keys() and all(after[key] is before[key] for key in before)
    assert [vars(p) for p in after.values()] == traces
    assert torch.equal(output(family, model, kwargs), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_swapped_model_stay_swapped_and_count_for_themselves(family, model, copied):
    swapped, report = swap(model)
    twin = copied(swapped)
    kwargs = batches(family, model)["two times"]
    assert torch.equal(output(family, twin, kwargs), output(family, swapped, kwargs))
    assert {row.calls for row in report.swapped} == {1}
    processor = twin.get_submodule(report.swapped[0].name).processor
    assert isinstance(processor, diffusers_models.Redirected) and processor.harness_counter.calls == 1


def test_partial_swap(family, model):
    blocks = "transformer_blocks" if hasattr(model, "transformer_blocks") else "blocks"
    swapped, report = swap(model, only=f"{blocks}.1.*")
    assert {row.name.rsplit(".", 1)[0] for row in report.swapped} == {f"{blocks}.1"}
    others = [p for name, p in swapped.attn_processors.items() if not name.startswith(f"{blocks}.1.")]
    assert others and not any(isinstance(p, diffusers_models.Redirected) for p in others)
    harness.assert_equivalent(swapped, model, batches(family, model)["two times"])
    assert report.uncalled == ()


def test_rows_carry_full_names():
    inner = tiny("flux")
    _, report = swap(nn.ModuleDict({"net": inner}))
    row = report.swapped[0]
    assert row.name == "net.transformer_blocks.0.attn"
    assert (row.was, row.became) == ("FluxAttnProcessor", "FluxAttnProcessor [eager]")


def test_a_second_swap_replaces_the_first(family, model):
    once, first = swap(model, kernel=zeros)
    twice, second = swap(once, to="eager", inplace=True)
    kwargs = batches(family, model)["plain"]
    harness.assert_equivalent(twice, model, kwargs)
    assert {row.calls for row in first.swapped} == {0} and {row.calls for row in second.swapped} == {1}
    second.undo()
    output(family, once, kwargs)
    assert {row.calls for row in first.swapped} == {1}


# No way round our kernel


class Lazy(FluxAttnProcessor):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return hidden_states if encoder_hidden_states is None else (hidden_states, encoder_hidden_states)


class WithMultiheadAttention(Lazy):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        nn.MultiheadAttention(32, 2)(hidden_states, hidden_states, hidden_states)
        return super().__call__(attn, hidden_states, encoder_hidden_states)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (Lazy, r"transformer_blocks.0.attn \(Lazy\) never called scaled_dot_product_attention"),
        (WithMultiheadAttention, "computes attention by multi_head_attention_forward"),
    ],
)
def test_a_processor_that_goes_round_sdpa_raises(processor, message):
    family = find_family("flux")
    model = tiny("flux")
    model.set_attn_processor(processor())
    swapped, _ = swap(model)
    with pytest.raises(SwapError, match=message):
        swapped(**batches(family, model)["plain"])


def test_a_processor_that_takes_its_own_softmax_is_refused_at_the_swap():
    family = find_family("hunyuandit")
    model = tiny("hunyuandit")
    model.blocks[2].attn2.set_processor(AttnProcessor())
    with pytest.raises(SwapError, match=r"blocks\.2\.attn2: its AttnProcessor never calls scaled_dot.*--only"):
        swap(model)
    rest, _ = swap(model, only=lambda name, module: name != "blocks.2.attn2")
    harness.assert_equivalent(rest, model, {**batches(family, model)["plain"], "image_rotary_emb": None})


def sana():
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_cross_attention_heads": 2}
    cross = {"cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 16}
    sizes = {"in_channels": 4, "out_channels": 4, "num_layers": 1, "sample_size": 8, "patch_size": 1}
    return diffusers.SanaTransformer2DModel(**heads, **cross, **sizes).eval()


def test_linear_attention_is_refused_at_the_swap():
    model = sana()
    with pytest.raises(SwapError, match=r"attn1: its SanaLinearAttnProcessor2_0 never calls scaled_dot_product_att"):
        swap(model)
    swapped, report = swap(model, only="*.attn2")
    torch.manual_seed(0)
    inputs = {"hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 3, 16)}
    harness.assert_equivalent(swapped, model, {**inputs, "timestep": torch.tensor([1])})
    assert [row.calls > 0 for row in report.swapped] == [True]


def test_every_processor_that_works_names_sdpa_somewhere():
    """Those that go without are those of another library, of linear attention, and of a softmax of their own."""
    kinds: list[Any] = [
        kind for name, kind in vars(attention_processor).items() if "Processor" in name and inspect.isclass(kind)
    ]
    without = {kind.__name__ for kind in kinds if not diffusers_models.names_sdpa(kind)}
    odd = {"AttentionProcessor", "IPAdapterMaskProcessor"}  # a union, and of images
    known = {"XFormers", "Linear", "Sliced", "SanaMultiscale", "XLA"}
    old = {"AttnProcessor", "AttnAddedKVProcessor", "CustomDiffusionAttnProcessor", "IPAdapterAttnProcessor"}
    # By name alone, and nothing but a word in the library today: their classes are empty.
    empty = {kind.__name__ for kind in kinds if "__call__" not in vars(kind)}
    assert {name for name in without if not any(word in name for word in known)} - odd - empty == old


# What attends without a processor


def mochi():
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "pooled_projection_dim": 16}
    return diffusers.MochiTransformer3DModel(
        **sizes, in_channels=4, text_embed_dim=16, time_embed_dim=4, patch_size=2, activation_fn="swiglu"
    ).eval()


@pytest.mark.parametrize(
    ("made", "left"),
    [
        (mochi, {"time_embed.pooler": "MochiAttentionPool"}),
        (lambda: tiny("hunyuandit"), {"time_extra_emb.pooler": "HunyuanDiTAttentionPool"}),
        (lambda: tiny("flux"), {}),
    ],
)
def test_what_attends_without_a_processor_is_reported(made, left):
    model = made()
    assert swap(model)[1].left == left
    _, report = swap(nn.ModuleDict({"net": model}))
    assert report.left == {f"net.{name}": kind for name, kind in left.items()}
    assert swap(model, only=lambda name, module: "pooler" not in name)[1].left == {}


@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")  # Mochi asks for float32 there
def test_verify_names_what_is_missing_and_can_leave_it_out():
    model = mochi()
    torch.manual_seed(0)
    inputs = {"hidden_states": torch.randn(1, 4, 2, 4, 4), "encoder_hidden_states": torch.randn(1, 3, 16)}
    inputs |= {"timestep": torch.tensor([1]), "encoder_attention_mask": torch.ones(1, 3, dtype=torch.bool)}
    step = verify(model, inputs=inputs).steps[2]
    assert step.status == "failed"
    assert step.message.startswith("2 of 3 replaced: transformer_blocks.0.attn1, transformer_blocks.1.attn1; not ")
    assert step.message.endswith("not time_embed.pooler (MochiAttentionPool)")
    assert verify(model, inputs=inputs, only="transformer_blocks.*").passed
    hunyuan = verify("hunyuandit").steps[2]
    assert hunyuan.message.endswith("time_extra_emb.pooler (HunyuanDiTAttentionPool) stays as it is")


def test_a_function_as_processor_is_refused():
    model = tiny("flux")
    model.transformer_blocks[1].attn.set_processor(lambda attn, hidden_states: hidden_states)
    with pytest.raises(SwapError, match=r"transformer_blocks\.1\.attn: its processor is the function"):
        swap(model, inplace=True)
    assert type(model.transformer_blocks[0].attn.processor) is FluxAttnProcessor  # nothing was half done


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_another_backend_is_refused_when_called_and_when_swapped(name):
    family = find_family(name)
    model = tiny(name)
    kwargs = batches(family, model)["plain"]
    swapped, report = swap(model)
    with attention_backend("_native_math"), pytest.raises(SwapError, match="backend is '_native_math'"):
        swapped(**kwargs)
    assert report.uncalled == tuple(row.name for row in report.swapped)
    swapped(**kwargs)

    swapped.set_attention_backend("flex")
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
    with pytest.raises(SwapError, match=r"\.0\.attn1?: diffusers' attention backend is 'flex': must be 'native'"):
        swapped(**kwargs)

    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.FLEX)  # what DIFFUSERS_ATTN_BACKEND sets
    with pytest.raises(SwapError, match="backend is 'flex'"):
        swap(model)


def test_context_parallelism_is_refused():
    model = tiny("flux")
    model.transformer_blocks[0].attn.processor._parallel_config = object()
    with pytest.raises(SwapError, match="context parallelism"):
        swap(model)


def test_a_backend_does_not_concern_processors_that_call_sdpa_themselves():
    family = find_family("cogvideox")
    model = tiny("cogvideox")
    swapped, _ = swap(model)
    with attention_backend("_native_math"):
        harness.assert_equivalent(swapped, model, batches(family, model)["plain"])


def test_nothing_wanted_and_unknown_options_are_errors(model):
    with pytest.raises(SwapError, match="nothing to swap"):
        swap(model, only="nowhere.*")
    with pytest.raises(SwapError, match="options no swapped module heeds: use_in_proj"):
        swap(model, use_in_proj=True)


# The stand-in for F.scaled_dot_product_attention


def same_as_torch(*args, **kwargs):
    expected = F.scaled_dot_product_attention(*args, **kwargs)
    found = diffusers_models.sdpa(KERNEL, *args, **kwargs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2 if found.dtype == torch.bfloat16 else 1e-5)
    return found


@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3), (1, 6)])
def test_sdpa_masks_and_scale(lengths):
    L, S = lengths
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, L, 8), torch.randn(2, 4, S, 8), torch.randn(2, 4, S, 6)
    keep = torch.rand(2, 1, L, S) > 0.3
    keep[0, 0, 0] = False  # a dead row
    same_as_torch(q, k, v, scale=0.3)
    same_as_torch(q, k, v, is_causal=True)  # from the first key, whatever the lengths
    same_as_torch(q, k, v, attn_mask=keep)
    same_as_torch(q, k, v, attn_mask=torch.randn(4, L, S))
    same_as_torch(q, k, v, torch.randn(S).expand(L, S), 0.0, False)
    same_as_torch(q, k[:, :2], v[:, :2], enable_gqa=True)
    same_as_torch(q, k[:, :1], v[:, :1])


def test_sdpa_without_batch_or_heads():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 5, 8).unbind(0)
    assert same_as_torch(q, k, v, attn_mask=torch.rand(4, 5, 5) > 0.3).shape == (4, 5, 8)
    assert same_as_torch(q[0], k[0], v[0], is_causal=True).shape == (5, 8)


def test_sdpa_under_autocast():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_as_torch(q, k, v.bfloat16(), attn_mask=torch.randn(5, 5)).dtype == torch.bfloat16
        assert same_as_torch(q.double(), k.double(), v.double()).dtype == torch.float64


def test_sdpa_refuses_what_torch_refuses():
    q = torch.randn(2, 4, 5, 8)
    with pytest.raises(SwapError, match="4 query and 2 key heads"):
        diffusers_models.sdpa(KERNEL, q, q[:, :2], q[:, :2])
    with pytest.raises(SwapError, match="must have 2 to 4 dimensions"):
        diffusers_models.sdpa(KERNEL, q[None], q[None], q[None])


# The families


def test_structure_agrees_with_the_model(family, model):
    found = family.inspect(model)
    attentions = [module for module in model.modules() if type(module).__name__ == found.attention_class]
    assert len(attentions) == found.attentions
    assert all(a.heads == found.heads and a.to_q.out_features == found.heads * found.head_dim for a in attentions)
    assert all(a.to_k.out_features == found.kv_heads * found.head_dim for a in attentions)


def test_a_built_model_is_random_all_over_and_the_same_each_time(family, model):
    for parameter in model.parameters():
        assert parameter.abs().max() > 0
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    again = family.build({}).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())


def test_batches_differ_and_the_masked_text_matters(family, model):
    outputs = {name: output(family, model, kwargs) for name, kwargs in batches(family, model).items()}
    assert outputs["two times"].shape[0] == 2
    assert ("masked text" in outputs) == (family.name != "wan")
    if family.name != "wan":
        first, last = (outputs["masked text"] - outputs["two times"]).abs().flatten(1).amax(1)
        assert first <= 1e-5 and last > 1e-2  # only the last row's text is cut


def test_inputs_are_exact_in_every_dtype():
    drawn = ExactNoise(torch.Generator().manual_seed(0), torch.device("cpu"), torch.float32)(10_000)
    assert drawn.std() > 0.9
    assert all(torch.equal(drawn.to(dtype).float(), drawn) for dtype in (torch.bfloat16, torch.float16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_denoising_keeps_the_dtype(family, model, dtype):
    found = latents(family, model.to(dtype))
    assert found.dtype == dtype and found.isfinite().all()


def test_overrides(family):
    model = family.build({"num_layers": 1})
    assert family.inspect(model).layers < family.inspect(family.build({})).layers
    with pytest.raises(FamilyError, match=r"unknown config key 'num_layer'; did you mean num_layers"):
        family.build({"num_layer": 1})
    with pytest.raises(FamilyError, match=r"unknown config key 'zzz'; known: .*num_attention_heads"):
        family.build({"zzz": 1})
    with pytest.raises(FamilyError, match=f"{family.name}: .*num_attention_heads.*raised"):
        family.build({"num_attention_heads": -1})


def test_rotary_of_cogvideox_needs_a_multiple_of_16():
    family = find_family("cogvideox")
    with pytest.raises(FamilyError, match="attention_head_dim = 8: must be a multiple of 16"):
        batches(family, family.build({"attention_head_dim": 8}))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("cogvideox", {"use_rotary_positional_embeddings": False}),
        ("cogvideox", {"use_learned_positional_embeddings": True}),
        ("cogvideox", {"patch_size_t": 2, "patch_bias": False, "ofs_embed_dim": 2, "in_channels": 8}),
        ("flux", {"guidance_embeds": True, "in_channels": 6, "out_channels": 4}),
        ("hunyuandit", {"use_style_cond_and_image_meta_size": False, "learn_sigma": False}),
    ],
)
def test_variants_of_real_checkpoints(name, overrides):
    family = find_family(name)
    model = tiny(name, overrides)
    swapped, _ = swap(model)
    for kwargs in batches(family, model).values():
        harness.assert_equivalent(swapped, model, kwargs)
    assert judged_latents(family, model, swapped).status == "ok"


def test_more_channels_out_than_in_cannot_be_denoised():
    family = find_family("flux")
    with pytest.raises(FamilyError, match="out_channels = 8: must not exceed in_channels = 4"):
        latents(family, family.build({"out_channels": 8}))


@pytest.mark.parametrize("folder", ["", "transformer"])
def test_checkpoint_of_a_model_or_of_a_pipeline(family, model, tmp_path, folder):
    model.save_pretrained(tmp_path / folder)
    loaded = family.load(tmp_path)
    assert not loaded.training and type(loaded) is type(model)
    kwargs = batches(family, model)["plain"]
    assert torch.equal(output(family, loaded, kwargs), output(family, model, kwargs))


def test_bad_checkpoints(tmp_path):
    flux, wan = find_family("flux"), find_family("wan")
    with pytest.raises(FamilyError, match=r"nowhere: no config\.json there nor in its folder transformer"):
        flux.load(tmp_path / "nowhere")
    tiny("flux").save_pretrained(tmp_path)
    with pytest.raises(FamilyError, match="holds a FluxTransformer2DModel: must be a WanTransformer3DModel"):
        wan.load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_layers": 3}))
    with pytest.raises(FamilyError, match=r"missing_keys of FluxTransformer2DModel: .*transformer_blocks\.2\."):
        flux.load(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(FamilyError, match="cannot be loaded as FluxTransformer2DModel"):
        flux.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FamilyError, match="cannot be loaded as FluxTransformer2DModel: JSONDecodeError"):
        flux.load(tmp_path)
