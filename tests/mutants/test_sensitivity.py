"""The study of what the comparison sees: each fate of a saboteur, the scores, the thresholds, the command."""

import csv
import dataclasses
import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from harness import store
from harness.__main__ import main
from harness.case import Case
from harness.cell.build import Pair
from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.eager import eager
from harness.mutants import result as table
from harness.mutants import run as run_module
from harness.mutants.result import KILLED, CellResult, SaboteurFinding, Study, Threshold
from harness.mutants.run import run
from harness.mutants.saboteurs.saboteur import Saboteur
from harness.mutants.study import ERRORS, StudiedCell, scale_off_by, smallest_seen, study_cell, threshold, try_saboteur
from harness.registry import Registry, UnknownName
from harness.report.sensitivity import sensitivity_markdown
from harness.suite.config import load_suite

CONFIG: dict[str, Any] = {
    "name": "tiny",
    "regimes": ["plain", "peaked", "poison"],
    "grid": {
        "variant": ["gqa", "mla"],
        "embed_dim": 32,
        "heads": 4,
        "kv_heads": 2,
        "seq_len": 12,
        "mask": ["none", "causal"],
        "phase": ["prefill", "decode"],
    },
    "exclude": [{"mask": "none", "phase": "decode"}],
}
CASES = load_suite(CONFIG, kernels=["eager"]).cases
Result = tuple[Tensor, Tensor | None]


def kernel(name: str, function: Any) -> Any:
    return lambda: Kernel(name, function, gives_weights=True, origin="saboteur")


def double_scale(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    return eager(q, k, v, dataclasses.replace(call, scale=2 * call.scale))


def raises(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    raise RuntimeError("no such tile\nand a second line")


def wrong_shape(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    return eager(q, k, v, call)[0][..., :-1], None


def all_nan(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    out, weights = eager(q, k, v, call)
    return out * float("nan"), weights


def overflows(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """Right in plain inputs: only large scores overflow."""
    scores = (q * call.scale) @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    out, weights = eager(q, k, v, call)
    return (out, weights) if bool(scores.amax() < 40) else (0 * out, weights)


def changes_globals(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(True)
    return double_scale(q, k, v, call)


def noisy(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    out, weights = eager(q, k, v, call)
    return out + torch.rand_like(out), weights


def no_out_bias(pair: Pair) -> None:
    for name, parameter in pair.candidate.module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)


def bypass(pair: Pair) -> None:
    """The kernel is right and never called."""
    pair.candidate.module.forward = lambda x, **rules: pair.reference.forward(
        pair.reference.module, x, pair.reference.views[0], None, "need_weights" in rules
    )[0]


def some_saboteurs() -> Registry[Saboteur]:
    """Of the module and without arguments: worker processes call it again."""
    found: Registry[Saboteur] = Registry("saboteur")

    def add(name: str, applies: Any = lambda case: True, **how: Any) -> None:
        found.add(name, Saboteur(name, f"the bug of {name}", applies, **how))

    add("double_scale", kernel=kernel("double_scale", double_scale))
    add("raises", kernel=kernel("raises", raises))
    add("overflows", kernel=kernel("overflows", overflows))
    add("noisy", kernel=kernel("noisy", noisy))
    add("no_out_bias", spoil=no_out_bias)
    add("only_in_decode", lambda case: case.phase == "decode", kernel=kernel("only_in_decode", double_scale))
    return found


def with_a_survivor() -> Registry[Saboteur]:
    found = some_saboteurs()
    found.add("no_op", Saboteur("no_op", "nothing at all", lambda case: True, kernel=kernel("no_op", eager)))
    return found


@pytest.fixture(scope="module")
def cell() -> StudiedCell:
    return StudiedCell(CASES[0], seed=0, regimes=["plain", "peaked"])


def fate(cell: StudiedCell, **how: Any) -> SaboteurFinding:
    return try_saboteur(cell, Saboteur("it", "a bug", how.pop("applies", lambda case: True), **how))


# ---- one saboteur in one cell ----------------------------------------------------------------------------------------


def test_a_wrong_kernel_is_killed_by_the_first_regime_and_tensor_that_sees_it(cell: StudiedCell):
    found = fate(cell, kernel=kernel("it", double_scale))
    assert (found.outcome, found.by, found.tensor) == ("mismatch", "plain", "out")
    assert found.err_ratio is not None and found.err_ratio > 32


def test_what_plain_inputs_hide_is_killed_by_what_shows_it(cell: StudiedCell):
    found = fate(cell, kernel=kernel("it", overflows))
    assert (found.by, found.tensor) == ("metamorphic", "check: shifted scores")

    def large_queries_clipped(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return eager(q.clamp(-8, 8), k, v, call)

    assert fate(cell, kernel=kernel("it", large_queries_clipped)).by == "peaked"


def test_a_small_error_is_degraded_and_not_a_mismatch(cell: StudiedCell):
    limit = threshold(cell)
    assert limit.seen is not None and limit.mismatch is not None and limit.seen < limit.mismatch
    assert fate(cell, kernel=lambda: scale_off_by(limit.seen)).outcome == "degraded"
    assert fate(cell, kernel=lambda: scale_off_by(limit.mismatch)).outcome in ("degraded", "mismatch")


def test_a_right_kernel_survives_with_its_error(cell: StudiedCell):
    found = fate(cell, kernel=kernel("it", eager))
    assert (found.outcome, found.by, found.explanation) == ("survived", None, None)
    assert found.err_ratio is not None and 0 < found.err_ratio <= 2


def test_a_survivor_carries_its_explanation_and_the_killed_do_not(cell: StudiedCell):
    assert fate(cell, kernel=kernel("it", eager), invisible=lambda case: "2 < 3").explanation == "2 < 3"
    assert fate(cell, kernel=kernel("it", double_scale), invisible=lambda case: "2 < 3").explanation is None


def test_where_it_does_not_apply_it_is_not_even_built(cell: StudiedCell):
    def never() -> Kernel:
        raise AssertionError("built")

    assert fate(cell, applies=lambda case: False, kernel=never) == SaboteurFinding("it", "not applicable")


@pytest.mark.parametrize(
    ("wrong", "by", "message"),
    [(raises, "RuntimeError", "no such tile"), (wrong_shape, "ContractBroken", "kernel returned (1, 4, 12, 7)")],
)
def test_what_breaks_is_killed_by_its_error(cell: StudiedCell, wrong: Any, by: str, message: str):
    found = fate(cell, kernel=kernel("it", wrong))
    assert (found.outcome, found.by) == ("error", by)
    assert found.message.startswith(message) and "\n" not in found.message


def test_nan_is_a_mismatch(cell: StudiedCell):
    assert fate(cell, kernel=kernel("it", all_nan)).outcome == "mismatch"


def test_a_spoilt_module_is_killed_and_leaves_the_right_one_alone(cell: StudiedCell):
    assert fate(cell, spoil=no_out_bias).outcome == "mismatch"
    assert fate(cell, kernel=kernel("it", eager)).outcome == "survived"


def test_the_reference_called_secretly_is_killed_by_the_counts(cell: StudiedCell):
    training = StudiedCell(dataclasses.replace(CASES[0], phase="train"), seed=0, regimes=["plain"])
    found = fate(training, spoil=bypass)
    # Gradients of the module's own parameters are 0 then; where nothing is trained only the count can tell.
    assert found.outcome in KILLED
    dead_rows = StudiedCell(dataclasses.replace(CASES[0], mask="dead_rows"), seed=0, regimes=["plain"])
    found = fate(dead_rows, spoil=bypass)
    assert (found.outcome, found.by) == ("mismatch", "counts")
    assert "never called" in found.message


def test_a_saboteur_that_cannot_be_built_is_not_a_kill(cell: StudiedCell):
    def broken(pair: Pair) -> None:
        raise AttributeError("this module has no such part")

    with pytest.raises(AttributeError, match="no such part"):
        fate(cell, spoil=broken)


def test_global_state_is_put_back(cell: StudiedCell):
    before = torch.get_rng_state()
    assert fate(cell, kernel=kernel("it", changes_globals)).outcome in KILLED
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(torch.get_rng_state(), before)


def test_a_saboteur_that_draws_does_so_alike(cell: StudiedCell):
    assert fate(cell, kernel=kernel("it", noisy)) == fate(cell, kernel=kernel("it", noisy))


def test_a_cell_whose_right_candidate_fails_is_reported_and_not_counted(monkeypatch: pytest.MonkeyPatch):
    wrong = Kernel("eager", double_scale, gives_weights=True)
    monkeypatch.setattr("harness.mutants.study.judged_kernel", lambda name: wrong)
    found = study_cell(CASES[0], some_saboteurs_list(), seed=0, regimes=["plain"])
    assert found.problem is not None and "the right candidate is mismatch in plain, out" in found.problem
    assert (found.findings, found.threshold) == ((), None)
    verdict = table.judge(Study("it", (found,), {}, 1.0))
    assert verdict.broken_cells == 1 and not verdict.passed


def test_a_cell_in_which_nothing_is_judged_is_a_problem():
    found = study_cell(CASES[0], some_saboteurs_list(), seed=0, regimes=["poison"])  # no mask: nothing to poison
    assert found.problem is not None and "nothing could be judged" in found.problem


def some_saboteurs_list() -> list[Saboteur]:
    known = some_saboteurs()
    return [known[name] for name in known]


# ---- thresholds ------------------------------------------------------------------------------------------------------


def test_errors_go_down_from_a_tenth_to_1e_8():
    assert (ERRORS[0], ERRORS[-1], len(ERRORS)) == (0.1, 1e-8, 8)
    assert list(ERRORS) == sorted(ERRORS, reverse=True)


def test_bisection_finds_the_smallest_that_is_seen():
    for mismatch, seen in itertools.product([None, *ERRORS], repeat=2):
        asked = []

        def status(error: float, mismatch: float | None = mismatch, seen: float | None = seen) -> str:
            asked.append(error)  # noqa: B023
            if mismatch is not None and error >= mismatch:
                return "mismatch"
            return "degraded" if seen is not None and error >= seen else "ok"

        found = smallest_seen(status)
        limits = [limit for limit in (mismatch, seen) if limit is not None]
        assert found == Threshold(mismatch=mismatch, seen=min(limits, default=None))
        assert len(asked) == len(set(asked)) <= 7


def test_the_threshold_is_where_the_verdict_really_changes(cell: StudiedCell):
    found = threshold(cell)
    assert found.mismatch is not None and found.seen is not None
    assert found.seen <= found.mismatch <= 1e-3
    just_below = ERRORS[ERRORS.index(found.seen) + 1]
    assert fate(cell, kernel=lambda: scale_off_by(found.seen)).outcome in KILLED
    assert fate(cell, kernel=lambda: scale_off_by(just_below)).outcome == "survived"


def test_everything_larger_than_the_threshold_is_seen(cell: StudiedCell):
    found = threshold(cell)
    assert found.seen is not None
    for error in ERRORS:
        outcome = fate(cell, kernel=lambda error=error: scale_off_by(error)).outcome
        assert (outcome in KILLED) == (error >= found.seen), error


# ---- scores ----------------------------------------------------------------------------------------------------------


def result(dtype: str, *findings: SaboteurFinding) -> CellResult:
    return CellResult(dataclasses.replace(CASES[0], dtype=dtype), None, findings, Threshold(1e-4, 1e-5), 1.0)


def killed(name: str, by: str = "plain") -> SaboteurFinding:
    return SaboteurFinding(name, "mismatch", by, "out", 100.0)


def judge(*cells: CellResult) -> table.StudyVerdict:
    return table.judge(Study("it", cells, {"a": "", "b": ""}, 1.0))


def test_the_numbers_of_the_score():
    cells = (
        result("float32", killed("a"), SaboteurFinding("b", "degraded", "peaked", "out", 3.0)),
        result("float64", killed("a", "peaked"), SaboteurFinding("b", "not applicable")),
        result("bfloat16", killed("a"), SaboteurFinding("b", "survived", err_ratio=0.5)),
    )
    verdict = judge(*cells)
    assert verdict.overall == table.Score(5, 4, 3) and verdict.overall.share == 0.8
    assert verdict.full == table.Score(3, 3, 2) and verdict.half == table.Score(2, 1, 1)
    frame = table.findings_frame(cells)
    assert table.scores_by(frame, "dtype")["bfloat16"] == table.Score(2, 1, 1)
    rows = table.saboteurs_frame(frame, ["a", "b"]).set_index("saboteur")
    assert rows.loc["a", "mostly_by"] == "plain (2/3)"
    assert list(rows.loc["b", ["mismatch", "degraded", "error", "survived", "not applicable"]]) == [0, 1, 0, 1, 1]


def test_the_regimes_needed_come_in_their_order_and_errors_need_none():
    found = result(
        "float32", killed("a", "poison"), killed("b", "plain"), SaboteurFinding("c", "error", "RuntimeError")
    )
    assert found.regimes_needed == ("plain", "poison")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_unexplained_survivor_in_full_precision_fails(dtype: str):
    many = [killed("a")] * 999
    assert judge(result(dtype, *many)).passed
    assert not judge(result(dtype, *many, SaboteurFinding("b", "survived"))).passed
    assert judge(result(dtype, *many, SaboteurFinding("b", "survived", explanation="2 < 3"))).passed


@pytest.mark.parametrize("explanation", [None, "2 < 3"])
def test_half_types_need_95_percent_explained_or_not(explanation: str | None):
    survivor = SaboteurFinding("b", "survived", explanation=explanation)
    assert judge(result("float16", *[killed("a")] * 19, survivor)).passed
    assert not judge(result("float16", *[killed("a")] * 18, survivor)).passed


def test_nothing_tried_is_not_a_pass():
    verdict = judge(result("float32", SaboteurFinding("a", "not applicable")))
    assert verdict.overall.share is None and not verdict.passed


def test_thresholds_per_dtype_and_phase():
    limits = (Threshold(1e-3, 1e-5), Threshold(1e-4, 1e-6), Threshold(None, 1e-1))
    cells = [dataclasses.replace(result("float32"), threshold=limit) for limit in limits]
    (row,) = table.thresholds_frame(table.cells_frame(cells)).to_dict("records")
    assert (row["dtype"], row["phase"], row["cells"]) == ("float32", "prefill", 3)
    assert (row["mismatch_median"], row["mismatch_worst"]) == (1e-3, float("inf"))
    assert (row["seen_median"], row["seen_worst"]) == (1e-5, 1e-1)


# ---- the whole study -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path]:
    return run(CONFIG, tmp_path_factory.mktemp("one"), jobs=1, find_saboteurs=some_saboteurs)


def test_every_saboteur_has_a_row_in_every_cell(studied: tuple[Study, Path]):
    study, folder = studied
    with (folder / "sensitivity.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(CASES) * len(some_saboteurs())
    assert {(row["case_id"], row["saboteur"]) for row in rows} == {
        (case.case_id, name) for case in CASES for name in some_saboteurs()
    }
    outcomes = {name: {row["outcome"] for row in rows if row["saboteur"] == name} for name in some_saboteurs()}
    assert outcomes["double_scale"] == {"mismatch"} and outcomes["raises"] == {"error"}
    assert outcomes["only_in_decode"] == {"mismatch", "not applicable"}
    assert table.judge(study).overall.share == 1.0 and table.judge(study).passed


def test_the_report_tells_it(studied: tuple[Study, Path]):
    text = sensitivity_markdown(studied[0], store.read_environment(studied[1]))
    assert text.startswith("# sensitivity of tiny: SEEN\n")
    assert "100 % of 32 wrong runs" in text
    assert "| only\\_in\\_decode | 2 | 0 | 0 | 0 | 4 | plain | the bug of only\\_in\\_decode |" in text
    assert "plain peaked" in text  # what each cell needed


def test_two_processes_find_the_same(studied: tuple[Study, Path], tmp_path: Path):
    _, folder = run(CONFIG, tmp_path / "two", jobs=2, find_saboteurs=some_saboteurs)
    assert (folder / "sensitivity.csv").read_bytes() == (studied[1] / "sensitivity.csv").read_bytes()
    ours, theirs = (pd.read_csv(where / "cells.csv").drop(columns="seconds") for where in (folder, studied[1]))
    pd.testing.assert_frame_equal(ours, theirs)


def test_each_cell_is_on_disk_as_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stops_at_the_third(case: Case, *arguments: Any, **options: Any) -> CellResult:
        if case == CASES[2]:
            raise KeyboardInterrupt
        return study_cell(case, *arguments, **options)

    monkeypatch.setattr(run_module, "study_cell", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run(CONFIG, tmp_path, jobs=1, only=["double_scale"], find_saboteurs=some_saboteurs)
    lines = [json.loads(line) for line in (tmp_path / "sensitivity.jsonl").read_text().splitlines()]
    assert [line["case_id"] for line in lines] == [case.case_id for case in CASES[:2]]
    assert lines[0]["findings"][0]["outcome"] == "mismatch"


def test_an_infinite_error_is_written_as_a_word(tmp_path: Path):
    cell = result("float32", SaboteurFinding("a", "mismatch", "plain", "out", float("inf")))
    run_module._append(tmp_path / "it.jsonl", cell)
    assert json.loads((tmp_path / "it.jsonl").read_text())["findings"][0]["err_ratio"] == "inf"


def test_an_unknown_saboteur_and_a_taken_folder_are_refused(studied: tuple[Study, Path], tmp_path: Path):
    with pytest.raises(UnknownName, match="unknown saboteur 'doubel_scale'; known: double_scale"):
        run(CONFIG, tmp_path, only=["doubel_scale"], find_saboteurs=some_saboteurs)
    with pytest.raises(ValueError, match=r"already holds sensitivity\.jsonl"):
        run(CONFIG, studied[1], find_saboteurs=some_saboteurs)


# ---- the command -----------------------------------------------------------------------------------------------------

TINY = """\
name: tiny
regimes: [plain, peaked]
grid: {variant: gqa, embed_dim: 32, heads: 4, kv_heads: 2, seq_len: 12, mask: causal}
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, saboteurs: Any = some_saboteurs) -> int:
        monkeypatch.setattr(run_module, "run", functools.partial(run, find_saboteurs=saboteurs))
        return main(["sensitivity", "tiny.yaml", "--jobs", "1", *arguments])

    return call


def test_all_seen_is_exit_0(command: Any, capsys: pytest.CaptureFixture[str]):
    assert command() == 0
    printed = capsys.readouterr().out
    assert "SEEN  100 % of 5 wrong runs, 100 % as a mismatch, 0 unexplained" in printed.replace("\n", " ")
    (folder,) = Path("results").glob("sensitivity-*")
    assert {path.name for path in folder.iterdir()} == {
        "sensitivity.md", "sensitivity.csv", "cells.csv", "sensitivity.jsonl", "config.yaml", "environment.json"
    }  # fmt: skip


def test_a_survivor_is_listed_and_is_exit_1(command: Any, capsys: pytest.CaptureFixture[str]):
    assert command("--out", "found", saboteurs=with_a_survivor) == 1
    printed = capsys.readouterr().out
    assert "NOT ALL SEEN  83.33 % of 6 wrong runs, 83.33 % as a mismatch, 1 unexplained" in printed.replace("\n", " ")
    assert "no_op  largest error 0." in printed and "UNEXPLAINED" in printed
    assert "## Survivors: 1" in Path("found/sensitivity.md").read_text()


def test_only_the_named_saboteurs_are_tried(command: Any, capsys: pytest.CaptureFixture[str]):
    assert command("--only", "raises", "--only", "noisy", saboteurs=with_a_survivor) == 0
    assert "100 % of 2 wrong runs" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--only", "nobody"], ["--shard", "2/1"], ["--jobs", "0"]])
def test_bad_input_is_exit_2(command: Any, arguments: list[str]):
    try:
        code = command(*arguments)
    except SystemExit as stop:  # argparse's own
        code = int(stop.code or 0)
    assert code == 2


def test_a_missing_config_is_exit_2(command: Any):
    assert main(["sensitivity", "nowhere.yaml"]) == 2
