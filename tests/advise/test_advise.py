"""`harness advise`: published figures exactly, what fits by trying, and predictions that follow the measurements."""

import argparse
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.__main__ import main
from harness.advise import choose
from harness.advise import memory as amounts
from harness.advise.candidates import MODELS, Candidate, Model, candidates
from harness.advise.choose import Alternative, advise, dominates, faster, step_of
from harness.advise.memory import Requirement, footprint
from harness.advise.roofline import BEYOND, CACHED, MIB, Clocks, Disturbance, Roofline, span_of, watch
from harness.advise.work import DecodeStep, Figure, StepPart, decode_step, figure
from harness.commands import advise as command
from harness.errors import BadInput
from harness.report.advice import sentence, size

GIB = 2**30

# bytes/token/layer in bf16, bytes/token, attention parameters of a layer: as published.
PUBLISHED = {
    "llama-2-7b": (16384, 524288, 67_108_864),
    "llama-2-70b": (4096, 327680, 150_994_944),
    "llama-3.1-70b": (4096, 327680, 150_994_944),
    "qwen2.5-72b": (4096, 327680, 150_994_944),
    "llama-3-8b": (4096, 131072, 41_943_040),
    "mistral-7b": (4096, 131072, 41_943_040),
    "llama-3.1-405b": (4096, 516096, 570_425_344),
    "qwen3-8b": (4096, 147456, 41_943_296),
    "deepseek-v2-lite": (1152, 31104, 13_763_072),
    "deepseek-v2": (1152, 69120, 149_227_520),
    "deepseek-v3": (1152, 70272, 187_107_328),
}


def test_every_preset_has_published_figures():
    assert set(MODELS) == set(PUBLISHED)


def own(model: Model, dtype: str = "bfloat16") -> Candidate:
    (found,) = [one for one in candidates(model, dtype) if one.own]
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures_come_out_exactly(name: str):
    model = MODELS[name]
    candidate = own(model)
    per_token = footprint(candidate, Requirement(model, 1, 1, "bfloat16", GIB)).bytes_per_token
    assert (candidate.bytes_per_token_layer, per_token, candidate.attention_params) == PUBLISHED[name]


# Vocabulary, width of the MLP, other parameters of a layer (biases of q, k, v); for DeepSeek also the experts.
DENSE = {
    "llama-2-7b": (32000, 11008, 0),
    "llama-2-70b": (32000, 28672, 0),
    "llama-3.1-70b": (128256, 28672, 0),
    "qwen2.5-72b": (152064, 29568, 10240),
    "llama-3-8b": (128256, 14336, 0),
    "mistral-7b": (32000, 14336, 0),
    "llama-3.1-405b": (128256, 53248, 0),
    "qwen3-8b": (151936, 12288, 0),
}
# Vocabulary, dense MLP, expert MLP, routed and shared experts, dense layers, correction bias of the router.
EXPERTS = {
    "deepseek-v2-lite": (102400, 10944, 1408, 64, 2, 1, 0),
    "deepseek-v2": (102400, 12288, 1536, 160, 2, 1, 0),
    "deepseek-v3": (129280, 18432, 2048, 256, 1, 3, 256),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_those_of_the_architecture(name: str):
    model, attention = MODELS[name], PUBLISHED[name][2]
    d, layers = model.embed_dim, model.layers
    if name in DENSE:
        vocabulary, width, other = DENSE[name]
        mlp = layers * (3 * d * width + other)
    else:
        vocabulary, width, expert, routed, shared, dense, bias = EXPERTS[name]
        mlp = dense * 3 * d * width + (layers - dense) * ((routed + shared) * 3 * d * expert + routed * d + bias)
    assert model.params == 2 * vocabulary * d + layers * (attention + 2 * d) + d + mlp


def test_candidates_are_what_the_modules_weigh():
    """Against the modules themselves, built without memory: parameters, and elements in their cache."""
    import torch

    import harness

    model = Model("m", 96, 2, 12, 16, existing=False)
    found = {one.label: one for one in candidates(model, "float32")}
    assert list(found) == ["mha", "gqa-4", "mqa", "mla"]  # 8 does not divide 12
    with torch.device("meta"):
        modules: dict[str, Any] = {
            "mha": harness.MultiHeadAttention(96, 12, head_dim=16),
            "gqa-4": harness.GroupedQueryAttention(96, 12, 4, head_dim=16),
            "mqa": harness.MultiQueryAttention(96, 12, head_dim=16),
            "mla": harness.MultiHeadLatentAttention(
                96, 12, kv_lora_rank=64, nope_head_dim=16, rope_head_dim=8, v_head_dim=16
            ),
        }
    for label, module in modules.items():
        assert found[label].attention_params == sum(p.numel() for p in module.parameters()), label
        assert found[label].bytes_per_token_layer == 4 * module.kv_elements_per_token(), label


def test_latent_ranks_of_a_usual_model_are_deepseeks():
    (latent,) = [one for one in candidates(MODELS["llama-3-8b"], "bfloat16") if one.label == "mla"]
    case = latent.case
    assert (case.kv_lora_rank, case.rope_head_dim, case.head_dim, case.v_head_dim) == (512, 64, 128, 128)
    assert latent.bytes_per_token_layer == 1152


def test_a_variant_is_not_listed_twice():
    for name in MODELS:
        labels = [one.label for one in candidates(MODELS[name], "bfloat16")]
        assert len(labels) == len(set(labels)) >= 4, labels


# ---- what fits ------------------------------------------------------------------------------------------------------


@given(
    context=st.integers(1, 3000),
    batch=st.integers(1, 5),
    memory=st.integers(1, 40 * MIB),
    window=st.none() | st.integers(1, 2000),
    params=st.none() | st.integers(1, 10**7),
    label=st.sampled_from(["mha", "gqa-4", "mqa", "mla"]),
)
@settings(max_examples=150)
def test_the_largest_that_fits_fits_and_one_more_does_not(context, batch, memory, window, params, label):
    model = Model("m", 64, 3, 8, 8, kv_heads=8, window=window, params=params)
    (candidate,) = [one for one in candidates(model, "float16") if one.label == label]
    demand = Requirement(model, context, batch, "float16", memory)
    print_ = footprint(candidate, demand)

    def fits(tokens: int, sequences: int) -> bool:
        return footprint(candidate, replace(demand, context=tokens, batch=sequences)).fits

    if print_.weight_bytes is not None and print_.weight_bytes > memory:
        assert (print_.largest_context, print_.largest_batch) == (0, 0)
        return
    if print_.largest_context is None:
        assert window is not None and fits(10**9, batch)
    else:
        assert print_.largest_context == 0 or fits(print_.largest_context, batch)
        assert not fits(print_.largest_context + 1, batch)
    assert print_.largest_batch == 0 or fits(context, print_.largest_batch)
    assert not fits(context, print_.largest_batch + 1)


def test_a_window_caps_the_cache():
    model = MODELS["mistral-7b"]
    far, near = (footprint(own(model), Requirement(model, n, 1, "bfloat16", 80 * GIB)) for n in (10**6, 4096))
    assert far.cache_bytes == near.cache_bytes == 4096 * 131072
    assert far.largest_context is None


def test_weights_change_with_the_variant():
    model = MODELS["llama-3-8b"]
    by_label = {one.label: one for one in candidates(model, "bfloat16")}
    demand = Requirement(model, 1, 1, "bfloat16", 80 * GIB)
    assert footprint(by_label["gqa-8"], demand).weight_bytes == 2 * 8_030_261_248
    more = footprint(by_label["mha"], demand).weight_bytes
    assert more == 2 * (8_030_261_248 + 32 * (67_108_864 - 41_943_040))


# ---- prediction ------------------------------------------------------------------------------------------------------


def exactly(value: float) -> Figure:
    return Figure(value, value, value)


def made_up(steps: list[DecodeStep], *, pace: float = 1e-9, overhead: float = 1e-4) -> Roofline:
    parts = {
        (part, span_of(step)): exactly(part.bytes * pace if part.bytes else overhead)
        for step in steps
        for part in step.parts
    }
    return Roofline(dict.fromkeys((CACHED, BEYOND), exactly(1e-11)), parts, 1)


def steps_of(demand: Requirement) -> list[DecodeStep]:
    return [step_of(one, demand) for one in candidates(demand.model, demand.dtype)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_step_reads_weights_and_cache_once(name: str):
    """Parts of a step hold what the layer holds: its parameters (norms aside) and its cache."""
    for candidate in candidates(MODELS[name], "bfloat16"):
        case = candidate.case
        norms = candidate.extra_params + (case.q_lora_rank or 0) + (case.kv_lora_rank or 0)
        step = decode_step(candidate, batch=3, keys=100, layers=5)
        held = 2 * (candidate.attention_params - norms) + 300 * candidate.bytes_per_token_layer
        assert sum(part.bytes for part in step.parts) == held, candidate.label
        assert step.working_set == 5 * held, candidate.label


@pytest.mark.parametrize("label", ["gqa-4", "mla", "mla with query rank"])
def test_parts_are_the_products_that_a_layer_calls(label: str, monkeypatch: pytest.MonkeyPatch):
    """In their order and with the layer's own shapes: a probe's calls side by side with those of a real step."""
    import torch

    import harness
    from harness.advise import probes
    from harness.variants import mla

    ranks: dict[str, Any] = {"kv_lora_rank": 24, "rope_head_dim": 4, "v_head_dim": 12}
    rank = 20 if "rank" in label else None
    model = Model("m", 40, 1, 8, 8, None if "mla" in label else 4)
    if "mla" in label:
        model = replace(model, q_lora_rank=rank, **ranks)
    candidate = next(one for one in candidates(model, "float32") if one.label == label.split()[0])
    layer: Any = (
        harness.MultiHeadLatentAttention(
            40, 8, nope_head_dim=8, q_lora_rank=rank, mode="absorbed", kernel="grouped", **ranks
        )
        if "mla" in label
        else harness.GroupedQueryAttention(40, 8, 4, head_dim=8, kernel="grouped")
    )
    seen: list[tuple] = []

    def spy(name, function):
        def spied(*arguments, **options):
            tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
            seen.append((name, *(tuple(one.shape) for one in tensors)))
            return function(*arguments, **options)

        return spied

    from harness.variants import gqa

    step = probes.decode_step(layer, batch=3, keys=9)
    for place in (gqa, mla, probes):
        monkeypatch.setattr(place, "attention", spy("attention", place.attention))
    monkeypatch.setattr(torch, "einsum", spy("einsum", torch.einsum))
    monkeypatch.setattr(torch.nn.functional, "linear", spy("linear", torch.nn.functional.linear))
    with torch.inference_mode():
        step()
        real = seen.copy()
        calls = [probes.call_of(part) for part in decode_step(candidate, batch=3, keys=9).parts if part.bytes]
        seen.clear()
        for call in calls:
            call()
    assert seen == real and len(real) == len(calls)


def test_time_is_overhead_and_every_part():
    model = MODELS["llama-3-8b"]
    demand = Requirement(model, 1000, 1, "bfloat16", 80 * GIB)
    candidate = own(model)
    predicted = made_up([step_of(candidate, demand)]).seconds(step_of(candidate, demand))
    held = 2 * candidate.attention_params + 1000 * 4096
    assert predicted.value == pytest.approx(1e-4 + held * 1e-9)


def test_parts_are_looked_up_where_the_step_finds_them():
    """The same layer alone is in the cache; as one of many it is not."""
    candidate = own(Model("m", 64, 1, 4, 16, kv_heads=4), "float32")
    alone, many = (decode_step(candidate, batch=1, keys=16, layers=n) for n in (1, 10**6))
    assert (span_of(alone), span_of(many)) == (CACHED, BEYOND)
    between = decode_step(candidate, batch=1, keys=16, layers=300)
    assert CACHED < span_of(between) == between.working_set < BEYOND
    model = Model("m", 64, 300, 4, 16, kv_heads=4)
    assert step_of(own(model, "float32"), Requirement(model, 16, 1, "float32", GIB)) == between
    near, far = made_up([alone], pace=1e-10), made_up([many], pace=1e-9)
    both = replace(near, parts=near.parts | far.parts)
    held = alone.working_set
    assert both.seconds(alone).value == pytest.approx(1e-4 + held * 1e-10)
    assert both.seconds(many).value == pytest.approx(1e-4 + held * 1e-9)


def test_the_error_bar_comes_from_the_samples():
    found = figure([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.lo, found.value, found.hi) == (1.0, 2.0, 3.0)
    assert found.error == 0.5
    assert (found + found).error == found.error  # not averaged out
    assert figure([2.0] * 7).error == 0


def test_measuring_here_gives_positive_times(monkeypatch: pytest.MonkeyPatch):
    """The real probes, few samples: each part that a prediction needs has a time."""
    from harness.advise import probes, roofline

    monkeypatch.setattr(probes, "BUDGET_S", 0.0)
    monkeypatch.setattr(probes, "LEAST", 2)
    model = Model("m", 64, 2, 8, 8, kv_heads=2)
    demand = Requirement(model, 64, 2, "bfloat16", GIB)
    found = [one for one in candidates(model, "bfloat16") if one.label in ("gqa-2", "mla")]
    steps = [step_of(one, demand) for one in found]
    heard: list[str] = []
    measured = roofline.measure(steps, told=heard.append)
    assert set(measured.parts) == {(part, CACHED) for step in steps for part in step.parts}
    assert all(one.lo > 0 for one in (*measured.parts.values(), *measured.reading.values()))
    assert len(heard) == 1 + len(steps)
    for one in found:
        predicted = measured.seconds(step_of(one, demand))
        assert 0 < predicted.lo <= predicted.value <= predicted.hi < 1


def test_a_part_that_two_variants_share_is_measured_once(monkeypatch: pytest.MonkeyPatch):
    from harness.advise import probes, roofline

    taken: list[object] = []

    def take(asked):
        taken.extend(asked)
        return dict.fromkeys(asked, exactly(1.0))

    monkeypatch.setattr(probes, "take", take)
    monkeypatch.setattr(probes, "PIECE_BYTES", MIB)
    model = Model("m", 64, 10**6, 8, 8, existing=False)
    steps = steps_of(Requirement(model, 64, 1, "float32", GIB))
    roofline.measure(steps)
    assert len(taken) == len(set(taken)) == 2 + len({part for step in steps for part in step.parts})
    assert sum(len(step.parts) for step in steps) > len(taken)


PARTS = [
    StepPart("linear", 4, 700, 900, "float32"),
    StepPart("linear", 4096, 700, 900, "float32"),
    StepPart("to_latent", 2, 64, 64, "float32", heads=128),
    StepPart("from_latent", 2, 64, 64, "bfloat16", heads=300),
    StepPart("attention", 2, 16, 16, "float32", heads=2, rows=4, keys=10_000),
    StepPart("attention", 1000, 64, 64, "float32", heads=8, rows=2, keys=100),  # few keys of each are more than a piece
    StepPart("attention", 1, 40, 32, "float32", rows=8, keys=50_000, latent=True),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.kind}-{part.batch}")
def test_a_large_part_is_cut_to_a_piece(part: StepPart, monkeypatch: pytest.MonkeyPatch):
    from harness.advise import probes

    assert probes.cut(replace(part, batch=min(part.batch, 16))) != part or probes.cut(part) == part
    monkeypatch.setattr(probes, "PIECE_BYTES", MIB)
    piece = probes.cut(part)
    assert 0.8 * MIB <= piece.bytes <= MIB < part.bytes
    assert (piece.kind, piece.rows, piece.width, piece.latent) == (part.kind, part.rows, part.width, part.latent)
    assert probes.cut(piece) == piece


@pytest.mark.parametrize("part", PARTS[:1] + PARTS[4:5], ids=lambda part: part.kind)
def test_a_probe_reads_the_rest_of_the_working_set_first(part: StepPart, monkeypatch: pytest.MonkeyPatch):
    import torch

    from harness.advise import probes

    read: list[int] = []
    monkeypatch.setattr(probes, "PIECE_BYTES", MIB)
    monkeypatch.setattr(probes, "_reader", lambda size: lambda: read.append(size))
    piece = probes.cut(part)
    probe = probes.probe_of(part, 5 * MIB)
    with torch.inference_mode():
        probe.before()
        probe.call()
    assert read == [5 * MIB - piece.bytes]
    assert probe.scale == part.bytes / piece.bytes > 1


def test_a_sample_is_the_call_less_the_empty_call(monkeypatch: pytest.MonkeyPatch):
    """On a clock that the calls move themselves; what comes before is not counted, nor is the first turn."""
    from harness.advise import probes
    from harness.advise.probes import TimedCall, take

    now, order = [0.0], []
    odd = {"first": -1.0}  # the first turn, unlike all others

    def lasts(name: str, seconds: float):
        def call():
            order.append(name)
            now[0] += seconds + odd.pop(name, 0.0)

        return call

    monkeypatch.setattr("harness.advise.probes.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(probes, "BUDGET_S", 0.0)
    found = take({
        1: TimedCall(lasts("before", 7.0), lasts("first", 3.0), lasts("empty", 1.0), 10.0),
        2: TimedCall(lasts("before", 7.0), lasts("second", 5.0)),
    })  # fmt: skip
    assert found == {1: exactly(20.0), 2: exactly(5.0)}
    assert order == ["before", "first", "empty", "before", "second"] * (1 + probes.LEAST)


@pytest.mark.parametrize("latent", [False, True])
def test_the_decode_step_that_is_timed_decodes(latent: bool):
    """One query a sequence over all keys, as often as it is called."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import harness
    from harness.advise.probes import decode_step

    seen = []

    def spy(q, k, v, **options):
        seen.append((q.shape[0], q.shape[2], k.shape[2]))
        return scaled_dot_product_attention(q, k, v, **options)

    ranks: dict[str, Any] = {"kv_lora_rank": 16, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 8}
    layer = (
        harness.MultiHeadLatentAttention(32, 4, mode="absorbed", kernel=spy, **ranks)
        if latent
        else harness.GroupedQueryAttention(32, 4, 2, kernel=spy)
    )
    with torch.inference_mode():
        step = decode_step(layer, batch=2, keys=9)
        seen.clear()
        first, again = step(), step()
    assert seen == [(2, 1, 9)] * 2
    torch.testing.assert_close(first, again, rtol=0, atol=0)


# ---- the choice ------------------------------------------------------------------------------------------------------


def costs(option: Alternative) -> tuple[float, ...]:
    return (*option.costs, 0.0 if option.step is None else option.step.value)


def test_the_front_is_what_nothing_beats():
    model = MODELS["llama-2-7b"]
    demand = Requirement(model, 4096, 1, "bfloat16", 80 * GIB)
    for advice in (advise(demand), advise(demand, made_up(steps_of(demand)))):
        front = {one.candidate.label for one in advice.options if one.pareto}
        beaten = {
            one.candidate.label
            for one in advice.options
            for other in advice.options
            if all(a <= b for a, b in zip(costs(other), costs(one), strict=True)) and costs(other) != costs(one)
        }
        assert front == {one.candidate.label for one in advice.options} - beaten
        assert "mqa" in front and "mha" not in front  # mla has as many heads, fewer parameters and a smaller cache


def test_dominating_needs_one_thing_that_is_better():
    model = MODELS["llama-2-7b"]
    (option, *_) = advise(Requirement(model, 1, 1, "bfloat16", GIB)).options
    assert not dominates(option, option)


def test_what_fits_and_is_unbeaten_stays():
    advice = advise(Requirement(MODELS["llama-3-8b"], 32768, 1, "bfloat16", 24 * GIB))
    assert advice.chosen is not None and advice.chosen.candidate.own
    assert sentence(advice).startswith("Keep gqa-8: it fits 32,768 tokens x 1 in 24 GiB")


def test_what_does_not_fit_is_replaced_by_the_most_heads_that_do():
    demand = Requirement(MODELS["llama-3-8b"], 131072, 1, "bfloat16", 20 * GIB)
    advice = advise(demand)
    assert advice.chosen is not None and advice.chosen.footprint.fits
    fitting = [one for one in advice.options if one.footprint.fits]
    assert advice.chosen.candidate.kv_heads == max(one.candidate.kv_heads for one in fitting)
    assert not next(one for one in advice.options if one.candidate.own).footprint.fits
    assert "gqa-8 needs" in sentence(advice)


def test_an_own_variant_that_is_beaten_gives_way_to_one_that_beats_it():
    advice = advise(Requirement(MODELS["llama-2-7b"], 4096, 1, "bfloat16", 80 * GIB))
    mha = next(one for one in advice.options if one.candidate.own)
    assert mha.footprint.fits and advice.chosen is not None
    assert dominates(advice.chosen, mha)
    assert "nowhere worse than mha" in sentence(advice)


def test_time_can_keep_it():
    """The same question where latents are slow: MHA is the fastest, so nothing beats it on all."""
    model = MODELS["llama-2-7b"]
    demand = Requirement(model, 4096, 1, "bfloat16", 80 * GIB)
    quick = made_up(steps_of(demand), pace=1e-12)
    parts = {key: exactly(1.0) if key[0].latent else seconds for key, seconds in quick.parts.items()}
    chosen = advise(demand, replace(quick, parts=parts)).chosen
    assert chosen is not None and chosen.candidate.label == "mha"


@pytest.mark.parametrize(("low", "word"), [(1.0, "no slower within the error"), (2.5, "Keep mha")])
def test_times_within_the_error_are_no_reason(low: float, word: str):
    """mla is slower by value; whether that keeps mha is for the intervals to say."""
    advice = advise(Requirement(MODELS["llama-2-7b"], 4096, 1, "bfloat16", 80 * GIB))
    by_label = {one.candidate.label: one for one in advice.options}
    mha = replace(by_label["mha"], step=Figure(1.5, 1.0, 2.0))
    mla = replace(by_label["mla"], step=Figure(3.0, low, 3.5))
    assert dominates(mla, mha) == (low <= 2.0)
    assert faster(mha, mla) == (low > 2.0)
    chosen = choose._choose([mha, mla])
    assert chosen is not None
    assert word in sentence(replace(advice, options=(mha, mla), chosen=chosen))


def clocks(*readings: Clocks):
    return iter(readings).__next__


@pytest.mark.parametrize(
    ("last", "others", "said"),
    [
        (Clocks(10.0, 19.0, 20.0), 0.1, False),  # nearly all of it was ours
        (Clocks(10.0, 10.0, 20.0), 1.0, True),  # one core of two
        (Clocks(10.0, 10.0, 9.0), 0.0, False),  # clocks that tick apart
    ],
)
def test_steady_work_of_others_is_seen(last: Clocks, others: float, said: bool):
    found = watch(clocks(Clocks(0.0, 0.0, 0.0), last))()
    assert found.others == pytest.approx(others)
    assert (found.words is not None) == said


def test_where_clocks_are_hidden_the_load_is_asked():
    hidden = watch(clocks(Clocks(0.0, 0.0, 0.0), Clocks(10.0, 10.0, 0.0)))()
    assert hidden.others is None
    assert Disturbance(None, 0.4).words is None and Disturbance(None, None).words is None
    assert Disturbance(None, 0.5).words == "the load of the minute before was 0.5"


def test_nothing_fits(capsys: pytest.CaptureFixture[str]):
    assert main(["advise", "--model", "llama-3.1-405b", "--memory", "1GiB", "--no-measure"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "Nothing fits 32,768 tokens x 1 in 1 GiB: the smallest, mqa, needs" in printed


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_has_the_exact_figures(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["advise", "--model", "deepseek-v3", "--memory", "2TB", "--no-measure"]) == 0
    printed = capsys.readouterr().out
    for figure_ in PUBLISHED["deepseek-v3"]:
        assert f" {figure_:,}" in printed
    assert max(map(len, printed.splitlines())) <= width
    assert "step" not in printed


@pytest.mark.parametrize(("spread", "rough"), [(1e-3, False), (1.0, True)])
def test_rough_times_are_said_to_be(capsys, monkeypatch, spread: float, rough: bool):
    from harness.advise import roofline

    def measure(steps, *, told):
        exact = replace(made_up(steps), disturbance=Disturbance(1.0 if rough else 0.1, 9.0))
        overhead = {key: Figure(1e-3, 1e-3, spread) for key in exact.parts if key[0].kind == "overhead"}
        return replace(exact, parts=exact.parts | overhead)

    monkeypatch.setattr(roofline, "measure", measure)
    assert main(["advise", "--model", "llama-3-8b", "--memory", "80GB", "--verbose"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert ("These times are rough" in printed) == rough
    assert ("± does not show a steady load" in printed) == rough
    assert "step: one decode step" in printed and "overhead of an MLA step: 1000 µs" in printed


def test_own_numbers(capsys):
    arguments = ["--embed-dim", "512", "--layers", "4", "--heads", "8", "--memory", "1GiB", "--no-measure"]
    assert main(["advise", *arguments]) == 0
    assert " own" not in capsys.readouterr().out.partition("own: what")[0]
    assert main(["advise", *arguments, "--kv-heads", "2", "--context", "4k"]) == 0
    assert "gqa-2 own" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--embed-dim, --layers, --heads: must be given, or --model"),
        (["--model", "gpt"], "unknown model 'gpt'; known: llama-2-7b"),
        (["--embed-dim", "10", "--layers", "1", "--heads", "3"], "must divide --embed-dim (10)"),
        (["--embed-dim", "12", "--layers", "1", "--heads", "4", "--kv-heads", "3"], "must divide heads (4)"),
        (["--model", "llama-3-8b", "--batch", "5000"], "--batch = 5000: decode times are predicted up to 4096"),
        (["--model", "llama-3-8b", "--params", "1B"], "--params = 1000000000: must be at least 1342177280"),
        (["--embed-dim", "8", "--layers", "2", "--heads", "2", "--params", "9"], "--params = 9: must be at least"),
        (["--model", "deepseek-v3", "--kv-heads", "3"], "has latent attention, which has none"),
    ],
)
def test_bad_input_names_value_and_rule(capsys, arguments, words):
    assert main(["advise", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_other_heads_change_the_published_count():
    """llama-3-8b with 32 key/value heads has llama-2-7b's attention, 25,165,824 more a layer."""
    options = argparse.Namespace(
        model="llama-3-8b", embed_dim=None, layers=None, heads=None, head_dim=None, kv_heads=32, window=None,
        params=None,
    )  # fmt: skip
    assert command._model(options).params == 8_030_261_248 + 32 * (67_108_864 - 41_943_040)
    options.params = 7 * 10**9
    assert command._model(options).params == 7 * 10**9


def test_a_changed_preset_loses_its_parameter_count(capsys):
    assert main(["advise", "--model", "llama-3-8b", "--layers", "2", "--memory", "9GiB", "--no-measure"]) == 0
    assert "with weights" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "number"),
    [("24GiB", 24 * GIB), ("80GB", 80 * 10**9), ("1.5 kib", 1536), ("8e9", 8 * 10**9), ("7B", 7)],
)
def test_memory_sizes(text, number):
    assert amounts.memory_size(text) == number


def test_a_few_bytes_of_memory_are_taken_for_a_forgotten_unit():
    with pytest.raises(argparse.ArgumentTypeError, match="is 24GiB meant"):
        amounts.memory_size("24")
    assert amounts.memory_size(str(2**20)) == 2**20


def test_counts_stay_exact():
    assert amounts.parameters("671026419201000000001") == 671026419201000000001
    assert amounts.parameters("8B") == 8 * 10**9
    assert amounts.tokens("128k") == 131072
    assert amounts.tokens("1M") == 1024**2


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "1e999", "nan", "12 parsecs", "1_000", "٣"])
def test_bad_amounts_are_refused(text):
    for read in (amounts.memory_size, amounts.tokens, amounts.parameters):
        with pytest.raises(argparse.ArgumentTypeError, match="must be"):
            read(text)


def test_sizes_in_words():
    assert [size(n) for n in (0, 999, 1024 * 999, GIB, 1200 * GIB)] == ["0 B", "999 B", "999 KiB", "1 GiB", "1.172 TiB"]


def test_models_that_are_impossible_are_refused():
    with pytest.raises(BadInput, match="kv_heads = 5: must divide heads"):
        candidates(Model("m", 32, 1, 8, 4, kv_heads=5), "float32")


def test_the_help_names_every_model():
    assert set(command.EPILOG.partition("examples")[0].split()) - {"models:"} == set(MODELS)
