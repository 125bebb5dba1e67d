"""`harness verify` with an approximate kernel: the swap by equality, the kernel by its budget, layer by layer."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harness
from harness.__main__ import main
from harness.errors import BadInput
from harness.kernels.call import AttentionCall, BlockCount, Kernel, Tally
from harness.kernels.eager import eager
from harness.kernels.front import find_kernel
from harness.models.families.family import Batch, Family, find_family
from harness.models.tuning.file import Head, Options, Tuned, fingerprint
from harness.models.verify import Verification, verify
from harness.models.verify.metering import Meter
from harness.swaps import swap
from tests import verify_models
from tests.models.test_verify import failed, only_plain, scaled

SMALL = "block_q=4&block_k=4"
GENEROUS = {"rel_l1": 10.0, "end_rel_l1": 10.0}
A_QUARTER = BlockCount(kept=3, visible=4, total=4)
SWAPPED = {"llama": 2, "cogvideox": 2, "flux": 4, "hunyuandit": 8, "wan": 4}


def skipping(run: Any, count: BlockCount = A_QUARTER) -> Kernel:
    """A kernel that says it is approximate, and what it left out."""
    tally = Tally()

    def counted(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        tally.add(count)
        return run(q, k, v, call)

    return Kernel("said to skip", counted, approximate=True, tally=tally)


def encoder(**options: Any) -> Verification:
    return verify(verify_models.Encoder(), inputs=verify_models.noise(2, 16, 6), **options)


def without_generation(name: str) -> Family:
    return dataclasses.replace(find_family(name), generate=None)


@pytest.mark.parametrize("name", SWAPPED)
def test_every_layer_of_a_family_has_its_sparsity_and_error(name: str):
    found = verify(name, kernel=f"sparse?topk=0.7&{SMALL}", budget=GENEROUS)
    assert found.passed, found.steps
    assert found.verdict == "within budget"
    assert found.swapped == SWAPPED[name]
    layers = found.layers[found.layers["kind"] == "layer"]
    assert layers.groupby("batch")["layer"].nunique().tolist() == [SWAPPED[name]] * layers["batch"].nunique()
    for column in ("rel_l1", "cosine", "rmse", "max_abs", "sparsity", "skipped_blocks", "flow_rel_l1"):
        assert layers[column].notna().all(), column
    assert layers["err_ratio"].between(0, 2).all()  # with dense attention in its place each layer is equal
    assert found.sparsity is not None
    assert 0.05 < found.sparsity < 0.9
    assert (layers.loc[layers["skipped_blocks"] > 0, "rel_l1"] > 1e-4).all()
    ends = found.layers[found.layers["kind"] == "end"]
    assert (ends["rel_l1"] > 1e-4).all()
    assert found.row()["worst_layer_rel_l1"] == layers["rel_l1"].max()
    generated = found.step("generate").message
    if name == "llama":
        assert re.search(r"tokens equal", generated)
    else:
        assert re.search(r"latents .* L1 [\d.e-]+, cosine 0\.\d+, RMSE \S+, max \S+$", generated)
        assert found.row()["generated_rel_l1"] > 1e-4


def test_too_sparse_fails_with_the_layer_named():
    found = encoder(kernel=f"sparse?topk=0.3&{SMALL}")
    message = failed(found, "forward")
    layer = re.escape("encoder.layers.0.self_attn")
    assert re.match(rf"{layer}: relative L1 0\.\d+ is beyond 0\.07 at sparsity 0\.75 \(given batch\); 3 more", message)
    assert found.verdict == "beyond budget"


def test_the_one_layer_that_is_too_sparse_is_named():
    def heads(topk: float) -> tuple[Head, ...]:
        return (Head(options={"topk": topk}, rel_l1=0.0, sparsity=0.0),) * 4

    names = [f"encoder.layers.{i}.self_attn" for i in range(3)]
    layers = {names[0]: heads(1.0), names[1]: heads(0.3), names[2]: heads(1.0)}
    options: Options = {"block_q": 4, "block_k": 4}
    tuned = Tuned(family="e", model="E", weights="", kernel="sparse", options=options, l1=0.07, layers=layers)
    found = encoder(tuned=tuned)
    assert failed(found, "forward").startswith(f"{names[1]}: relative L1 ")
    rows: Any = found.layers.set_index("layer")
    assert list(rows.loc[names, "status"]) == ["ok", "mismatch", "ok"]
    assert rows.loc[names[2], "rel_l1"] < 1e-5  # its own error; what reaches it is not
    assert rows.loc[names[2], "flow_rel_l1"] > 0.01
    assert list(rows.loc[names, "skipped_blocks"] > 0) == [False, True, False]


def test_the_end_has_a_limit_of_its_own():
    found = encoder(kernel=f"sparse?topk=0.7&{SMALL}", budget={"rel_l1": 10.0, "end_rel_l1": 1e-4})
    assert failed(found, "forward").startswith("the model's end, though each layer is within its limit: relative L1 ")


@pytest.mark.parametrize("name", ["llama", "wan"])
def test_a_kernel_that_keeps_all_is_judged_by_equality(name: str):
    found = verify(only_plain(find_family(name)), kernel=f"sparse?topk=1&{SMALL}", budget={"rel_l1": 0.0})
    assert found.verdict == "equal"
    assert not found.approximate
    assert found.layers["rel_l1"].isna().all()
    assert found.layers["err_ratio"].between(0, 2, inclusive="right").all()


def test_a_kernel_that_skipped_nothing_must_be_equal_whatever_the_budget():
    def off(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return eager(q, k, v, dataclasses.replace(call, scale=call.scale * 1.01))

    kept = skipping(off, BlockCount(4, 4, 4))
    found = encoder(kernel=kept, budget=GENEROUS)
    assert failed(found, "forward").startswith("encoder.layers.0.self_attn departs first: error ")
    assert found.verdict == "not equal"
    assert encoder(kernel=skipping(eager, BlockCount(4, 4, 4))).verdict == "equal"
    # The same kernel within the budget where it says that it left something out: products with values count as well.
    for count in (A_QUARTER, BlockCount(4, 4, 4, pv_skipped=1)):
        assert encoder(kernel=skipping(off, count)).verdict == "within budget"


def test_a_layer_that_skipped_nothing_must_be_equal_though_others_skip():
    """The error of 1.06 would be within the budget of a layer that left something out."""
    factor = [1.0]

    def of_layer(number: int, count: BlockCount) -> Any:
        def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
            out, weights = eager(q, k, v, call)
            return out * (factor[0] if number == 0 else 1.0), weights

        return skipping(run, count)

    def give_layers_their_own(model: nn.Module) -> None:
        for number, meter in enumerate(seen):
            meter.kernel = of_layer(number, BlockCount(4, 4, 4) if number == 0 else A_QUARTER)

    seen: list[Meter] = []
    with pytest.MonkeyPatch.context() as patch:
        made = Meter.__init__

        def noted(self: Meter, kernel: Kernel) -> None:
            made(self, kernel)
            seen.append(self)

        patch.setattr(Meter, "__init__", noted)
        for factor[0], verdict in ((1.0, "within budget"), (1.06, "beyond budget")):
            seen.clear()
            found = encoder(kernel=skipping(eager), tamper=give_layers_their_own)
            assert len(seen) == 3
            assert found.verdict == verdict, found.steps
    message = failed(found, "forward")
    wanted = "encoder.layers.0.self_attn: a call that skipped no block must equal dense attention: error "
    assert message.startswith(wanted)
    assert list(found.layers["status"]) == ["mismatch", "ok", "ok", "ok"]


def tuned_encoder(topk: float = 0.7, **values: Any) -> Tuned:
    heads: tuple[Head, ...] = (Head(options={"topk": topk}, rel_l1=0.0, sparsity=0.0),) * 4
    layers = {f"encoder.layers.{i}.self_attn": heads for i in range(3)}
    given: dict[str, Any] = {"weights": fingerprint(verify_models.Encoder()), "l1": 0.07}
    options: Options = {"block_q": 4, "block_k": 4}
    return Tuned(family="e", model="E", kernel="sparse", options=options, layers=layers, **(given | values))


def test_a_tuned_file_does_not_set_its_own_verdict():
    lenient = {"end_rel_l1": 10.0}
    message = failed(encoder(tuned=tuned_encoder(0.3, l1=1e6), budget=lenient), "forward")
    assert "is beyond 0.08 " in message
    assert "limits: layer 0.08 (the tuned file's), end 10 (given); tuned for 1e+06, which is looser" in message
    allowed = encoder(tuned=tuned_encoder(0.3, l1=0.9), budget=lenient | {"rel_l1": 0.9})
    assert allowed.step("forward").message.endswith("limits: layer 0.9 (given), end 10 (given)")
    assert allowed.passed
    usual = encoder(tuned=tuned_encoder(0.3, l1=0.05, pv_l1=0.06), budget=lenient)
    assert "limits: layer 0.07 (default), end 10 (given)" in failed(usual, "forward")


def test_thresholds_of_other_weights_are_told():
    generous = {"budget": GENEROUS}
    ours = encoder(tuned=tuned_encoder(), **generous).step("swap").message
    theirs = encoder(tuned=tuned_encoder(weights="sha256:0000"), **generous).step("swap").message
    assert "warning" not in ours
    assert re.search(r"; warning: tuned on other weights \(sha256 0000, this model's [0-9a-f]{8}\)$", theirs)


def test_default_blocks_are_longer_than_a_tiny_model_and_that_is_told():
    found = encoder(kernel="sparse")
    assert found.verdict == "equal"
    assert found.step("forward").message.endswith("no block skipped, so judged as an exact kernel")


def test_a_wrong_swap_cannot_hide_in_the_budget():
    layer = "encoder.layers.1.self_attn"
    found = encoder(kernel=f"sparse?topk=0.9&{SMALL}", budget=GENEROUS, tamper=scaled(layer))
    message = failed(found, "forward")
    assert message.startswith("the swap itself is wrong, seen with dense attention in the kernel's place: ")
    assert f"{layer} departs first" in message


# HunyuanDiT replaces hidden text by a learned embedding, and Wan hides none: no mask reaches their attention.
@pytest.mark.parametrize("name", ["flux", "cogvideox"])
def test_a_mask_that_the_kernel_ignores_is_found(name: str):
    def unmasked(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return eager(q, k, v, dataclasses.replace(call, mask=None))

    found = verify(without_generation(name), kernel=skipping(unmasked))
    assert re.search(r": relative L1 \S+ is beyond 0\.07 .*\(masked text batch\)", failed(found, "forward"))
    assert set(found.layers.loc[found.layers["batch"] == "plain", "status"]) == {"ok"}


def test_a_mask_ignored_in_decode_alone_is_found():
    def unmasked(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return eager(
            q, k, v, dataclasses.replace(call, mask=None) if call.mask is not None and q.shape[2] == 1 else call
        )

    llama = without_generation("llama")

    def batches(model: nn.Module, generator: torch.Generator) -> dict[str, Batch]:
        padded = llama.batches(model, generator)["left-padded"]

        def run(model: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
            past = model(
                input_ids=input_ids[:, :-1], attention_mask=attention_mask[:, :-1], position_ids=position_ids[:, :-1]
            ).past_key_values
            return model(
                input_ids=input_ids[:, -1:],
                attention_mask=attention_mask,
                position_ids=position_ids[:, -1:],
                past_key_values=past,
            )

        return {"padded decode": Batch(padded.kwargs, run=run)}

    family = dataclasses.replace(llama, batches=batches)
    assert "(padded decode batch)" in failed(verify(family, kernel=skipping(unmasked)), "forward")
    assert verify(family, kernel=skipping(eager)).passed


def test_what_is_hidden_and_not_finite_is_looked_at_when_it_is_cleaned():
    q, k, v = torch.randn(3, 1, 2, 32, 8, generator=torch.Generator().manual_seed(0))
    hidden = torch.ones(32, dtype=torch.bool)
    k[:, :, -1], hidden[-1] = torch.nan, False
    for options in ("topk=0.5", "topk=0.99"):  # the latter skips no block of these
        meter = Meter(find_kernel(f"sparse?{options}&block_q=8&block_k=8"))
        meter.measuring = True
        harness.attention(q, k, v, mask=hidden, kernel=meter.as_kernel())
        assert math.isfinite(meter.deviation().rel_l1)
        assert meter.exact is None or meter.exact.status == "ok"
        assert meter.wrong is None


def test_an_engine_that_is_not_attention_over_its_blocks_is_found_within_any_budget():
    kernel = find_kernel("sparse?topk=0.5&block_q=8&block_k=8")

    def off(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        out, weights = kernel.run(q, k, v, call)
        return out * 1.001, weights

    meter = Meter(dataclasses.replace(kernel, run=off))
    meter.measuring = True
    q, k, v = torch.randn(3, 1, 2, 32, 8, generator=torch.Generator().manual_seed(0))
    harness.attention(q, k, v, kernel=meter.as_kernel())
    assert meter.wrong is not None and "over the blocks that it kept" in meter.wrong


def test_a_nan_is_within_no_budget():
    def spoilt(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        out, weights = eager(q, k, v, call)
        out[0, 0, 0, 0] = float("nan")
        return out, weights

    found = encoder(kernel=skipping(spoilt), budget=GENEROUS)
    assert failed(found, "forward").startswith("encoder.layers.0.self_attn: relative L1 nan is beyond 10")


def test_the_numbers_are_those_of_torch_and_numpy():
    sparse = find_kernel(f"sparse?topk=0.6&{SMALL}")
    seen: list[tuple[Tensor, ...]] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        out, _ = sparse.run(q, k, v, call)
        seen.append((q, k, v, out))
        return out, None

    found = encoder(kernel=dataclasses.replace(sparse, run=noted), budget=GENEROUS)
    rows = found.layers[found.layers["kind"] == "layer"]
    assert len(rows) == 3
    for (q, k, v, out), row in zip(seen, rows.to_dict("records"), strict=False):
        golden = F.scaled_dot_product_attention(q.double(), k.double(), v.double()).numpy()
        error = out.double().numpy() - golden
        c, g = out.double().numpy().ravel(), golden.ravel()
        assert row["rel_l1"] == pytest.approx(np.abs(error).sum() / np.abs(golden).sum(), rel=1e-9)
        assert row["cosine"] == pytest.approx(c @ g / np.linalg.norm(c) / np.linalg.norm(g), rel=1e-9)
        assert row["rmse"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-9)
        assert row["max_abs"] == pytest.approx(np.abs(error).max(), rel=1e-9)
        assert row["sparsity"] == row["skipped_blocks"] / (2 * 4 * 4 * 4)  # (B, H) of 4 x 4 blocks
    # The end, against the model itself in float64.
    model, x = verify_models.Encoder().eval(), verify_models.noise(2, 16, 6)
    swapped, _ = swap(model, kernel=sparse)
    with torch.no_grad():
        golden, out = model.double()(x.double()).numpy(), swapped(x).double().numpy()
    (end,) = found.layers.loc[found.layers["kind"] == "end", "rel_l1"]
    assert end == pytest.approx(np.abs(out - golden).sum() / np.abs(golden).sum(), rel=1e-6)


def test_queries_that_are_padding_do_not_count():
    q = torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(0))

    def off_at_the_end(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        out, weights = eager(q, k, v, call)
        out[1, :, 3] += 1.0
        return out, weights

    real = torch.ones(2, 4, dtype=torch.bool)
    for last, off in ((True, True), (False, False)):
        real[1, 3] = last
        meter = Meter(skipping(off_at_the_end))
        meter.measuring, meter.real = True, real
        meter.run(q, q, q, AttentionCall(scale=1.0))
        assert (meter.deviation().rel_l1 > 0.01) is off
        assert meter.deviation().sparsity == 0.25


def test_an_approximate_kernel_must_count():
    kernel = Kernel("uncounted", eager, approximate=True)
    assert failed(encoder(kernel=kernel), "forward") == "uncounted is approximate and does not count what it skips"


# Generation


def test_the_first_token_that_differs_is_reported_and_no_failure():
    name = f"sparse?topk=0.4&{SMALL}"
    found = verify("llama", kernel=name, budget=GENEROUS)
    step = found.step("generate")
    assert step.status == "passed"
    told = re.match(
        r"(\d+) of 24 tokens equal; the first that differs: sequence (\d), step (\d+): token (\d+) instead of (\d+)",
        step.message,
    )
    assert told, step.message
    family = find_family("llama")
    assert family.generate is not None
    model = family.build({})
    swapped, _ = swap(model, kernel=name)
    ours, theirs = (family.generate(m, torch.Generator().manual_seed(0)) for m in (swapped, model))
    same, sequence, place, mine, wanted = map(int, told.groups())
    assert same == int((ours == theirs).sum())
    assert torch.equal(ours[:, :place], theirs[:, :place])
    assert (int(ours[sequence, place]), int(theirs[sequence, place])) == (mine, wanted)
    assert mine != wanted
    assert found.first_difference == place


def test_tokens_of_an_exact_kernel_must_be_equal():
    """A kernel that calls itself approximate and skips nothing while generating is no exception."""

    def off(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return eager(q, k, v, dataclasses.replace(call, scale=-call.scale))

    found = verify("llama", kernel=skipping(off, BlockCount(4, 4, 4)), budget=GENEROUS)
    assert found.step("generate").status == "failed"
    assert found.step("generate").message.startswith("sequence ")


# Command line


def test_the_command_line_shows_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    model = f"{Path(verify_models.__file__)}:two_batches"
    kernel = "sparse?topk=0.8&block_q=2&block_k=2"
    assert main(["verify", model, "--kernel", kernel, "--out", "strict", "--budget", "rel_l1=0.001"]) == 1
    assert "BEYOND BUDGET" in capsys.readouterr().out
    budget = ["--budget", "rel_l1=2", "--budget", "end_rel_l1=2"]
    assert main(["verify", model, "--kernel", kernel, "--out", "here", *budget]) == 0
    shown = capsys.readouterr().out
    assert "WITHIN BUDGET" in shown
    assert re.search(r"tensor +batch +status +sparsity +no PV +rel L1 +cosine +RMSE +max +dense/N", shown)
    lines = [line.split() for line in shown.splitlines() if line.startswith(("encoder.layers.", "(end)"))]
    assert [line[0] for line in lines] == [*(f"encoder.layers.{i}.self_attn" for i in range(3)), "(end)"]
    layers = pd.read_csv("here/layers.csv")
    worst = layers[layers["layer"] == "encoder.layers.1.self_attn"]["rel_l1"].max()
    assert f"{worst:.4f}" in lines[1]
    table = pd.read_csv("here/verify.csv")
    assert table["verdict"].item() == "within budget"
    assert table["sparsity"].item() == pytest.approx(
        layers["skipped_blocks"].sum() / (layers["skipped_blocks"] / layers["sparsity"]).sum(), rel=0.2
    )
    markdown = Path("here/verify.md").read_text()
    assert markdown.startswith("# verify: WITHIN BUDGET\n")
    assert "| encoder.layers.2.self\\_attn |" in markdown


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"l1": 0.1}, "budget 'l1' is unknown; known: rel_l1, end_rel_l1"),
        ({"rel_l1": -1}, "budget rel_l1 = -1: must be a number, 0 or more"),
        ({"rel_l1": float("nan")}, "budget rel_l1 = nan: must be a number"),
        ({"rel_l1": True}, "budget rel_l1 = True: must be a number"),
        ({"end_rel_l1": "small"}, "budget end_rel_l1 = 'small': must be a number"),
    ],
)
def test_bad_budgets_are_refused(budget: dict[str, Any], message: str):
    with pytest.raises(BadInput, match=re.escape(message)):
        encoder(kernel="sparse", budget=budget)
