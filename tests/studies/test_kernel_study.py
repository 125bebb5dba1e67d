"""The kernel study: its targets, fits, guard and counts. Nothing here asserts a time."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("transformers")

from bench.kernel_study import __main__ as program
from bench.kernel_study import cores, counts, guard, latent, multihead, roofline, run, steps
from bench.kernel_study.cell import Cell, Golden, Point, Sides, Work
from bench.kernel_study.exponents import exponents, fit
from bench.kernel_study.measure import Patience, measure
from bench.kernel_study.result import MEASURED, NOT_RUN, UNSUPPORTED, WRONG, Result, frame_of
from bench.kernel_study.roofline import Roofline
from bench.kernel_study.targets import (
    MISSED,
    NOT_MEASURED,
    REACHED,
    TARGETS,
    Target,
    Verdict,
    all_reached,
    judge,
    targets_frame,
)
from harness.cell.draws import fast_path_off
from harness.cell.timing import Ratio
from harness.kernels.call import Unsupported

PEAK = Roofline({"float32": 1e11, "bfloat16": 1e9}, 1e10)
CAP = 2**30
MICRO_LATENT = latent.LatentSizes(embed_dim=48, rank=16, rope=8, value=12)
HASTY = Patience(budget_s=0.0, required_s=0.0, blocks=2, max_blocks=2)

PREFILL = Cell("prefill", 24, 24, 4, 2, 8, batch=2)
DECODE = Cell("decode", 1, 40, 4, 2, 8, batch=2)
LATENT = Cell("mla", 1, 20, 4, 4, 8, batch=2)
STEP = Cell("step", 1, 20, 4, 2, 8, batch=2)
MULTIHEAD = Cell("mha", 10, 10, 2, 2, 8, batch=2, note=multihead.WEIGHTS)

build_core = partial(cores.build_core, names=("eager", "tiled", "grouped"), rivals=True, memory_cap=CAP)
build_latent = partial(latent.build_latent, sizes=MICRO_LATENT)


@pytest.fixture(autouse=True)
def _as_the_study_runs() -> Any:
    with torch.no_grad():
        yield


# ---- targets ---------------------------------------------------------------------------------------------------------


def target(title: str) -> Target:
    (found,) = [each for each in TARGETS if each.title.startswith(title)]
    return found


def tiled(value: float | None, *, queries: int = 512, required: bool = True, **changes: Any) -> list[Result]:
    """A row of `tiled` whose time and memory are `value` of the others', and its two baselines."""
    cell = replace(Cell("prefill", queries, queries), required=required, **changes)
    ratios = {} if value is None else dict.fromkeys(("sdpa", "textbook"), Ratio(value, value, value))
    others = [Result(cell, name, MEASURED, seconds=(1.0,)) for name in ("sdpa", "textbook")]
    return [Result(cell, "tiled", MEASURED, seconds=(1.0,), ratios=ratios, peak_x_textbook=value), *others]


def verdict(title: str, results: Sequence[Result]) -> Verdict:
    found = judge(frame_of(results, PEAK), exponents(results), [target(title).study])
    (own,) = [each for each in found if each.target is target(title)]
    return own


NO_MASK = "tiled / SDPA, no mask"


def test_a_target_is_reached_up_to_its_limit_and_missed_beyond() -> None:
    assert verdict(NO_MASK, tiled(1.3)).status == REACHED
    found = verdict(NO_MASK, [*tiled(1.1), *tiled(1.31, queries=1024)])
    assert (found.status, found.worst, found.points) == (MISSED, 1.31, 2)
    assert "L1024" in found.where


def test_what_is_not_required_but_measured_counts_too() -> None:
    assert verdict(NO_MASK, [*tiled(1.1), *tiled(2.0, queries=1024, required=False)]).status == MISSED


@pytest.mark.parametrize("value", [float("nan"), None])
def test_no_number_is_never_reached(value: float | None) -> None:
    found = verdict(NO_MASK, [*tiled(1.0, queries=1024), *tiled(value)])
    assert found.status == NOT_MEASURED
    assert "L512" in found.where
    assert verdict(NO_MASK, tiled(value, required=False)).status == NOT_MEASURED


def test_nothing_measured_is_not_reached() -> None:
    for each in TARGETS:
        assert verdict(each.title, []).status == NOT_MEASURED
    assert not all_reached(judge(frame_of([], PEAK), exponents([]), ["prefill"]))
    assert not all_reached([])


def test_a_required_point_that_was_not_run_is_named_with_its_reason() -> None:
    left_out = Result(Cell("prefill", 512, 512, required=True), "tiled", NOT_RUN, "there is no kernel 'tiled'")
    found = verdict(NO_MASK, [*tiled(1.0, queries=1024), left_out])
    assert found.status == NOT_MEASURED
    assert "there is no kernel" in found.where


def test_what_was_left_out_for_time_or_memory_does_not_count_unless_required() -> None:
    left_out = Result(Cell("prefill", 8192, 8192), "tiled", NOT_RUN, "would take about 99 s")
    assert verdict(NO_MASK, [*tiled(1.0), left_out]).status == REACHED
    alone, *_ = tiled(None, queries=8192, required=False)  # its textbook side did not fit in memory
    assert verdict("tiled / textbook, L", [*tiled(0.5), alone]).status == REACHED


def test_a_wrong_kernel_fails_its_target_wherever_it_is_wrong() -> None:
    wrong = Result(Cell("prefill", 8192, 8192), "tiled", WRONG, "wrong: 1.0 from float64")
    assert verdict(NO_MASK, [*tiled(1.0), wrong]).status == NOT_MEASURED


def test_targets_are_of_their_mask_length_and_dtype() -> None:
    others = [*tiled(9.0, causal=True), *tiled(9.0, queries=256), *tiled(9.0, dtype="bfloat16")]
    assert verdict(NO_MASK, [*tiled(1.0), *others]).status == REACHED
    assert verdict("tiled / SDPA is_causal", [*tiled(1.0), *others]).status == MISSED
    memory = "tiled / textbook, peak memory"
    assert verdict(memory, [*tiled(0.05, queries=4096), *tiled(0.9)]).status == REACHED
    assert verdict(memory, tiled(0.051, queries=4096)).status == MISSED


@pytest.mark.parametrize(("heads", "limit"), [((32, 8), 0.8), ((32, 1), 0.5)])
def test_decode_targets_have_their_own_heads(heads: tuple[int, int], limit: float) -> None:
    def rows(value: float, keys: int, heads: tuple[int, int]) -> list[Result]:
        cell = Cell("decode", 1, keys, *heads, required=True)
        ratio = {"sdpa": Ratio(value, value, value)}
        return [Result(cell, "grouped", MEASURED, seconds=(1.0,), ratios=ratio),
                Result(cell, "sdpa", MEASURED, seconds=(1.0,))]  # fmt: skip

    title = f"grouped / SDPA enable_gqa, {heads[0]}/{heads[1]}"
    fine = [*rows(limit, 2048, heads), *rows(9.0, 1024, heads), *rows(9.0, 2048, (8, 8))]
    assert verdict(title, fine).status == REACHED
    assert verdict(title, [*fine, *rows(limit + 0.01, 4096, heads)]).status == MISSED


@pytest.mark.parametrize(("ms", "ratio", "long", "short"), [
    (1.0, 1.05, REACHED, NOT_MEASURED), (1.0, 1.06, MISSED, NOT_MEASURED),
    (0.9, 1.3, NOT_MEASURED, REACHED), (0.9, 1.31, NOT_MEASURED, MISSED),
])  # fmt: skip
def test_the_limit_of_a_module_follows_the_length_of_torchs_call(
    ms: float, ratio: float, long: str, short: str
) -> None:
    cell = Cell("mha", 64, 64, required=True)
    results = [
        Result(cell, "split", MEASURED, seconds=(1.0,), ratios={"torch_mha": Ratio(ratio, ratio, ratio)},
               baseline_seconds=ms / 1e3),
        Result(cell, "torch_mha", MEASURED, seconds=(1.0,)),
    ]  # fmt: skip
    title = "drop-in / nn.MultiheadAttention, calls "
    assert verdict(title + "of", results).status == long
    assert verdict(title + "below", results).status == short


def test_the_targets_table_keeps_numbers() -> None:
    frame = targets_frame([verdict(NO_MASK, tiled(1.25)), verdict(NO_MASK, [])])
    assert frame["worst"].tolist()[0] == 1.25
    assert np.isnan(frame["worst"].tolist()[1])
    assert frame["status"].tolist() == [REACHED, NOT_MEASURED]


# ---- growth ----------------------------------------------------------------------------------------------------------


def grown(power: float, lengths: Sequence[int], *, noise: float = 0.0, required: bool = True) -> list[Result]:
    random = np.random.default_rng(3)
    return [
        Result(Cell("prefill", L, L, required=required), "tiled", MEASURED,
               seconds=tuple(1e-9 * L**power * np.exp(noise * random.standard_normal(15))))
        for L in lengths
    ]  # fmt: skip


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 2.3])
def test_the_exponent_of_a_power_law(power: float) -> None:
    assert fit({n: (1e-9 * n**power,) * 5 for n in (512, 1024, 4096)}) == pytest.approx((power,) * 3, abs=1e-9)
    row = exponents(grown(power, (512, 1024, 2048, 4096), noise=0.1)).iloc[0]
    assert row["lo"] < row["exponent"] < row["hi"]
    assert row["exponent"] == pytest.approx(power, abs=0.1)
    assert 0.01 < row["hi"] - row["lo"] < 0.3


def test_short_lengths_are_left_out_of_the_fit() -> None:
    flat = grown(0.0, (128, 256))
    row = exponents([*flat, *grown(2.0, (512, 1024, 2048))]).iloc[0]
    assert row["exponent"] == pytest.approx(2.0)
    assert (row["shortest"], row["longest"], row["lengths"]) == (512, 2048, 3)


def test_two_lengths_or_a_missing_required_one_give_no_exponent() -> None:
    assert np.isnan(exponents(grown(2.0, (512, 1024))).iloc[0]["exponent"])
    missing = Result(Cell("prefill", 4096, 4096, required=True), "tiled", WRONG, "wrong")
    assert np.isnan(exponents([*grown(2.0, (512, 1024, 2048)), missing]).iloc[0]["exponent"])


def test_growth_targets() -> None:
    title = "tiled prefill: growth"
    assert verdict(title, grown(2.1 - 1e-6, (512, 1024, 2048))).status == REACHED
    assert verdict(title, grown(2.2, (512, 1024, 2048))).status == MISSED
    assert verdict(title, grown(2.0, (512, 1024))).status == NOT_MEASURED


# ---- guard -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cell", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_all_core_sides_agree(cell: Cell, dtype: str, causal: bool) -> None:
    cell = replace(cell, dtype=dtype, causal=causal and cell.queries > 1)
    sides = build_core(cell)
    assert set(sides.calls) == {"sdpa", "textbook", "eager", "tiled", "grouped", "transformers", "transformers_sdpa"}
    assert guard.problems(Point(cell, build_core, counts.core, ()), sides) == {}


@pytest.mark.parametrize(("cell", "build"), [(LATENT, build_latent), (STEP, steps.build_step),
                                             (MULTIHEAD, multihead.build_multihead)])  # fmt: skip
def test_all_module_sides_agree(cell: Cell, build: Callable[[Cell], Sides]) -> None:
    for dtype in ("float32", "bfloat16"):
        sides = build(replace(cell, dtype=dtype))
        assert len(sides.calls) >= 3
        assert guard.problems(Point(replace(cell, dtype=dtype), build, counts.core, ()), sides) == {}


def spoilt(spoil: Callable[[Tensor], Tensor], build: Callable[[Cell], Sides] = build_core) -> Callable[[Cell], Sides]:
    def build_spoilt(cell: Cell) -> Sides:
        sides = build(cell)
        right = sides.calls["eager"]
        return replace(sides, calls={**sides.calls, "eager": lambda: spoil(right().clone())})

    return build_spoilt


def one_row(out: Tensor) -> Tensor:
    """Wrong in one row that the golden does not look at."""
    out[1, 1, 4] += 1e-3
    return out


def one_nan(out: Tensor) -> Tensor:
    out[0, 0, -1, 0] = float("nan")
    return out


@pytest.mark.parametrize("spoil", [lambda out: out * 1.001, one_row, one_nan, lambda out: out[:, :1],
                                   lambda out: out.double()])  # fmt: skip
def test_a_wrong_kernel_is_never_timed(spoil: Callable[[Tensor], Tensor]) -> None:
    point = Point(replace(PREFILL, queries=40, keys=40), spoilt(spoil), counts.core, ())
    found = {result.side: result for result in measure(point, HASTY)}
    assert found["eager"].status == WRONG
    assert found["eager"].seconds == ()
    assert found["tiled"].status == MEASURED
    assert len(found["tiled"].seconds) == 2


@pytest.mark.parametrize(("factor", "wrong"), [(0.5, []), (1.6, ["eager"])])
def test_the_limit_is_on_the_distance_from_float64(factor: float, wrong: list[str]) -> None:
    """Two sides may be a limit away from the truth each, so 1.6 of it would pass between them."""
    sides = build_core(PREFILL)
    golden, reference = sides.golden(), sides.calls["sdpa"]()
    own = (golden.pick(reference).double() - golden.value).abs().max()
    limit = guard.FACTOR * float(own + torch.finfo(torch.float32).eps * golden.value.abs().max())
    assert list(guard.disagreements(spoilt(lambda out: out + factor * limit)(PREFILL))) == wrong


def test_what_half_precision_would_hide_is_seen_in_float32() -> None:
    cell = replace(PREFILL, dtype="bfloat16")
    build = spoilt(lambda out: out * 1.02)
    assert guard.disagreements(build(cell)) == {}
    assert list(guard.problems(Point(cell, build, counts.core, ()), build(cell))) == ["eager"]


def test_a_wrong_reference_stops_the_point() -> None:
    def build(cell: Cell) -> Sides:
        sides = build_core(cell)
        return replace(sides, golden=lambda: Golden(sides.golden().value * 1.01, sides.golden().pick))

    results = measure(Point(PREFILL, build, counts.core, ()), HASTY)
    assert {result.status for result in results} == {WRONG}


def test_a_kernel_that_refuses_is_unsupported() -> None:
    def refuse(_: Tensor) -> Tensor:
        raise Unsupported("no such mask")

    found = {r.side: r for r in measure(Point(PREFILL, spoilt(refuse), counts.core, ()), HASTY)}
    assert (found["eager"].status, found["eager"].reason) == (UNSUPPORTED, "unsupported: no such mask")


def test_the_golden_is_the_plain_formula() -> None:
    q, k, v = (torch.randn(2, heads, 24, 8, dtype=torch.float64) for heads in (4, 2, 2))
    for causal in (False, True):
        golden = cores.golden_core(replace(PREFILL, causal=causal), q, k, v)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        torch.testing.assert_close(golden.value, golden.pick(expected))
        assert golden.value.shape == (2, 4, cores.GOLDEN_ROWS, 8)


# ---- counts ----------------------------------------------------------------------------------------------------------


def counted(call: Callable[[], Tensor]) -> int:
    with FlopCounterMode(display=False) as counter, fast_path_off():
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("cell", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_flops_and_bytes_of_the_core(cell: Cell) -> None:
    sides = build_core(cell)
    for name in ("textbook", "eager"):
        assert sides.work[name].flops == counted(sides.calls[name])
    D, S = cell.head_dim, cell.keys
    elements = sum(heads * length * D for heads, length in ((4, cell.queries), (2, S), (2, S), (4, cell.queries)))
    assert counts.core(cell).bytes == cell.batch * elements * 4
    assert counts.core(replace(cell, dtype="bfloat16")).bytes == cell.batch * elements * 2


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 9), (1, 5)])
def test_hidden_pairs_are_not_counted(queries: int, keys: int) -> None:
    cell = Cell("prefill", queries, keys, causal=True)
    visible = torch.ones(queries, keys).tril(keys - queries).sum().item()
    whole = counts.core(replace(cell, causal=False)).flops
    assert counts.core(cell).flops * queries * keys == whole * visible


@pytest.mark.parametrize("name", ["absorbed", "naive", "transformers"])
def test_flops_of_a_latent_step(name: str) -> None:
    sides = build_latent(LATENT)
    assert sides.work[name].flops == counted(sides.calls[name])


def test_flops_of_whole_modules() -> None:
    step, module = steps.build_step(STEP), multihead.build_multihead(MULTIHEAD)
    assert step.work["eager"].flops == counted(step.calls["eager"])
    for name in ("split", "packed"):
        assert module.work[name].flops == counted(module.calls[name])


def test_roofline_shares() -> None:
    row = Result(PREFILL, "eager", MEASURED, seconds=(2.0, 1.0, 9.0), work=Work(flops=10**11, bytes=10**10)).row(PEAK)
    assert (row["ms"], row["blocks"]) == (2000.0, 3)
    assert (row["gflops"], row["share_of_peak"]) == (50.0, 0.5)
    assert (row["gbytes_per_s"], row["share_of_bandwidth"]) == (5.0, 0.5)


# ---- the whole study -------------------------------------------------------------------------------------------------


def micro_points() -> list[Point]:
    return [
        *(Point(replace(PREFILL, queries=L, keys=L, causal=c, batch=1), build_core, counts.core, ("sdpa", "tiled"))
          for L in (16, 32) for c in (False, True)),
        Point(replace(DECODE, batch=1), build_core, counts.core, ("sdpa", "grouped")),
        Point(LATENT, build_latent, counts.core, ("absorbed",)),
        Point(STEP, steps.build_step, counts.grouped_step, ("eager",)),
        Point(replace(MULTIHEAD, required=True), multihead.build_multihead, counts.multihead, ("split",)),
    ]  # fmt: skip


@pytest.fixture
def micro(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    points = micro_points()
    monkeypatch.setattr(run, "planned", lambda plan: points)
    monkeypatch.setattr(roofline, "measure", lambda: PEAK)
    monkeypatch.setattr(run, "Plan", partial(run.Plan, patience=HASTY))
    return points


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "kernels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_study_from_end_to_end(micro: list[Point], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "study"
    assert program.main(["--out", str(folder), "--threads", "1"]) == 1  # micro sizes reach no target
    names = {path.name for path in folder.iterdir()}
    assert names >= {"kernels.csv", "targets.csv", "exponents.csv", "kernels.md", "environment.json", "roofline.json",
                     "prefill.png", "decode.png"}  # fmt: skip
    rows = rows_of(folder)
    assert {row["status"] for row in rows} == {"measured"}
    assert len(rows) == 5 * 7 + 3 + 4 + 3
    for row in rows:
        assert float(row["ms"]) > 0
    targets = pd.read_csv(folder / "targets.csv")
    assert len(targets) == len(TARGETS)
    assert (targets["status"] == REACHED).sum() <= 1  # only the drop-in's micro call is one of a target's
    shown = capsys.readouterr().out
    assert "NOT ALL REACHED" in shown
    assert "nn.MultiheadAttention" in shown
    assert (folder / "kernels.md").read_text().count("| tiled |") == 5
    assert program.main(["--out", str(folder)]) == 2  # the folder holds another study


def test_the_exit_code_is_zero_only_if_all_targets_are_reached(
    micro: list[Point], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del micro[:-1]
    for status, code in ((REACHED, 0), (MISSED, 1), (NOT_MEASURED, 1)):
        monkeypatch.setattr(run, "judge", lambda *_, status=status: [Verdict(TARGETS[0], status, 1.0, "", 1)])
        assert program.main(["--out", str(tmp_path / status), "--threads", "1"]) == code


def test_an_interruption_keeps_what_was_measured(micro: list[Point], tmp_path: Path) -> None:
    def interrupt(cell: Cell) -> Sides:
        raise KeyboardInterrupt

    micro[1] = replace(micro[1], build=interrupt)
    assert program.main(["--out", str(tmp_path / "study"), "--threads", "1"]) == 1
    rows = rows_of(tmp_path / "study")
    assert [row["status"] for row in rows[:7]] == ["measured"] * 7
    assert {(row["status"], row["reason"]) for row in rows[7:]} == {("not run", "interrupted")}
    assert {row["study"] for row in rows[7:]} == {"prefill", "decode", "mla", "step", "mha"}


def test_what_does_not_fit_is_stated(tmp_path: Path) -> None:
    sides = cores.build_core(PREFILL, names=("eager", "tiled", "none_such"), rivals=False, memory_cap=1)
    assert set(sides.calls) == {"sdpa", "tiled"}
    assert sides.absent["textbook"].startswith("would need ")
    assert sides.absent["none_such"] == "there is no kernel 'none_such'"
    plan = run.Plan(minutes=1.0, point_s=1e-9, threads=1, patience=HASTY)
    points = [replace(point, cell=replace(point.cell, required=False)) for point in micro_points()[:2]]
    study, _ = run.run_points(points, plan, tmp_path / "dear", console=None, measure_roofline=lambda: PEAK)
    assert study.frame["reason"].str.startswith("would take about").all()
    plan = replace(plan, minutes=1e-9, point_s=1e9)
    study, _ = run.run_points(points, plan, tmp_path / "late", console=None, measure_roofline=lambda: PEAK)
    assert study.frame["reason"].str.contains("were used up").all()
    required = [replace(point, cell=replace(point.cell, required=True)) for point in points]
    study, _ = run.run_points(required, plan, tmp_path / "asked", console=None, measure_roofline=lambda: PEAK)
    assert (study.frame["status"] == MEASURED).all()


def test_the_plan_covers_what_the_targets_ask_for() -> None:
    points = run.planned(run.Plan(quick=True))
    assert all(point.cell.required for point in points)
    assert len({point.cell.label for point in points}) == len(points)
    results = [Result(point.cell, side, MEASURED, seconds=(1.0,), ratios=dict.fromkeys(
        ("sdpa", "textbook", "transformers", "torch_mha"), Ratio(0.01, 0.01, 0.01)), peak_x_textbook=0.01,
        baseline_seconds=1.0 if point.cell.head_dim == 64 and point.cell.queries > 64 else 1e-6)
        for point in points for side in point.side_names]  # fmt: skip
    found = judge(frame_of(results, PEAK), exponents(results), ("prefill", "decode", "step", "mla", "mha"))
    assert {each.status for each in found} == {REACHED}
    assert len(found) == len(TARGETS)
    whole = run.planned(run.Plan())
    sizes = {(p.cell.study, p.cell.queries, p.cell.keys, p.cell.heads, p.cell.kv_heads) for p in whole}
    assert {("prefill", L, L, 32, 1) for L in cores.PREFILL_LENGTHS} <= sizes
    assert {("decode", 1, S, 32, 8) for S in cores.DECODE_LENGTHS} <= sizes
    assert whole[: len(points)] != whole[-len(points) :]
    assert all(p.cell.required for p in whole[: len(points)])
    assert not any(p.cell.required for p in whole[len(points) :])


def test_an_unknown_study_is_refused() -> None:
    with pytest.raises(SystemExit):
        program.main(["--only", "nothing"])
