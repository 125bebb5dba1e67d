"""Approximate kernels in a grid: metrics against numpy, limits that can fail, and the equality rule where it holds."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from harness import store
from harness.case import Case
from harness.cell.approximate import Metrics
from harness.cell.large import LATEST
from harness.cell.measure import measure
from harness.cell.regimes import make_inputs, video_positions
from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.front import find_kernel
from harness.record import COLUMNS, Record
from harness.report.sparsity import LEGEND, legend, sparsity_table
from harness.suite.config import ConfigError, load_suite
from harness.suite.schema import REGIMES, STRUCTURES, Accuracy, Timing
from tests.support import ROOT

OFF = Timing(enabled=False)
BRIEF = Timing(budget_s=0.001, min_blocks=3, max_blocks=3)
WIDE = Accuracy(rel_l1=10.0)
NEW = ("sparsity", "rel_l1", "cosine", "rmse", "skipped_blocks")
GRID = {"variant": "mha", "embed_dim": 32, "heads": 2, "seq_len": 48}
BLOCKS = "block_q=8&block_k=4"


def case(kernel: str, **axes: Any) -> Case:
    defaults: dict[str, Any] = {
        "variant": "mha", "embed_dim": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "seq_len": 48, "batch": 2,
        "mask": "causal", "dtype": "float32", "phase": "prefill",
    }  # fmt: skip
    return Case(kernel=kernel, **(defaults | axes))


def record(name: str, *, kernel: Kernel | None = None, accuracy: Accuracy | None = WIDE, timing: Timing = OFF,
           regimes: tuple[str, ...] = ("plain",), **axes: Any) -> Record:  # fmt: skip
    found = find_kernel(name) if kernel is None else kernel
    return measure(case(name, **axes), found, seed=0, regimes=regimes, timing=timing, accuracy=accuracy)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_are_numpy_s():
    rng = np.random.default_rng(0)
    c, g = rng.normal(size=(2, 3, 5)), rng.normal(size=(2, 3, 5))
    found = Metrics.of(torch.from_numpy(c), torch.from_numpy(g))
    flat_c, flat_g = c.ravel(), g.ravel()
    expected = Metrics(
        rel_l1=np.abs(c - g).sum() / np.abs(g).sum(),
        cosine=flat_c @ flat_g / np.linalg.norm(flat_c) / np.linalg.norm(flat_g),
        rmse=math.sqrt(np.mean((c - g) ** 2)),
        max_abs=np.abs(c - g).max(),
    )
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected), rel=1e-12)


def test_equal_zeros_are_equal_and_other_zeros_are_not():
    zeros = torch.zeros(4)
    assert Metrics.of(zeros, zeros) == Metrics(rel_l1=0.0, cosine=1.0, rmse=0.0, max_abs=0.0)
    assert Metrics.of(torch.ones(4), zeros).rel_l1 == math.inf
    with pytest.raises(ValueError, match="one shape"):
        Metrics.of(torch.ones(4), torch.ones(5))


@pytest.mark.parametrize(
    "limits", [Accuracy(**one) for one in ({"rel_l1": 9}, {"cosine": 0}, {"rmse": 9}, {"max_abs": 9})]
)
def test_nan_is_within_no_limit(limits):
    found = Metrics.of(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 1.0]))
    assert len(found.failures(limits)) == 1
    assert Metrics.of(torch.tensor([1.0, 1.1]), torch.tensor([1.0, 1.0])).failures(limits) == []


@pytest.mark.parametrize(("limits", "named"), [
    (Accuracy(rel_l1=0.2), "rel_l1 0.25, must be at most 0.2"),
    (Accuracy(cosine=0.999), "cosine 0.949, must be at least"),
    (Accuracy(rmse=0.3), "rmse 0.354, must be at most"), (Accuracy(max_abs=0.4), "max_abs 0.5, must be at most 0.4"),
])  # fmt: skip
def test_a_limit_names_its_metric(limits, named):
    found = Metrics.of(torch.tensor([1.0, 0.5]), torch.tensor([1.0, 1.0]))
    assert [words.startswith(named) for words in found.failures(limits)] == [True]


# ---- verdicts --------------------------------------------------------------------------------------------------------


def test_an_approximate_kernel_is_judged_by_the_limits():
    found = record(f"sparse?topk=0.3&{BLOCKS}")
    assert (found.status, found.error) == ("ok", None)
    assert found.sparsity is not None and found.skipped_blocks is not None and found.rel_l1 is not None
    assert 0 < found.sparsity < 1 and found.skipped_blocks > 0 and 0 < found.rel_l1 < 10 and found.calls is not None
    assert found.err_ratio is None and found.calls > 0
    tight = record(f"sparse?topk=0.3&{BLOCKS}", accuracy=Accuracy(rel_l1=found.rel_l1 / 2, cosine=0.0))
    assert tight.status == "mismatch" and tight.error is not None
    assert "out in regime plain: rel_l1" in tight.error and "cosine" not in tight.error


def test_in_an_exact_suite_it_fails_and_is_told_of_the_other_kind():
    found = record(f"sparse?topk=0.3&{BLOCKS}", accuracy=None)
    assert found.status == "mismatch" and found.error is not None
    assert "equivalence: approximate" in found.error
    assert found.rel_l1 is None


@pytest.mark.parametrize("kernel", ["eager", "tiled", f"sparse?topk=1&{BLOCKS}", f"sparse_window?window=99&{BLOCKS}"])
def test_what_leaves_nothing_out_is_judged_by_the_equality_rule(kernel):
    found = record(kernel, accuracy=Accuracy(rel_l1=0.0))
    assert (found.status, found.error) == ("ok", None) and found.err_ratio is not None
    assert found.err_ratio <= 2
    window = kernel.startswith("sparse_window")
    assert (found.sparsity, found.skipped_blocks) == ((0.0, 0) if window else (None, None))


def spoilt(name: str) -> Kernel:
    """One that says it left nothing out, and is wrong by a hundredth."""
    right = find_kernel(name)

    def run(q, k, v, call):
        out, weights = right.run(q, k, v, call)
        return out * 1.01, weights

    return dataclasses.replace(right, run=run)


def test_an_error_at_sparsity_0_is_a_mismatch_however_wide_the_limits():
    name = f"sparse_window?window=99&{BLOCKS}"
    assert record(name, kernel=spoilt(name), accuracy=WIDE).status == "mismatch"


def test_what_is_kept_is_right_however_wide_the_limits():
    name = f"sparse?topk=0.3&{BLOCKS}"
    found = record(name, kernel=spoilt(name), accuracy=WIDE)
    assert found.status == "mismatch" and found.error is not None
    assert "not attention over the blocks that it kept" in found.error


@pytest.mark.parametrize("kernel", ["sparse?topk=0.5", "sparse?cdf=0.9&sim=0.3"])
@pytest.mark.parametrize("axes", [{}, {"mask": "padding"}, {"phase": "decode"}, {"dtype": "bfloat16"},
                                  {"dtype": "float64"}, {"kv_heads": 1, "variant": "gqa"}])  # fmt: skip
def test_right_kernels_are_right_in_what_they_keep(kernel, axes):
    found = record(f"{kernel}&{BLOCKS}", regimes=(*REGIMES, *STRUCTURES), accuracy=Accuracy(rel_l1=1e6), **axes)
    assert (found.status, found.error) == ("ok", None)
    assert found.skipped_blocks is not None and any(entry["skipped_blocks"] for entry in found.approximation)


def sees_a_key_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionCall, "reach", property(lambda call: (call.left, 1 if call.causal else call.right)))


def test_an_engine_that_sees_the_future_is_caught_in_every_regime(monkeypatch):
    """Also in one where nothing was skipped, beside another where something was."""
    name, regimes = f"sparse?cdf=0.9&sim=0.6&{BLOCKS}", ("plain", "locally_smooth")
    right = record(name, regimes=regimes)
    assert right.status == "ok"
    assert [entry["skipped_blocks"] > 0 for entry in right.approximation] == [False, True]
    sees_a_key_too_much(monkeypatch)
    found = record(name, regimes=regimes)
    assert found.status == "mismatch" and found.error is not None
    assert "out in regime plain: the kernel is not attention although nothing was skipped" in found.error
    assert "out in regime locally_smooth: the kernel is not attention over the blocks that it kept" in found.error


def test_nan_in_a_sparse_output_is_a_mismatch():
    name = f"sparse?topk=0.3&{BLOCKS}"
    right = find_kernel(name)
    wrong = dataclasses.replace(right, run=lambda q, k, v, call: (right.run(q, k, v, call)[0] * math.nan, None))
    assert record(name, kernel=wrong).status == "mismatch"


def test_padding_poisoned_with_nan_does_not_leak():
    found = record(f"sparse?topk=0.3&{BLOCKS}", mask="padding", regimes=("plain", "poison"))
    assert found.status == "ok"
    assert [entry["regime"] for entry in found.approximation] == ["plain", "poison"]


def test_training_is_unsupported_and_decoding_is_not():
    assert record(f"sparse?topk=0.3&{BLOCKS}", phase="train").status == "unsupported"
    assert record(f"sparse?topk=0.3&{BLOCKS}", phase="decode").status == "ok"


def test_columns_are_those_of_the_worst_regime():
    found = record(f"sparse?topk=0.3&{BLOCKS}", regimes=("plain", "peaked", "locally_smooth"), timing=BRIEF)
    worst = max(found.approximation, key=lambda entry: entry["rel_l1"])
    assert found.worst_regime == worst["regime"]
    assert [getattr(found, name) for name in NEW] == [worst[name] for name in NEW]
    assert all(e["dense_ratio_lo"] <= e["dense_ratio"] <= e["dense_ratio_hi"] for e in found.approximation)
    assert {"candidate", "reference", "dense"} == set(found.samples_s)
    assert found.latency_ms == pytest.approx(worst["latency_ms"])


# ---- config, store, report -------------------------------------------------------------------------------------------


def suite(**keys: Any) -> Any:
    return load_suite({"name": "x", "grid": {**GRID, "kernel": keys.pop("kernel", "sparse?topk=0.5")}, **keys})


def test_a_config_declares_the_limits():
    assert suite().accuracy is None
    found = suite(equivalence="approximate", accuracy={"rel_l1": 0.07, "cosine": 0.99})
    assert found.accuracy == Accuracy(rel_l1=0.07, cosine=0.99)
    assert found.cases[0].case_id.endswith("-sparse?topk=0.5")


@pytest.mark.parametrize(("keys", "said"), [
    ({"equivalence": "approximate"}, "accuracy: required with equivalence: approximate"),
    ({"equivalence": "approximate", "accuracy": {}}, "accuracy: required"),
    ({"accuracy": {"rel_l1": 0.1}}, "only with equivalence: approximate"),
    ({"equivalence": "approximate", "accuracy": {"rel_l2": 0.1}}, "unknown key; did you mean 'rel_l1'?"),
    ({"equivalence": "approximate", "accuracy": {"cosine": 1.5}}, "must be a number from 0 to 1"),
    ({"equivalence": "approximate", "accuracy": {"rel_l1": math.nan}}, "must be a number from 0"),
    ({"equivalence": "nearly"}, "unknown equivalence"),
    ({"kernel": "sparse?topk=7"}, "topk = '7' must be a number from 0 to 1"),
    ({"kernel": "sparse?top=1"}, "no option 'top'"),
    ({"kernel": "sparsely?topk=1"}, "unknown kernel"),
    ({"regimes": ["smooth"]}, "unknown regime"),
])  # fmt: skip
def test_bad_configs_are_refused(keys, said):
    with pytest.raises(ConfigError) as refusal:
        suite(**keys)
    assert said in str(refusal.value)


def test_missing_limits_are_reported_at_the_line_that_asks_for_them(tmp_path):
    path = tmp_path / "nolimits.yaml"
    grid = "grid: {variant: mha, embed_dim: 32, heads: 2, seq_len: 48}\n"
    path.write_text(f"name: x\n{grid}\nequivalence: approximate\n")
    with pytest.raises(ConfigError) as refusal:
        load_suite(path)
    assert (refusal.value.line, refusal.value.key) == (4, "accuracy")
    path.write_text(f"name: x\nequivalence: approximate\n{grid}accuracy: {{}}\n")
    with pytest.raises(ConfigError) as refusal:
        load_suite(path)
    assert refusal.value.line == 4


def test_the_legend_tells_of_the_columns_that_are_there():
    timed, not_timed = (record(f"sparse?topk=0.3&{BLOCKS}", timing=timing) for timing in (BRIEF, OFF))
    assert legend(sparsity_table([timed])) == LEGEND
    assert not any("x dense" in line for line in legend(sparsity_table([not_timed])))


def test_the_study_s_config_loads():
    found = load_suite(ROOT / "configs" / "sparse.yaml")
    assert found.accuracy is not None
    assert {4096} <= {case.seq_len for case in found.cases}
    assert {"none", "causal"} <= {case.mask for case in found.cases if case.kernel == "sparse?topk=1"}


def test_the_columns_are_stored_and_shown(tmp_path):
    sparse = record(f"sparse?topk=0.3&{BLOCKS}", regimes=("plain", "text_like"), timing=BRIEF)
    exact = record("tiled")
    assert set(NEW) <= set(COLUMNS) and "approximation" not in COLUMNS
    frame = store.write_tables(tmp_path, [sparse, exact])
    assert frame.loc[0, "rel_l1"] == sparse.rel_l1 and frame.loc[1, list(NEW)].isna().all()
    again = store.records.loads(store.records.dumps(sparse).rstrip(b"\n"), "here")
    assert again == sparse
    table = sparsity_table([sparse, exact])
    shown = {column.title: [column.cell(row) for row in table.rows] for column in table.columns}
    assert shown["inputs"] == ["plain", "text_like"]
    assert shown["rel L1"] == [f"{entry['rel_l1']:.3f}" for entry in sparse.approximation]
    assert not sparsity_table([exact]).rows


# ---- structures of the input -----------------------------------------------------------------------------------------


def drawn(regime: str, seq_len: int = 512) -> torch.Tensor:
    inputs = make_inputs(case("tiled", seq_len=seq_len), regime, torch.Generator().manual_seed(0), poison=None)
    assert inputs is not None
    return inputs.x


def neighbours(x: torch.Tensor) -> float:
    return float(torch.cosine_similarity(x[:, 1:], x[:, :-1], dim=-1).mean())


def test_structures_are_no_default():
    assert not set(STRUCTURES) & set(REGIMES)
    assert REGIMES == ("plain", "peaked", "offset", "tiny", "wide", "poison")


def test_neighbours_are_alike_where_they_should_be():
    assert abs(neighbours(drawn("plain"))) < 0.1
    assert neighbours(drawn("locally_smooth")) > 0.9
    assert 0.8 < neighbours(drawn("text_like")) < 0.95
    norms = drawn("text_like").norm(dim=-1)
    assert float(norms.max() / norms.median()) > 1.5


def test_a_run_of_video_tokens_is_a_box():
    at = video_positions(4096)
    assert len(at.unique(dim=0)) == 4096
    assert float(at.max()) == 15
    assert (at[64:128].amax(0) - at[64:128].amin(0)).tolist() == [3, 3, 3]


@pytest.mark.parametrize("kernels", [(f"sparse?topk=1&{BLOCKS}", "eager"), ("eager", f"sparse?topk=1&{BLOCKS}")])
def test_kernels_of_one_cell_are_judged_alike_in_any_order(kernels: tuple[str, str]) -> None:
    """One whose weights are compared, and one that gives none: the reference is asked for as much as each needs."""
    LATEST.forget()
    beside = [record(kernel, accuracy=None) for kernel in kernels]
    LATEST.forget()
    alone = record(kernels[1], accuracy=None)
    assert [(each.status, each.error) for each in beside] == [("ok", None)] * 2
    assert beside[1].equivalence == alone.equivalence
