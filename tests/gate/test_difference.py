"""`harness compare` and `harness.load`: two runs side by side, what differs and how much."""

import functools
import io
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

import harness
from harness import store
from harness.__main__ import main
from harness.errors import BadInput
from harness.gate.difference import WEIGHTS, Difference, compare_runs
from harness.gate.exact import exact_findings
from harness.record import COLUMNS, STATUS_SEVERITY, STATUSES, Record
from harness.report.difference import changes, counts_line, csv, environment_lines, mark_of, markdown, print_differences
from harness.report.page import read_run, write_own_page
from harness.report.terminal import print_entry
from tests.support import printed
from tests.support.page_runs import HOSTILE, record, run
from tests.support.records import HERE, folder


def compared(before: Record, after: Record) -> Difference:
    (cell,) = compare_runs(store.table([before]), store.table([after]))
    return cell


def test_a_run_does_not_differ_from_itself():
    frame = store.table([record(), record("gqa"), record("mqa", status="error", err_ratio=None, params=None)])
    cells = compare_runs(frame, frame)
    assert len(cells) == 3
    assert not any(cell.found or cell.worse or cell.better for cell in cells)
    assert {mark_of(cell) for cell in cells} == {"same"}
    assert all(changes(cell) == [] for cell in cells)


def test_statuses_get_worse_or_better_or_neither():
    pairs = [*itertools.product(STATUSES, STATUSES)]
    before = store.table([record(mask=f"{a}_{b}", status=a) for a, b in pairs])
    after = store.table([record(mask=f"{a}_{b}", status=b) for a, b in pairs])
    cells = {cell.case_id.split("-")[4]: cell for cell in compare_runs(before, after)}
    for a, b in pairs:
        cell = cells[f"{a}_{b}"]
        assert cell.worse == (STATUS_SEVERITY[b] > STATUS_SEVERITY[a])
        assert cell.better == (STATUS_SEVERITY[b] < STATUS_SEVERITY[a])
        assert (cell.pair("status") is not None) == cell.found == (a != b)
    ok, degraded, unsupported, mismatch, *no_result = sorted(STATUSES, key=lambda status: STATUS_SEVERITY[status])
    assert (ok, degraded, unsupported, mismatch) == ("ok", "degraded", "unsupported", "mismatch")
    assert STATUS_SEVERITY[ok] < STATUS_SEVERITY[degraded] < STATUS_SEVERITY[unsupported] < STATUS_SEVERITY[mismatch]
    assert {STATUS_SEVERITY[status] for status in no_result} == {STATUS_SEVERITY[mismatch] + 1}


@pytest.mark.parametrize(("a", "b"), list(itertools.permutations(STATUSES, 2)))
def test_the_gate_and_compare_agree_on_what_is_worse(a: str, b: str):
    before, after = store.table([record(status=a)]), store.table([record(status=b)])
    (cell,) = compare_runs(before, after)
    (finding,) = [each for each in exact_findings(after, before) if each.kind == "status"]
    assert finding.fails == cell.worse


@pytest.mark.parametrize("column", ["params", "kv_cache_bytes", "kv_bytes_per_token"])
def test_a_weight_that_moves_by_one_is_found(column: str):
    cell = compared(record(), record(**{column: getattr(record(), column) + 1}))
    assert cell.found and [*cell.pairs(WEIGHTS)] == [column]
    assert column in changes(cell)[0]


def test_an_error_that_appears_or_vanishes_is_found():
    assert compared(record(err_ratio=None), record()).found
    assert compared(record(), record(max_abs_err=None)).found
    assert compared(record(), record(err_ratio=None)).factor("err_ratio") is None


def test_errors_are_compared_by_factor():
    cell = compared(record(err_ratio=0.5), record(err_ratio=1.5))
    assert cell.factor("err_ratio") == pytest.approx(3.0)
    assert changes(cell) == ["error/N 0.50 -> 1.50 (x3.00)"]


@pytest.mark.parametrize(
    ("before", "after", "factor"),
    [(float("inf"), 0.5, 0.0), (0.5, float("inf"), float("inf")), (0.0, 1.0, float("inf"))],
)
def test_from_or_to_infinity_no_factor_is_told(before: float, after: float, factor: float):
    """An error that was infinite and is not is no growth."""
    cell = compared(record(err_ratio=before), record(err_ratio=after))
    assert cell.factor("err_ratio") == factor
    assert "(x" not in changes(cell)[0]


SKIPPING: dict[str, Any] = {"err_ratio": None, "rel_l1": 0.065, "cosine": 0.998, "sparsity": 0.5}


def test_an_approximate_kernel_that_moves_away_is_worse():
    near, far = record(**SKIPPING), record(**SKIPPING | {"rel_l1": 0.116, "cosine": 0.993})
    cell = compared(near, far)
    assert cell.worse and not cell.better and mark_of(cell) == "worse"
    assert changes(cell) == ["rel_l1 0.065 -> 0.116 (x1.78)", "cosine 0.998 -> 0.993"]
    assert counts_line([cell]).endswith("1 worse, 0 better; 0 otherwise changed")
    assert pd.read_csv(io.StringIO(csv([cell])))[["rel_l1_a", "rel_l1_b"]].to_numpy().tolist() == [[0.065, 0.116]]
    back = compared(far, near)
    assert back.better and not back.worse
    assert compared(near, record(**SKIPPING | {"rel_l1": None})).found


@pytest.mark.parametrize("change", [{"rel_l1": 0.0651}, {"sparsity": 0.4}, {"cosine": 0.9981}])
def test_a_metric_that_moves_a_little_is_a_change_alone(change: dict[str, float]):
    cell = compared(record(**SKIPPING), record(**SKIPPING | change))
    assert cell.found and not cell.worse and not cell.better
    assert [line.split()[0] for line in changes(cell)] == [*change]


def test_a_status_weighs_more_than_a_metric():
    failed = record(**SKIPPING | {"rel_l1": 0.2}, status="mismatch")
    assert compared(failed, record(**SKIPPING | {"rel_l1": 0.03}, status="ok")).better
    assert compared(record(**SKIPPING | {"rel_l1": 0.3}), failed).worse


def timed(value: float, low: float, high: float, **values: Any) -> Record:
    return record(latency_ratio=value, latency_ratio_lo=low, latency_ratio_hi=high, **values)


def test_speeds_differ_only_where_intervals_share_nothing():
    apart = compared(timed(1.0, 0.9, 1.1), timed(1.3, 1.2, 1.4))
    assert apart.found and apart.speed_apart and apart.factor("latency_ratio") == pytest.approx(1.3)
    assert changes(apart) == ["x ref 1.00 (0.90…1.10) -> 1.30 (1.20…1.40) (x1.30, intervals apart)"]
    within = compared(timed(1.0, 0.9, 1.25), timed(1.3, 1.2, 1.4))
    assert not within.found
    assert "within noise" in changes(within)[0]
    touching = compared(timed(1.0, 0.9, 1.2), timed(1.3, 1.2, 1.4))
    assert not touching.speed_apart


def test_a_speed_that_others_disturbed_is_no_difference():
    quiet, disturbed = timed(1.0, 0.9, 1.1), timed(9.0, 8.0, 10.0, timing="disturbed")
    cell = compared(quiet, disturbed)
    assert not cell.speed_apart and not cell.found
    assert "9.00 (8.00…10.00) disturbed" in changes(cell)[0]


def test_faster_counts_as_much_as_slower():
    faster = compared(timed(1.3, 1.2, 1.4), timed(1.0, 0.9, 1.1))
    slower = compared(timed(1.0, 0.9, 1.1), timed(1.3, 1.2, 1.4))
    assert faster.speed_apart and faster.order == pytest.approx(slower.order)


def test_milliseconds_alone_are_no_difference():
    assert not compared(record(latency_ms=1.0), record(latency_ms=9.0)).found


def test_without_an_interval_nothing_is_claimed():
    cell = compared(record(latency_ratio_lo=None), timed(9.0, 8.0, 10.0))
    assert not cell.speed_apart and not cell.found


def test_the_largest_difference_comes_first():
    masks = ("worse", "better", "gone", "new", "weight", "error", "speed", "small", "same")
    before = {mask: record(mask=mask) for mask in masks} | {"better": record(mask="better", status="degraded")}
    after = {mask: record(mask=mask) for mask in masks} | {
        "worse": record(mask="worse", status="mismatch"),
        "weight": record(mask="weight", params=1),
        "error": record(mask="error", err_ratio=4.0),
        "speed": record(mask="speed", latency_ratio=3.6, latency_ratio_lo=3.0, latency_ratio_hi=4.0),
        "small": record(mask="small", err_ratio=1.1),
    }
    del after["gone"], before["new"]
    cells = compare_runs(store.table([*before.values()]), store.table([*after.values()]))
    order = [cell.case_id.split("-")[4] for cell in cells]
    assert order[:2] == ["worse", "better"]
    assert set(order[2:4]) == {"gone", "new"}
    assert order[4:] == ["weight", "error", "speed", "small", "same"]


# ---- what is shown ---------------------------------------------------------------------------------------------------


def shown(before, after, width: int = 80, **options) -> str:
    cells = compare_runs(before.frame, after.frame)
    return printed(lambda console: print_differences((before, after), cells, console, **options), width)


def test_the_summary_counts_and_names_environments():
    before = run(record(), record("gqa"), record("mqa"), label="old")
    after = run(record(status="mismatch", err_ratio=99.0), record("gqa"), label="new",
                environment=replace(HERE, torch="2.14", threads=4))  # fmt: skip
    text = shown(before, after, width=120)
    assert "A  old: EQUAL, 3 cells: 3 ok" in text
    assert "B  new: NOT EQUAL, 2 cells: 1 ok, 1 mismatch" in text
    assert "torch: 2.13 -> 2.14" in text and "threads: 2 -> 4" in text
    assert "2 cells in both, 1 only in A, 0 only in B; 1 worse, 0 better; 0 otherwise changed" in text
    assert text.index("worse   mha-e256") < text.index("only A  mqa-e256")
    assert "status ok -> mismatch: error" in text


def test_environments_that_are_not_known_are_said_to_be():
    assert environment_lines((run(record()), run(record()))) == ["same environment"]
    assert environment_lines((run(environment=None), run())) == ["environments are not compared: A has none stored"]


def test_long_lists_are_cut_unless_all_is_asked():
    before, after = (run(*(record(mask=f"m{n}", params=n + add) for n in range(30))) for add in (0, 1))
    assert "+10 more, see --all" in shown(before, after)
    assert shown(before, after, everything=True).count("params") == 30
    same = run(record())
    assert "no difference" in shown(same, same, everything=True)
    assert "no difference" not in shown(same, same)


def test_hostile_text_stays_text_in_every_format():
    def hostile(number: int):
        rows = [record(kernel=text, error=text, status="error", params=number) for text in (*HOSTILE, "\x1b[31m|a|")]
        return run(*rows, label="\x1b[31m" + HOSTILE[0], environment=replace(HERE, cpu=HOSTILE[number], commit="\x1b"))

    before, after = hostile(0), hostile(1)
    text = shown(before, after, width=300)
    assert "\x1b" not in text and "\u2028" not in text and HOSTILE[0] in text
    cells = compare_runs(before.frame, after.frame)
    page = markdown((before, after), cells)
    assert "\x1b" not in page and "<script" not in page and "<img" not in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) == len(HOSTILE) + 2
    assert {line.count("|") for line in rows} == {4}
    table = pd.read_csv(io.StringIO(csv(cells)))
    assert set(table["params_a"]) == {0} and set(table["params_b"]) == {1}


def test_csv_has_both_sides():
    before, after = run(timed(1.0, 0.9, 1.1)), run(timed(1.3, 1.2, 1.4), record("gqa"))
    table = pd.read_csv(io.StringIO(csv(compare_runs(before.frame, after.frame)))).set_index("change")
    assert table.loc["changed", "x_ref_factor"] == pytest.approx(1.3)
    assert bool(table.loc["changed", "x_ref_apart"])
    assert table.isna().loc["only B", "status_a"] and table.loc["only B", "status_b"] == "ok"
    header = csv([]).splitlines()
    assert len(header) == 1 and header[0].startswith("case_id,change,status_a")


# ---- the command, and harness.load -----------------------------------------------------------------------------------


stored = functools.partial(folder, config=None)


@pytest.mark.parametrize("layout", ["table", "md", "csv"])
def test_exit_code_says_whether_a_status_got_worse(tmp_path: Path, capsys, layout: str):
    good = stored(tmp_path / "good", record(), record("gqa"))
    bad = stored(tmp_path / "bad", record(status="mismatch", err_ratio=50.0), record("gqa"))
    few = stored(tmp_path / "few", record(params=7))
    assert main(["compare", str(good), str(bad), "--format", layout]) == 1
    assert "mismatch" in capsys.readouterr().out
    assert main(["compare", str(bad), str(good), "--format", layout]) == 0
    assert main(["compare", str(good), str(few), "--format", layout]) == 0
    assert main(["compare", str(good), str(tmp_path / "none"), "--format", layout]) == 2
    assert main(["compare", str(good), str(bad), "--quiet"]) == 1
    assert "none" in capsys.readouterr().err


def test_two_runs_of_one_kernel_each_are_matched_without_it(tmp_path: Path, capsys):
    eager = [record(kernel="eager"), record("gqa", kernel="eager", err_ratio=0.5)]
    mine = [record(kernel="mine.py:f", status="mismatch"), record("gqa", kernel="mine.py:f", err_ratio=1.5)]
    cells = compare_runs(store.table(eager), store.table(mine))
    assert [cell.in_both for cell in cells] == [True, True]
    assert cells[0].worse and not cells[0].case_id.endswith("eager")
    assert changes(cells[1]) == ["error/N 0.50 -> 1.50 (x3.00)"]
    assert main(["compare", *(str(stored(tmp_path / name, *rows)) for name, rows in (("a", eager), ("b", mine)))]) == 1
    assert "kernel: eager -> mine.py:f, cells matched without it" in capsys.readouterr().out


def test_a_run_of_two_kernels_is_matched_with_them():
    both = [record(kernel="eager"), record(kernel="tiled")]
    cells = compare_runs(store.table(both), store.table([record(kernel="tiled")]))
    assert sorted((cell.before is not None, cell.after is not None) for cell in cells) == [(True, False), (True, True)]


def test_runs_with_nothing_in_common_cannot_be_compared(tmp_path: Path, capsys):
    one, other = stored(tmp_path / "one", record()), stored(tmp_path / "other", record("gqa"))
    assert main(["compare", str(one), str(other)]) == 2
    assert "nothing in common" in " ".join(capsys.readouterr().err.split())


def test_an_incomplete_run_is_not_called_equal(tmp_path: Path, capsys):
    planned = [record(), record("gqa"), record("mqa")]
    whole, part = stored(tmp_path / "whole", *planned), tmp_path / "part"
    plan = tuple(one.case_id for one in planned)
    manifest = store.Manifest("smoke", store.sha256(""), "0", 0, {}, None, plan, ("run", "smoke"))
    with store.RunFolder.create(part, "smoke", about=store.About(manifest, "", HERE)) as folder:
        folder.append(*planned[:1])
    assert main(["compare", str(whole), str(part)]) == 0
    assert "B part: INCOMPLETE, 1 cell: 1 ok; 2 missing" in " ".join(capsys.readouterr().out.split())
    write_own_page(part, read_run(part).frame)
    assert "part: INCOMPLETE</title>" in (part / "report.html").read_text(encoding="utf-8")


def test_load_gives_the_stored_table(tmp_path: Path):
    folder = stored(tmp_path / "one", record(), record("gqa", params=None))
    frame = harness.load(folder)
    pd.testing.assert_frame_equal(frame, store.load(folder))
    pd.testing.assert_frame_equal(frame, harness.load(str(folder)))
    assert str(frame["params"].dtype) == "Int64" and frame["params"].isna().tolist() == [False, True]


def test_load_of_several_names_the_run(tmp_path: Path):
    one, two = stored(tmp_path / "one", record(), record("gqa")), stored(tmp_path / "two", record("mqa", params=None))
    frame = harness.load([one, str(two)])
    assert [*frame.columns] == ["run", *COLUMNS]
    assert frame["run"].tolist() == ["one", "one", "two"]
    assert frame["run"].dtype == store.load(one)["variant"].dtype
    assert frame["variant"].tolist() == ["mha", "gqa", "mqa"]
    single = store.load(one)
    assert {name: str(frame[name].dtype) for name in COLUMNS} == {name: str(single[name].dtype) for name in COLUMNS}
    assert frame["params"].isna().tolist() == [False, False, True]
    assert frame.index.tolist() == [0, 1, 2]
    assert "missing" in frame.attrs


def test_runs_of_one_name_are_told_apart_by_path(tmp_path: Path):
    one, two = stored(tmp_path / "a" / "run", record()), stored(tmp_path / "b" / "run", record())
    assert harness.load([one, two])["run"].tolist() == [str(one), str(two)]


def test_a_folder_is_not_loaded_twice(tmp_path: Path):
    one = stored(tmp_path / "one", record())
    with pytest.raises(BadInput, match="given twice"):
        harness.load([one, tmp_path / "one" / ".." / "one"])


def test_loading_nothing_is_an_error():
    with pytest.raises(BadInput, match="no folder"):
        harness.load([])


def test_what_is_said_of_a_cell_stands_under_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    print_entry(Console(width=30), ("worse", "red"), "a-case-id-longer-than-the-line-is", "one\ntwo", width=8)
    assert capsys.readouterr().out.splitlines() == [
        "  worse   a-case-id-longer-than-the-line-is",
        f"{'':10}one",
        f"{'':10}two",
    ]
