"""`harness tune-sparse`: the search keeps its budget, its file comes back as it was, and no other model takes it."""

import dataclasses
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from harness.__main__ import main
from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.front import attention, find_kernel, make_call
from harness.models.tuning import file
from harness.models.tuning.calibration import Measured
from harness.models.tuning.file import Tuned, TuningError
from harness.models.tuning.heads import HeadKernels, swap_tuned
from harness.models.tuning.search import TOPK, LayerTuned, sparsest_within, tune
from harness.models.verify import verify
from harness.swaps import SwapReport
from tests.verify_models import Encoder

SPARSE = "sparse?block_q=4&block_k=4"
LAYERS = ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]


def smooth_inputs(length: int = 48) -> Tensor:
    """Neighbours are alike, as tokens of a video are."""
    generator = torch.Generator().manual_seed(3)
    coarse = torch.randn(2, 6, length // 8, generator=generator)
    smooth = F.interpolate(coarse, size=length, mode="linear", align_corners=True)
    return (smooth + 0.05 * torch.randn(2, 6, length, generator=generator)).transpose(1, 2)  # (2, length, 6)


def smooth_encoder() -> tuple[nn.Module, Tensor]:
    return Encoder(layers=2), smooth_inputs()


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    model, inputs = smooth_encoder()
    return tune(model, inputs=inputs, kernel=SPARSE)


# The search


@given(
    errors=st.lists(st.floats(0, 1), min_size=1, max_size=80).map(sorted),
    steps=st.integers(1, 7),
    limit=st.floats(0, 1),
)
def test_bisection_finds_what_trying_all_would(errors: list[float], steps: int, limit: float):
    errors[0] = 0.0
    # Several thresholds in a row do the same: their error and sparsity are those of the first of them.
    measured = [Measured(errors[i // steps * steps], i // steps) for i in range(len(errors))]
    tried: list[float] = []

    def measure(threshold: float) -> Measured:
        tried.append(threshold)
        return measured[int(threshold)]

    found = sparsest_within(limit, range(len(errors)), measure)
    within = [i for i, one in enumerate(measured) if one.error <= limit]
    densest_of_sparsest = min(i for i in within if measured[i].sparsity == measured[within[-1]].sparsity)
    assert found.threshold == densest_of_sparsest
    assert found.measured == measured[densest_of_sparsest]
    assert found.monotone
    assert found.tried == len(tried) == len(set(tried)) <= 2 * math.log2(len(errors)) + 3  # no grid


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=40),
    st.floats(0, 1),
)
def test_whatever_the_curve_the_limit_is_kept(points: list[tuple[float, float]], limit: float):
    measured = [Measured(0.0, 0.0), *(Measured(*point) for point in points)]
    found = sparsest_within(limit, range(len(measured)), lambda threshold: measured[int(threshold)])
    assert found.measured.error <= limit
    assert found.measured == measured[int(found.threshold)]


def test_a_curve_that_is_not_monotone_is_reported():
    curve = [0.0, 0.3, 0.1, 0.2, 0.05]
    found = sparsest_within(0.15, range(5), lambda threshold: Measured(curve[int(threshold)], threshold))
    assert (found.threshold, found.monotone) == (2, False)  # the sparser 4 is missed, and the limit kept


@pytest.mark.parametrize("error", [0.2, float("nan")])
def test_a_densest_threshold_beyond_the_limit_is_refused(error: float):
    with pytest.raises(ArithmeticError, match=r"at the densest threshold 1: limit 0\.1"):
        sparsest_within(0.1, [1.0, 0.5], lambda threshold: Measured(error, 0.0))


# The budget


def seen_by_layers(model: nn.Module, report: SwapReport, inputs: Tensor) -> dict[str, list[tuple[Tensor, ...]]]:
    """q, k, v and the output of every call of each layer."""
    seen: dict[str, list[tuple[Tensor, ...]]] = {}
    for row in report.swapped:

        def spy(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, *, name: str, kernel: Kernel) -> Any:
            assert call.mask is None
            out, weights = kernel.run(q, k, v, call)
            seen.setdefault(name, []).append((q, k, v, out))
            return out, weights

        kernel = row.counter.kernel
        row.counter.kernel = dataclasses.replace(
            kernel, run=lambda *given, name=row.name, kernel=kernel: spy(*given, name=name, kernel=kernel)
        )
    with torch.no_grad():
        model.eval()(inputs)
    return seen


def test_the_budget_is_kept_as_measured_apart(tuned: Tuned):
    """By torch's SDPA in float64 and numpy, head by head, in the model with all layers tuned."""
    model, inputs = smooth_encoder()
    swapped, report = swap_tuned(model, tuned)
    seen = seen_by_layers(swapped, report, inputs)
    assert list(seen) == LAYERS
    for name, calls in seen.items():
        ((q, k, v, out),) = calls
        dense = F.scaled_dot_product_attention(q.double(), k.double(), v.double()).numpy()
        errors = np.abs(out.numpy() - dense).sum((0, 2, 3)) / np.abs(dense).sum((0, 2, 3))
        assert errors.tolist() == pytest.approx([head.rel_l1 for head in tuned.layers[name]], rel=1e-4, abs=1e-6)
        assert (errors <= 0.08).all()
    sparsities = [head.sparsity for heads in tuned.layers.values() for head in heads]
    assert max(sparsities) > 0.2
    assert len(set(sparsities)) > 1  # heads differ


def test_one_step_sparser_would_break_the_budget():
    model, inputs = smooth_encoder()
    found = tune(model, inputs=inputs, kernel=SPARSE, pv_l1=None, l1=0.05)
    assert all(set(head.options) == {"topk"} for heads in found.layers.values() for head in heads)
    swapped, report = swap_tuned(model, found)
    checked = 0
    for name, ((q, k, v, _),) in seen_by_layers(swapped, report, inputs).items():
        dense = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        for head, setting in enumerate(found.layers[name]):
            place = TOPK.index(setting.options["topk"])
            one = [t[:, head : head + 1] for t in (q, k, v)]
            errors = []
            for topk in (TOPK[place], TOPK[min(place + 6, len(TOPK) - 1)]):  # 6 of 64 steps: a block of 12 fewer
                out = attention(*one, kernel=f"{SPARSE}&topk={topk}")
                wanted = dense[:, head : head + 1]
                errors.append(float((out - wanted).abs().sum() / wanted.abs().sum()))
            assert errors[0] <= 0.05
            if setting.monotone and float(setting.options["topk"]) > 0.2:
                checked += 1
                assert errors[1] > 0.05
    assert checked >= 2


def test_pv_comes_on_top_of_the_blocks(tuned: Tuned):
    heads = [head for layer in tuned.layers.values() for head in layer]
    assert any("pv" in head.options and head.pv_skipped > 0 for head in heads)
    assert all(head.rel_l1 <= 0.08 for head in heads)


def test_cdf_is_found_with_how_alike_blocks_must_be():
    model, inputs = Encoder(layers=1), smooth_inputs(32)
    found = tune(model, inputs=inputs, kernel=SPARSE, by="cdf", pv_l1=None)
    heads = [head for layer in found.layers.values() for head in layer]
    assert all({"cdf", "sim"} == set(head.options) and head.rel_l1 <= 0.07 for head in heads)
    assert max(head.sparsity for head in heads) > 0.1
    assert verify(model, inputs=inputs, tuned=found, budget={"end_rel_l1": 0.3}).passed


def test_it_is_deterministic_and_told_layer_by_layer(tuned: Tuned, tmp_path: Path):
    model, inputs = smooth_encoder()
    model.train()
    told: list[LayerTuned] = []
    again = tune(model, inputs=inputs, kernel=SPARSE, on_layer=told.append)
    file.save(tuned, tmp_path / "one.yaml")
    file.save(again, tmp_path / "two.yaml")
    assert (tmp_path / "one.yaml").read_bytes() == (tmp_path / "two.yaml").read_bytes()
    assert [(layer.name, layer.place, layer.layers) for layer in told] == [(LAYERS[0], 1, 2), (LAYERS[1], 2, 2)]
    assert model.training


def test_what_is_saved_does_not_depend_on_the_number_of_threads(tuned: Tuned):
    """Measured numbers have six digits: with other threads sums of float32 differ from the seventh or eighth on."""
    for layer in tuned.layers.values():
        for one in layer:
            for value in (one.rel_l1, one.sparsity, one.pv_skipped):
                assert value == float(f"{value:.6g}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "eager"}, "kernel 'eager' has no thresholds to tune"),
        ({"kernel": "sparse?topk=0.5&pv=3"}, "pv, topk is what the search is for"),
        ({"kernel": "sparse?nope=1"}, "no option 'nope'"),
        ({"by": "luck"}, "by = 'luck': must be one of topk, cdf"),
        ({"l1": 0.0}, "l1 = 0.0: must be a positive number"),
        ({"l1": float("nan")}, "l1 = nan: must be a positive number"),
        ({"l1": 0.1, "pv_l1": 0.05}, "must not be below l1 = 0.1"),
        ({"l1": 1e-12, "pv_l1": None}, r"encoder.layers.0.self_attn, head 0: relative L1 .* at the densest"),
    ],
)
def test_what_cannot_be_tuned_is_said(options: dict[str, Any], message: str):
    model, inputs = smooth_encoder()
    with pytest.raises(ValueError, match=message):
        tune(model, inputs=inputs, **{"kernel": SPARSE, **options})


def test_a_layer_that_nothing_runs_is_not_tuned():
    class Half(Encoder):
        def forward(self, x: Tensor, causal: bool = False) -> Tensor:
            return self.encoder.layers[0](self.embed(x))

    with pytest.raises(TuningError, match=r"no calibration batch runs encoder\.layers\.1\.self_attn"):
        tune(Half(layers=2), inputs=smooth_inputs(), kernel=SPARSE)


# Heads of their own


def test_each_head_runs_with_its_own_thresholds():
    """Against one head at a time: grouped keys, a mask and sinks that differ from head to head."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 16, 8, generator=generator) for heads in (4, 2, 2))
    mask = torch.rand(2, 4, 16, 16, generator=generator) < 0.7
    sinks = torch.randn(4, generator=generator)
    call = make_call(q, k, v, mask=mask, sinks=sinks)
    shared = {"block_q": 4, "block_k": 4}
    options = [{**shared, "topk": topk} for topk in (0.25, 1.0, 0.25, 0.5)]
    kernel = HeadKernels("layer", "sparse", options).as_kernel()
    assert kernel.approximate
    assert kernel.tally is not None
    out, _ = kernel.run(q, k, v, call)
    kept = visible = 0
    for head, topk in enumerate((0.25, 1.0, 0.25, 0.5)):
        alone = find_kernel(f"{SPARSE}&topk={topk}")
        of_head = dataclasses.replace(call, mask=mask[:, head : head + 1], sinks=sinks[head : head + 1])
        kv = slice(head // 2, head // 2 + 1)
        wanted, _ = alone.run(q[:, head : head + 1], k[:, kv], v[:, kv], of_head)
        assert torch.allclose(out[:, head : head + 1], wanted, atol=1e-6)
        assert alone.tally is not None
        count = alone.tally.take()
        kept, visible = kept + count.kept, visible + count.visible
    found = kernel.tally.take()
    assert (found.kept, found.visible) == (kept, visible)
    assert 0 < found.sparsity < 1


def test_what_the_heads_left_out_is_counted_as_one_call():
    q = torch.randn(1, 2, 32, 8, generator=torch.Generator().manual_seed(0))
    options = [{"topk": 0.5, "block_q": 8, "block_k": 8}, {"topk": 0.25, "block_q": 8, "block_k": 8}]
    kernel = HeadKernels("layer", "sparse", options).as_kernel()
    assert kernel.tally is not None
    kernel.run(q, q, q, make_call(q, q, q))
    kept = 4 * (2 + 1)  # of 4 blocks, for each of 4 blocks of queries
    assert (kernel.tally.calls, kernel.tally.last.kept, kernel.tally.last.visible) == (1, kept, 32)
    # Hidden NaN spoils the first run, and the shield's second stands in its place.
    kernel.tally.take()
    spoilt, hidden = q.clone(), torch.ones(32, dtype=torch.bool)
    spoilt[:, :, -1], hidden[-1] = torch.nan, False
    out = attention(q, spoilt, spoilt, mask=hidden, kernel=kernel)
    assert bool(out.isfinite().all())
    assert (kernel.tally.calls, kernel.tally.count) == (1, kernel.tally.last)


def test_another_number_of_heads_is_refused_when_called():
    kernel = HeadKernels("layer", "sparse", [{"topk": 0.5}] * 3).as_kernel()
    q = torch.randn(1, 4, 8, 8)
    with pytest.raises(TuningError, match="layer: tuned for 3 heads, called with 4"):
        attention(q, q, q, kernel=kernel)


# The file


def test_the_file_comes_back_as_it_was(tuned: Tuned, tmp_path: Path):
    path = tmp_path / "deep" / "tuned.yaml"
    file.save(tuned, path)
    assert file.load(path) == tuned
    document = yaml.safe_load(path.read_text())  # plain data
    assert (document["version"], document["family"], document["model"]) == (1, "Encoder", "Encoder")
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", document["weights"])
    assert document["options"] == {"block_q": 4, "block_k": 4}
    assert [len(heads) for heads in document["layers"].values()] == [4, 4]


def changed(document: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> str:
    change(document)
    return yaml.safe_dump(document)


def head(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["layers"][LAYERS[0]][0]
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=2), "version 2: must be 1"),
        (lambda d: d.pop("version"), "version None: must be 1"),
        (lambda d: d.update(extra=1), "extra: Extra inputs"),
        (lambda d: d.pop("kernel"), "kernel: Field required"),
        (lambda d: d.update(layers={}), "layers: "),
        (lambda d: d.update(layers=[1]), "layers: "),
        (lambda d: d["layers"].update({LAYERS[0]: []}), "layers.encoder.layers.0.self_attn: "),
        (lambda d: head(d).update(sparsity=1.5), "sparsity: Input should be less than or equal to 1"),
        (lambda d: head(d).update(rel_l1=float("nan")), "rel_l1: "),
        (lambda d: head(d).pop("options"), "options: Field required"),
        (lambda d: d.update(l1="much"), "l1: "),
        (lambda d: d.update(kernel="eager"), "kernel: 'eager' has no thresholds"),
        (lambda d: head(d)["options"].update(topk=7), f"layers.{LAYERS[0]}, head 0: topk = '7' must be a number from"),
        (lambda d: head(d)["options"].update(depth=3), f"layers.{LAYERS[0]}, head 0: kernel sparse has no option"),
        (lambda d: head(d)["options"].update(cdf=0.5), f"layers.{LAYERS[0]}, head 0: give either topk or cdf"),
        (lambda d: d["options"].update(block_q=0), f"layers.{LAYERS[0]}, head 0: block_q = '0' must be a whole"),
    ],
)
def test_bad_files_are_refused(tuned: Tuned, tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str):
    path = tmp_path / "tuned.yaml"
    path.write_text(changed(tuned.model_dump(mode="json"), change))
    with pytest.raises(TuningError, match=re.escape(message)) as refused:
        file.load(path)
    assert str(refused.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("just words", "must be a mapping"),
        ("", "must be a mapping"),
        ("[" * 20_000, "nested too deeply"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str, message: str):
    (tmp_path / "tuned.yaml").write_text(text)
    with pytest.raises(TuningError, match=message):
        file.load(tmp_path / "tuned.yaml")
    with pytest.raises(TuningError, match="cannot be read: No such file"):
        file.load(tmp_path / "none.yaml")


def test_options_that_the_kernel_does_not_know_are_refused(tuned: Tuned):
    model, _ = smooth_encoder()
    with pytest.raises(ValueError, match="no option 'depth'"):
        swap_tuned(model, tuned.model_copy(update={"options": {"depth": 3}}))


def test_another_model_is_refused_naming_both(tuned: Tuned):
    with pytest.raises(TuningError, match=r"tuned for Encoder \(Encoder\) with 2 layers .*; this model has 3 \("):
        swap_tuned(Encoder(layers=3), tuned)
    with pytest.raises(TuningError, match=r"with 2 layers; this model has 1, without encoder\.layers\.1\.self_attn"):
        swap_tuned(Encoder(layers=1), tuned)
    fewer = tuned.model_copy(update={"layers": {name: heads[:3] for name, heads in tuned.layers.items()}})
    model, inputs = smooth_encoder()
    with pytest.raises(TuningError, match=r"with 3 heads in encoder\.layers\.0\.self_attn; this model has 4 heads"):
        verify(model, inputs=inputs, tuned=fewer)


def test_in_place_a_refused_file_leaves_the_model_as_it_was(tuned: Tuned):
    model = Encoder(layers=3)
    before = [type(module) for module in model.modules()]
    with pytest.raises(TuningError):
        swap_tuned(model, tuned, inplace=True)
    assert [type(module) for module in model.modules()] == before


# The command


MODEL = """\
from tests.models.test_tuning import Encoder, smooth_inputs
def build(): return Encoder(layers=2), smooth_inputs(32)
def deeper(): return Encoder(layers=3), smooth_inputs(32)
"""


def test_tuned_on_the_command_line_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    Path("mine.py").write_text(MODEL)
    assert (
        main(["tune-sparse", "mine.py:build", "--verbose", "--kernel", SPARSE, "--l1", "0.03", "--pv-l1", "0.04"]) == 0
    )
    out = capsys.readouterr().out
    assert re.search(r"^1/2  encoder\.layers\.0\.self_attn: 4 heads, mean sparsity 0\.\d+", out, re.MULTILINE)
    assert "head 3: topk " in out
    assert "tuned.yaml  (harness verify mine.py:build --tuned tuned.yaml)" in out
    found = file.load("tuned.yaml")
    assert (found.l1, found.pv_l1, found.family) == (0.03, 0.04, "mine.py:build")
    for way in (["--tuned", "tuned.yaml"], ["--kernel", "sparse?tuned=tuned.yaml"]):
        assert main(["verify", "mine.py:build", *way, "--budget", "end_rel_l1=0.3"]) == 0
        shown = capsys.readouterr().out
        assert "WITHIN BUDGET  mine.py:build, kernel sparse (tuned)" in shown
        assert re.search(r"encoder\.layers\.1\.self_attn +given +ok +0\.\d+ +0\.\d+ +0\.0[0-4]", shown)
    assert main(["tune-sparse", "mine.py:build"]) == 2
    assert "tuned.yaml exists already" in capsys.readouterr().err
    assert main(["verify", "mine.py:deeper", "--tuned", "tuned.yaml", "--out", "other"]) == 2
    assert "tuned for mine.py:build (Encoder) with 2 layers" in capsys.readouterr().err
    assert not Path("other").exists()


def test_a_bad_option_in_the_file_exits_2(
    tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(changed(tuned.model_dump(mode="json"), lambda d: head(d)["options"].update(topk=7)))
    assert main(["verify", "llama", "--tuned", "bad.yaml"]) == 2
    assert f"bad.yaml: layers.{LAYERS[0]}, head 0: topk = '7'" in capsys.readouterr().err
    bad = tuned.model_copy(update={"kernel": "eager"})  # from no file
    model, inputs = smooth_encoder()
    with pytest.raises(TuningError, match="kernel: 'eager' has no thresholds"):
        verify(model, inputs=inputs, tuned=bad)


def test_an_interrupt_says_that_nothing_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.models.tuning.search.tune", interrupted)
    assert main(["tune-sparse", "llama"]) == 130
    assert capsys.readouterr().err == "harness: interrupted; tuned.yaml was not written: only a whole model is\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "llama", "--kernel", "sparse?tuned=none.yaml"], "none.yaml: cannot be read"),
        (["verify", "llama", "--kernel", "sparse?tuned=none.yaml&pv=3"], "leave out pv"),
        (["verify", "llama", "--kernel", "sparse", "--tuned", "none.yaml"], "--tuned goes without"),
        (["verify", "--all", "--tuned", "none.yaml"], "--tuned goes without"),
        (["tune-sparse", "llama", "--kernel", "tiled"], "has no thresholds to tune"),
        (["tune-sparse", "nobody"], "unknown family 'nobody'"),
    ],
)
def test_bad_input_exits_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
