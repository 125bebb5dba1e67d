"""Hugging Face models: the swap computes what the library computes, in every family, and each wrong kernel is seen."""

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")
import transformers

import harness
from harness.cell.build import randomise
from harness.cell.rule import TensorVerdict, judge
from harness.kernels import eager
from harness.kernels.call import AttentionCall, Kernel, Unsupported
from harness.models.families.family import Family, FamilyError, find_family
from harness.models.families.language import LENGTH, NEW_TOKENS, PADDING, STEPS
from harness.models.verify.golden import draw_all, true_double
from harness.swaps import SwapError, SwapReport
from harness.swaps.transformers_models import ATTRIBUTE, IMPLEMENTATION

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss")
SDPA_FAMILIES = ("llama", "qwen3", "mistral")  # SDPA's signature has neither softcap nor sinks
PAIRS = [*((name, "eager") for name in FAMILIES), *((name, "sdpa") for name in SDPA_FAMILIES)]


def rng(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# `Any`: mypy sees a Tensor or a Module in every attribute of a module.


def build(name: str, **overrides: Any) -> tuple[Any, Any]:
    family = find_family(name)
    return family, family.build(overrides)


def swap(model: nn.Module, **options: Any) -> tuple[Any, SwapReport]:
    return harness.swap(model, **options)


Draws = dict[str, list[Tensor]]


class Judge:
    """The acceptance rule on a model's output for each of its batches, where that is not padding."""

    def __init__(self, family: Family, model: nn.Module) -> None:
        self.family, self.batches = family, family.batches(model, rng())
        references, goldens = draw_all(model, self.batches, lambda drawn, _: self._run(drawn), seed=0)
        self.references: Draws = {name: [draw[name] for draw in references] for name in self.batches}
        self.goldens: Draws = {name: [draw[name] for draw in goldens] for name in self.batches}

    def verdicts(self, candidate: nn.Module) -> dict[str, TensorVerdict]:
        return {name: self._judge(name, found) for name, found in self._run(candidate).items()}

    def statuses(self, candidate: nn.Module) -> set[str]:
        return {verdict.status for verdict in self.verdicts(candidate).values()}

    @torch.no_grad()
    def _run(self, model: nn.Module) -> dict[str, Tensor]:
        return {name: self.family.output(batch.through(model)) for name, batch in self.batches.items()}

    def _judge(self, name: str, found: Tensor) -> TensorVerdict:
        real = self.batches[name].real
        left_open = None if real is None else (~real)[:, :, None].expand(found.shape)
        return judge("logits", found, self.references[name], self.goldens[name], may_differ=left_open)


@functools.cache
def judge_of(name: str) -> Judge:
    return Judge(*build(name))


def eager_with(change: Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Any, ...]]) -> Kernel:
    return Kernel("wrong", lambda q, k, v, call: eager.eager(*change(q, k, v, call)), gives_weights=True)


def with_mask(change: Callable[[Tensor], Tensor]) -> Kernel:
    def masked(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Any, ...]:
        assert call.mask is not None and call.mask.dtype == torch.bool
        return q, k, v, dataclasses.replace(call, mask=change(call.mask))

    return eager_with(masked)


def without(**rules: Any) -> Kernel:
    return eager_with(lambda q, k, v, call: (q, k, v, dataclasses.replace(call, **rules)))


def causal_only(mask: Tensor) -> Tensor:
    """Windows and padding forgotten."""
    L, S = mask.shape[-2:]
    return torch.ones(L, S, dtype=torch.bool).tril(S - L)


def other_groups(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Any, ...]:
    """Query heads of group g read the keys of another."""
    return q, k.flip(1), v.flip(1), call


def one_key_too_many(mask: Tensor) -> Tensor:
    return mask | mask.roll(1, -1)


def one_key_too_few(mask: Tensor) -> Tensor:
    """The oldest key of each row that sees more than one."""
    return mask & ((mask.cumsum(-1) > 1) | (mask.sum(-1, keepdim=True) == 1))


# ---- every family ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kernel"), PAIRS)
def test_same_logits(name, kernel):
    family, model = build(name)
    swapped, report = swap(model, to=kernel)
    verdicts = judge_of(name).verdicts(swapped)
    assert verdicts.keys() == {"plain", "left-padded", "right-padded", "decode"}
    assert {verdict.status for verdict in verdicts.values()} == {"ok"}, verdicts
    assert [row.calls for row in report.swapped] == [len(verdicts) + STEPS] * family.inspect(model).attentions


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_same_logits_whatever_ran_before(implementation):
    family, model = build("mistral", attn_implementation=implementation)
    swapped, _ = swap(model)
    assert Judge(family, model).statuses(swapped) == {"ok"}


@pytest.mark.parametrize(("name", "kernel"), PAIRS)
def test_same_tokens(name, kernel):
    family, model = build(name)
    swapped, report = swap(model, to=kernel)
    expected = family.generate(model, rng(2))
    assert expected.shape == (2, NEW_TOKENS)
    assert torch.equal(family.generate(swapped, rng(2)), expected)
    assert [row.calls for row in report.swapped] == [NEW_TOKENS] * 2  # a prefill, and a step for every further token
    assert all(len({*row}) >= 3 for row in expected.tolist())  # or equality would say little


WRONG = {
    "causal one too far": (with_mask(one_key_too_many), FAMILIES),
    "window one too short": (with_mask(one_key_too_few), FAMILIES),
    "mask ignored": (with_mask(torch.ones_like), FAMILIES),
    "groups mixed up": (eager_with(other_groups), FAMILIES),
    "window ignored": (with_mask(causal_only), ("mistral", "gemma2", "gpt_oss")),
    "softcap ignored": (without(softcap=None), ("gemma2",)),
    "sinks ignored": (without(sinks=None), ("gpt_oss",)),
    "scale of its own": (
        eager_with(lambda q, k, v, call: (q, k, v, dataclasses.replace(call, scale=q.shape[-1] ** -0.5))),
        ("gemma2",),
    ),
}
WRONG_CASES = [(bug, name) for bug, (_, names) in WRONG.items() for name in names]


@pytest.mark.parametrize(("bug", "name"), WRONG_CASES)
def test_sees_a_wrong_kernel(bug, name):
    family, model = build(name)
    swapped, _ = swap(model, kernel=WRONG[bug][0])
    assert judge_of(name).statuses(swapped) == {"mismatch"}
    assert not torch.equal(family.generate(swapped, rng(2)), family.generate(model, rng(2)))


def test_padding_forgotten_shows_only_in_padded_batches():
    _, model = build("llama")
    verdicts = judge_of("llama").verdicts(swap(model, kernel=with_mask(causal_only))[0])
    assert verdicts["plain"].status == verdicts["right-padded"].status == "ok"  # causality hides what is at the right
    assert verdicts["left-padded"].status == "mismatch"


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_kernel_that_cannot_says_so(name):
    family, model = build(name)
    swapped, _ = swap(model, to="sdpa")
    with pytest.raises(Unsupported, match="has no"):
        swapped(**family.batches(model, rng())["plain"].kwargs)


# ---- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("options", [{"cache_implementation": "static"}, {"prefill_chunk_size": 5}], ids=str)
def test_same_tokens_with_other_caches(name, options):
    family, model = build(name)
    swapped, report = swap(model)
    prompt = family.batches(model, rng())["left-padded"].kwargs
    prompt = {key: prompt[key] for key in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "disable_compile": True, **options}
    assert torch.equal(swapped.generate(**prompt, **options), model.generate(**prompt, **options))
    assert not report.uncalled


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_chunked_prefill_through_a_cache(name):
    _, model = build(name)
    swapped, _ = swap(model)
    tokens = torch.randint(97, (2, LENGTH), generator=rng())
    outputs = []
    for one in (model, swapped):
        cache = transformers.DynamicCache(config=one.config)
        parts = [one(input_ids=part, past_key_values=cache).logits for part in tokens.split((9, 8, 6, 1), dim=1)]
        outputs.append(torch.cat(parts, dim=1))
    assert_near(outputs[1], outputs[0])
    assert_near(outputs[1], model(input_ids=tokens).logits)


def assert_near(found: Tensor, expected: Tensor, rtol: float = 1e-5) -> None:
    """Of the largest element: for what the acceptance rule was not built for."""
    torch.testing.assert_close(found, expected, rtol=0, atol=rtol * float(expected.detach().abs().max()))


# ---- training, dtypes, weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kernel"), [("llama", "eager"), ("llama", "sdpa"), ("gpt_oss", "eager")])
def test_same_gradients(name, kernel):
    family, model = build(name)
    swapped, _ = swap(model, to=kernel)
    for one in (model.train(), swapped.train()):
        batch = family.batches(one, rng())["right-padded"].kwargs
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        one(**batch, labels=labels).loss.backward()
    grads = {key: parameter.grad for key, parameter in swapped.named_parameters()}
    for key, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, key
        # A key bias moves all scores of a row alike: its gradient is rounding, and has no size of its own.
        scale = 1.0 if key.endswith("k_proj.bias") else float(parameter.grad.abs().max())
        torch.testing.assert_close(grads[key], parameter.grad, rtol=0, atol=1e-5 * scale, msg=key)


def test_dropout_draws_the_same_numbers():
    family, model = build("llama", attention_dropout=0.3, attn_implementation="eager")
    swapped, _ = swap(model)
    batch = family.batches(model, rng())["plain"].kwargs
    outputs = []
    for one, seed in ((model, 5), (swapped, 5), (swapped, 6)):
        torch.manual_seed(seed)
        outputs.append(one.train()(**batch).logits)
    assert_near(outputs[1], outputs[0])
    assert (outputs[2] - outputs[0]).abs().max() > 0.1
    assert_near(swapped.eval()(**batch).logits, model.eval()(**batch).logits)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_float64_is_float64(name):
    """Tight: what is left of rounding when the library, too, is float64 all through."""
    family, model = build(name)
    model = model.double()
    swapped, _ = swap(model)
    batch = family.batches(model, rng())["left-padded"]
    with true_double(torch.float32):
        found, expected = (family.output(one(**batch.kwargs))[batch.real] for one in (swapped, model))
    assert found.dtype == torch.float64
    assert_near(found, expected, rtol=1e-13)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_bfloat16(name):
    family, model = build(name)
    golden = family.output(model(**(batch := family.batches(model, rng())["left-padded"]).kwargs))[batch.real]
    model = model.bfloat16()
    swapped, _ = swap(model)
    found, theirs = (family.output(one(**batch.kwargs))[batch.real].float() for one in (swapped, model))
    assert (found - golden).abs().mean() <= 1.1 * (theirs - golden).abs().mean()


@pytest.mark.parametrize("use_cache", [True, False])  # without one, q and k come out wider than v
@torch.no_grad()
def test_autocast(use_cache):
    family, model = build("llama")
    swapped, _ = swap(model)
    batch = {**family.batches(model, rng())["plain"].kwargs, "use_cache": use_cache}
    golden = model(**batch).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, theirs = (one(**batch).logits.float() for one in (swapped, model))
    assert (found - golden).abs().mean() <= 1.1 * (theirs - golden).abs().mean()


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_attention_weights(name):
    family, model = build(name, attn_implementation="eager")
    swapped, _ = swap(model)
    batch = family.batches(model, rng())["right-padded"]
    found, expected = (one(**batch.kwargs, output_attentions=True).attentions for one in (swapped, model))
    assert len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == (2, 4, LENGTH, LENGTH)
        assert_near(ours.transpose(1, 2)[batch.real], theirs.transpose(1, 2)[batch.real])
    assert swapped(**batch.kwargs).attentions is None
    swapped.config._output_attentions = True  # its setter wants eager by name
    assert torch.equal(swapped(**batch.kwargs).attentions[1], found[1])
    with pytest.raises(Unsupported, match="output_attentions: kernel sdpa gives no attention weights"):
        swap(model, to="sdpa")[0](**batch.kwargs, output_attentions=True)


TEXT = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HIDDEN = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
# Of models that hand `output_attentions` down to no attention of theirs.
SILENT_MODELS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "GPTBigCodeForCausalLM": {**TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "OPTForCausalLM": {**TEXT, **HIDDEN, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 32},
    "StableLmForCausalLM": {**TEXT, **HIDDEN, "num_key_value_heads": 2},
    "PersimmonForCausalLM": {**TEXT, **HIDDEN},
    "NemotronForCausalLM": {**TEXT, **HIDDEN, "num_key_value_heads": 2},
    "MoonshineForConditionalGeneration": {
        **TEXT,
        "hidden_size": 32,
        "intermediate_size": 64,
        **{f"{part}_num_hidden_layers": 2 for part in ("encoder", "decoder")},
        **{f"{part}_num_{kind}_heads": 4 for part in ("encoder", "decoder") for kind in ("attention", "key_value")},
        "decoder_start_token_id": 1,
    },
    "VideoMAEModel": {**HIDDEN, "image_size": 8, "patch_size": 4, "num_frames": 2, "tubelet_size": 2},
}


@pytest.mark.parametrize("name", SILENT_MODELS)
@torch.no_grad()
def test_attention_weights_of_models_that_only_collect_them(name):
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SILENT_MODELS[name], attn_implementation="eager")).eval()
    randomise(model, rng(0))
    swapped, report = swap(model)
    tokens = torch.randint(3, 97, (2, LENGTH), generator=rng())
    batch: dict[str, Any] = {"input_ids": tokens}
    if name == "VideoMAEModel":
        batch = {"pixel_values": torch.randn(2, 2, 3, 8, 8, generator=rng())}
    elif name.startswith("Moonshine"):
        batch = {"input_values": torch.randn(2, 2000, generator=rng()), "decoder_input_ids": tokens}
    found, expected = (one(**batch, output_attentions=True) for one in (swapped, model))
    kinds = [key for key in expected if key.endswith("attentions")]
    assert sum(len(expected[key]) for key in kinds) == len(report.swapped) > 0
    for key in kinds:
        for ours, theirs in zip(found[key], expected[key], strict=True):
            assert_near(ours, theirs)
    plain = swapped(**batch)
    assert not any(plain.get(key) for key in kinds)


# ---- masks -----------------------------------------------------------------------------------------------------------


def test_a_kernel_gets_a_bool_mask_of_the_visible_keys():
    seen: list[Tensor] = []

    def watching(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        assert not is_causal and q.shape[1] == 4 and k.shape[1] == 2  # heads are not repeated
        seen.append(attn_mask)
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, False, scale=scale, enable_gqa=enable_gqa)

    family, model = build("mistral")
    swapped, _ = swap(model, kernel=watching)
    batch = family.batches(model, rng())["left-padded"]
    swapped(**batch.kwargs)
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    window = (j <= i) & (i - j < 7)
    assert torch.equal(seen[0], window & batch.real[:, None, None, :])
    assert seen[0].dtype == torch.bool


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@torch.no_grad()
def test_a_mask_of_the_users_own(kind):
    family, model = build("llama")
    swapped, _ = swap(model)
    visible = torch.rand(2, 1, LENGTH, LENGTH, generator=rng()) < 0.5
    visible |= torch.eye(LENGTH, dtype=torch.bool)
    mask = visible if kind == torch.bool else torch.where(visible, 0.3, torch.finfo(torch.float32).min)
    batch = {"input_ids": family.batches(model, rng())["plain"].kwargs["input_ids"], "attention_mask": mask}
    assert_near(swapped(**batch).logits, model(**batch).logits)


@torch.no_grad()
def test_packed_sequences():
    _, model = build("llama")
    swapped, _ = swap(model)
    tokens = torch.randint(97, (1, 12), generator=rng())
    packed = {"input_ids": tokens, "position_ids": torch.tensor([[*range(5), *range(7)]]), "use_cache": False}
    assert_near(swapped(**packed).logits, model(**packed).logits)
    assert_near(swapped(**packed).logits[:, 5:], model(input_ids=tokens[:, 5:]).logits)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_without_a_mask_it_does_what_ran_before(implementation):
    """Called by itself, the library's eager hides nothing where its SDPA is causal."""
    _, model = build("llama", attn_implementation=implementation)
    swapped, _ = swap(model)
    x = torch.randn(2, 5, 32, generator=rng())
    turns = model.model.rotary_emb(x, torch.arange(5)[None])
    found, expected = (one.model.layers[0].self_attn(x, turns, None)[0] for one in (swapped, model))
    assert_near(found, expected)


# ---- which modules, and back again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_partial_swap(implementation):
    family, model = build("mistral", attn_implementation=implementation, num_hidden_layers=3)
    swapped, report = swap(model, only="model.layers.1.*")
    assert [(row.name, row.became) for row in report.swapped] == [
        ("model.layers.1.self_attn", "MistralAttention [eager]")
    ]
    assert Judge(family, model).statuses(swapped) == {"ok"}
    assert torch.equal(family.generate(swapped, rng(2)), family.generate(model, rng(2)))

    wrong, _ = swap(model, kernel=without(scale=1.0), only="model.layers.1.*")
    batch = family.batches(model, rng())["plain"].kwargs
    ours, theirs = (one(**batch, output_hidden_states=True).hidden_states for one in (wrong, model))
    # The layer before ran what it ran before: with the library's own masks for eager to the last bit.
    assert torch.equal(ours[1], theirs[1]) if implementation == "eager" else (ours[1] - theirs[1]).abs().max() < 1e-5
    assert (ours[2] - theirs[2]).abs().max() > 1e-2


def test_partial_swap_of_what_cannot_run_on():
    _, model = build("llama")
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(SwapError, match="runs flex_attention: only where it runs eager or sdpa"):
        swap(model, only="model.layers.0.*")


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_undo_leaves_no_trace(name):
    family, model = build(name)
    batch = family.batches(model, rng())["left-padded"].kwargs
    state = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {key: {*vars(module)} for key, module in model.named_modules()}
    config, as_dict, before = model.config, vars(model.config).copy(), model(**batch).logits
    swapped, report = swap(model, inplace=True)
    assert swapped is model and model.config._attn_implementation == IMPLEMENTATION
    model(**batch)
    assert report.undo() is model
    assert model.config is config and vars(config) == as_dict
    assert {key: {*vars(module)} for key, module in model.named_modules()} == attributes
    assert all(module.config is config for module in model.modules() if hasattr(module, "config"))
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(**batch).logits, before)
    report.undo()  # again: nothing is left to undo


@torch.no_grad()
def test_undo_of_one_row():
    family, model = build("llama")
    batch = family.batches(model, rng())["plain"].kwargs
    swapped, report = swap(model, kernel=without(scale=1.0))
    first, second = report.swapped
    second.undo()
    ours, theirs = (one(**batch, output_hidden_states=True).hidden_states for one in (swapped, model))
    assert (ours[1] - theirs[1]).abs().max() > 1e-2
    assert (first.calls, second.calls) == (1, 0)
    first.undo()
    assert not any(hasattr(module, ATTRIBUTE) for module in swapped.modules())
    assert torch.equal(swapped(**batch).logits, model(**batch).logits)


@torch.no_grad()
def test_a_swap_of_a_swap():
    family, model = build("llama")
    batch = family.batches(model, rng())["plain"].kwargs
    wrong, _ = swap(model, kernel=without(scale=1.0))
    right, report = swap(wrong, to="eager")
    assert_near(right(**batch).logits, model(**batch).logits)
    assert torch.equal(report.undo()(**batch).logits, wrong(**batch).logits)
    half, _ = swap(wrong, to="eager", only="model.layers.1.*")  # the other layer keeps the wrong one
    assert (half(**batch).logits - model(**batch).logits).abs().max() > 1e-2


def test_a_failed_swap_leaves_no_trace():
    _, model = build("llama")
    config = model.config

    def breaks(name: str, module: nn.Module) -> bool:
        if name.endswith("layers.1.self_attn"):
            raise RuntimeError("no")
        return True

    with pytest.raises(RuntimeError, match="no"):
        swap(model, only=breaks, inplace=True)
    with pytest.raises(SwapError, match="options mode: only latent attention heeds them"):
        swap(model, inplace=True, mode="absorbed")
    with pytest.raises(SwapError, match="options no swapped module heeds: colour"):
        swap(model, inplace=True, colour="red")
    assert model.config is config and config._attn_implementation == "sdpa"
    assert not any(hasattr(module, ATTRIBUTE) for module in model.modules())


@pytest.mark.parametrize(
    "copying", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@torch.no_grad()
def test_copies_of_a_swapped_model(copying):
    family, model = build("gpt_oss")
    swapped, report = swap(model)
    batch = family.batches(model, rng())["left-padded"].kwargs
    twin = copying(swapped)
    report.undo()  # the copy is on its own
    assert torch.equal(twin(**batch).logits, swap(model)[0](**batch).logits)
    assert getattr(twin.model.layers[0].self_attn, ATTRIBUTE).kernel.run.__self__.calls == 1
    assert not any(row.calls for row in report.swapped)
    assert torch.equal(family.generate(twin, rng(2)), family.generate(model, rng(2)))


@torch.no_grad()
def test_two_models_on_one_config_do_not_meet():
    family, model = build("llama")
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    untouched = type(model)(model.config).eval()
    untouched.load_state_dict(model.state_dict())
    batch = family.batches(model, rng())["plain"].kwargs
    expected = model(**batch).logits
    _, report = swap(model, to="eager", inplace=True)
    _, other_report = swap(other, kernel=without(scale=1.0), inplace=True)
    assert_near(model(**batch).logits, expected)
    wrong = other(**batch).logits
    assert (wrong - expected).abs().max() > 1e-2
    assert torch.equal(untouched(**batch).logits, expected)
    report.undo()
    assert torch.equal(model(**batch).logits, expected)
    assert torch.equal(other(**batch).logits, wrong)
    assert [row.calls for row in other_report.swapped] == [2, 2]


def test_models_inside_a_model():
    """Names are full ones, whatever the model stands in."""
    _, llama = build("llama")
    _, gemma = build("gemma2")
    pair = nn.ModuleDict({"draft": llama, "target": gemma})
    _, report = swap(pair)
    assert [row.name for row in report.swapped] == [
        *(f"draft.model.layers.{i}.self_attn" for i in range(2)),
        *(f"target.model.layers.{i}.self_attn" for i in range(2)),
    ]
    assert [row.name for row in swap(pair, only="target.*.1.*")[1].swapped] == ["target.model.layers.1.self_attn"]
    assert all(row.params_before == row.params_after > 0 for row in report.swapped)


def test_what_it_refuses():
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(SwapError, match=r"transformer\.h\.0\.self_attention is BloomAttention, which does not go"):
        swap(bloom)
    family, model = build("llama")
    swapped, _ = swap(model)
    batch = family.batches(model, rng())["plain"].kwargs
    with pytest.raises(Unsupported, match="LlamaAttention passes sparsity: the swap does not know"):
        swapped(**batch, sparsity=0.5)
    swapped(**batch, sparsity=None, num_items_in_batch=3)  # neither changes a number
    stray = type(model)(swapped.config).eval()
    with pytest.raises(SwapError, match="no swap attached a kernel to it"):
        stray(**batch)


def test_nothing_to_swap_says_what_was_looked_for():
    mamba = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
    config = transformers.Mamba2Config(vocab_size=97, hidden_size=32, num_hidden_layers=1, **mamba)
    with pytest.raises(SwapError, match=r"nor an attention of transformers that goes through its attention interface$"):
        swap(transformers.Mamba2ForCausalLM(config))


# ---- models that are no family of ours -------------------------------------------------------------------------------

WIDTHS = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OTHERS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {**WIDTHS, "num_key_value_heads": 2},
    "Phi3ForCausalLM": {**WIDTHS, "num_key_value_heads": 2},
    "Olmo2ForCausalLM": {**WIDTHS, "num_key_value_heads": 2},
    "Cohere2ForCausalLM": {**WIDTHS, "num_key_value_heads": 2, "sliding_window": 5},
    "GPTNeoXForCausalLM": WIDTHS,
    "BertModel": WIDTHS,
    "T5Model": {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_other_models(name, implementation):
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**OTHERS[name], attn_implementation=implementation)).eval()
    randomise(model, rng(0))
    swapped, report = swap(model)
    tokens = torch.randint(3, 97, (2, LENGTH), generator=rng())
    real = torch.ones(2, LENGTH, dtype=torch.long)
    real[1, LENGTH - PADDING :] = 0
    batch = {"input_ids": tokens, "attention_mask": real}
    if name == "T5Model":  # two stacks, cross-attention, and a learnt bias on the scores
        batch |= {"decoder_input_ids": tokens}
    found, expected = (one(**batch)[0][real == 1] for one in (swapped, model))
    assert_near(found, expected)
    assert not report.uncalled
    assert len(report.swapped) == (6 if name == "T5Model" else 2)


SMALL = {key: WIDTHS[key] for key in list(WIDTHS)[:5]}


def encoder_decoder() -> tuple[nn.Module, dict[str, Any]]:
    """Put together from two models, whose layers go on holding the configs of those."""
    encoder = transformers.BertModel(transformers.BertConfig(**SMALL))
    decoder = transformers.BertLMHeadModel(transformers.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True))
    tokens = torch.randint(3, 97, (2, LENGTH), generator=rng())
    real = torch.ones(2, LENGTH, dtype=torch.long)
    real[1, LENGTH - PADDING :] = 0
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder)
    return model, {"input_ids": tokens, "attention_mask": real, "decoder_input_ids": tokens}


def siglip() -> tuple[nn.Module, dict[str, Any]]:
    """Its pooling head holds an nn.MultiheadAttention."""
    sizes = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=4))
    return model, {"pixel_values": torch.randn(2, 3, 16, 16, generator=rng())}


def deepseek_v32() -> tuple[nn.Module, dict[str, Any]]:
    """Its indexer leaves each query 4 keys."""
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    indexer = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
    config = transformers.DeepseekV32Config(
        **SMALL,
        **latent,
        **experts,
        **indexer,
        num_key_value_heads=4,
        moe_intermediate_size=16,
        first_k_dense_replace=2,
    )
    return transformers.DeepseekV32ForCausalLM(config), {"input_ids": torch.randint(97, (2, LENGTH), generator=rng())}


@pytest.mark.parametrize(("build_one", "attentions"), [(encoder_decoder, 6), (siglip, 3), (deepseek_v32, 2)])
@torch.no_grad()
def test_models_that_hold_more_than_one_kind(build_one, attentions):
    model, batch = build_one()
    randomise(model.eval(), rng(0))
    swapped, report = swap(model)
    found, expected = (one(**batch) for one in (swapped, model))
    for key in ("logits", "last_hidden_state", "pooler_output"):
        if expected.get(key) is not None:
            assert_near(found[key], expected[key])
    assert not report.uncalled and not report.left
    assert len(report.swapped) == attentions
    wrong, _ = swap(model, kernel=without(scale=1.0))
    assert (wrong(**batch)[0] - expected[0]).abs().max() > 1e-3
    assert torch.equal(report.undo()(**batch)[0], expected[0])


def test_the_attention_of_torch_in_a_model_of_transformers():
    model, _ = siglip()
    swapped, report = swap(model, only=nn.MultiheadAttention, use_in_proj=True)
    assert [(row.name, row.became) for row in report.swapped] == [
        ("head.attention", "EagerMultiheadAttentionWithInProj")
    ]
    assert swapped.config._attn_implementation == "sdpa"
    _, report = swap(model, only="*encoder*")
    assert {row.was for row in report.swapped} == {"SiglipAttention"}
    assert [row.name for row in swap(nn.ModuleDict({"eye": model}), only="eye.head.*")[1].swapped] == [
        "eye.head.attention"
    ]


# ---- building and loading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_models_are_random_everywhere(name):
    family, model = build(name)
    assert all(p.isfinite().all() and p.detach().std() > 0 for p in model.parameters())
    found = family.inspect(model)
    assert (found.layers, found.attentions, found.heads, found.kv_heads) == (2, 2, 4, 2)
    attention = model.model.layers[0].self_attn
    assert (type(attention).__name__, attention.head_dim) == (found.attention_class, found.head_dim)
    assert torch.equal(model.lm_head.weight, family.build({}).lm_head.weight)  # the same every time


def test_overrides():
    family, model = build("qwen3", num_hidden_layers=3, head_dim=8)
    assert (family.inspect(model).layers, family.inspect(model).head_dim) == (3, 8)
    with pytest.raises(FamilyError, match=r"'num_kv_heads' is unknown to Qwen3Config; near: .*num_key_value_heads"):
        family.build({"num_kv_heads": 3})
    with pytest.raises(FamilyError, match=r"'zzz' is unknown to Qwen3Config; known: .*vocab_size"):
        family.build({"zzz": 3})
    with pytest.raises(FamilyError, match=r"llama: num_attention_heads = 5: .*not a multiple"):
        build("llama", num_attention_heads=5)
    with pytest.raises(FamilyError, match="llama: num_key_value_heads = 3: RuntimeError"):
        build("llama", num_key_value_heads=3)


@torch.no_grad()
def test_checkpoints(tmp_path):
    family, model = build("llama")
    model.save_pretrained(tmp_path / "whole")
    loaded = family.load(tmp_path / "whole")
    batch = family.batches(model, rng())["plain"].kwargs
    assert not loaded.training
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)
    with pytest.raises(FamilyError, match="is a LlamaForCausalLM, and qwen3 is Qwen3ForCausalLM"):
        find_family("qwen3").load(tmp_path / "whole")
    with pytest.raises(FamilyError, match="no checkpoint folder"):
        family.load(tmp_path / "nowhere")

    state = {key: value for key, value in model.state_dict().items() if "layers.1.self_attn.q_proj" not in key}
    model.save_pretrained(tmp_path / "part", state_dict=state)
    with pytest.raises(FamilyError, match=r"lacks 2 weights: model\.layers\.1\.self_attn\.q_proj\.bias"):
        family.load(tmp_path / "part")
    (tmp_path / "part" / "config.json").write_text("{")
    with pytest.raises(FamilyError, match="cannot be loaded"):
        family.load(tmp_path / "part")
