"""The story told at the end of a run: arithmetic by hand, nothing invented, hostile text stays text."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness import report, store
from harness import text as fmt
from harness.gate.findings import Finding
from harness.record import Record
from harness.report import story
from harness.report.folder import measured_share
from harness.report.markdown import summary_markdown
from harness.report.summary import DTYPES, judge, not_ok, summarise
from harness.report.terminal import print_findings, print_summary
from harness.store import RunFolder
from tests.support import printed, records

HERE = replace(records.HERE, cpu="CPU | 9", dirty=True)
HOSTILE = "ValueError: a|b [red]x[/red] \x1b[31m <script>alert(1)</script> `c` \\| *d*\nTraceback | more"


def record(variant: str = "mha", **values: Any) -> Record:
    return records.timed_record(variant, **({"params": 100, "kv_bytes_per_token": 64.0} | values))


def only(frame: pd.DataFrame, variant: str) -> pd.Series:
    return frame[frame["variant"] == variant].iloc[0]


def test_what_was_disturbed_is_told_and_counts_in_no_mean() -> None:
    rows = [
        record(latency_ratio=2.0, timing="ok"),
        record(seq_len=512, latency_ratio=50.0, timing="disturbed"),
        record("mqa", latency_ms=6.0),
        record("mqa", seq_len=512, latency_ms=3.0, latency_ratio=9.0, timing="disturbed"),
    ]
    frame = store.table(rows)
    table = summarise(frame)
    mha, mqa = only(table, "mha"), only(table, "mqa")
    assert (mha["prefill_ratio"], mha["prefill_ratio_max"], mha["disturbed"]) == (pytest.approx(2.0), 2.0, 1)
    assert (mqa["prefill_ratio"], mqa["disturbed"]) == (pytest.approx(1.0), 1)
    told = "2 cells were disturbed while timed"
    shown = printed(lambda console: print_summary(frame, console, folder=None))
    assert told in shown
    assert any("variant" in line and "disturbed" in line for line in shown.splitlines())
    text = summary_markdown(frame, None)
    assert told in text
    assert "| disturbed |" in text
    assert "| disturbed |" not in summary_markdown(store.table(rows[:1]), None)


def test_latencies_are_compared_across_variants_where_they_were_timed_in_one_contest_alone() -> None:
    base = record(seq_len=128)
    held = {"against": base.case_id, "ratio_lo": 0.4, "ratio_hi": 0.6, "latency_ratio": None}
    rows = [
        replace(base, against=base.case_id, ratio_to=1.0, latency_ratio=None),
        record("mqa", seq_len=128, ratio_to=0.5, **held),
        record("gqa", seq_len=128, ratio_to=0.9, timing="disturbed", **held),
        record("mla", seq_len=128, latency_ms=1e9),  # timed apart
    ]
    table = summarise(store.table(rows))
    found = {variant: only(table, variant)["prefill_latency_vs_mha"] for variant in ("mha", "mqa", "gqa", "mla")}
    assert (found["mha"], found["mqa"]) == (pytest.approx(1.0), pytest.approx(0.5))
    assert pd.isna(found["gqa"]) and pd.isna(found["mla"])
    only_contests = store.table(rows[:2])
    shown = printed(lambda console: print_summary(only_contests, console, folder=None), width=200)
    assert "prefill" in shown  # whose x MHA it is, where nothing beside it says so


def test_summary_arithmetic_by_hand() -> None:
    rows = [
        record(seq_len=128, latency_ms=2.0, latency_ratio=0.5),
        record(seq_len=512, latency_ms=4.0, latency_ratio=2.0),
        record(phase="decode", latency_ms=1.0),
        record("mqa", seq_len=128, params=50, kv_bytes_per_token=8.0, latency_ms=1.0, latency_ratio=3.0, err_ratio=1.5,
               max_abs_err=3e-7, err_budget=4e-7),
        record("mqa", seq_len=512, params=50, kv_bytes_per_token=8.0, latency_ms=8.0, latency_ratio=3.0),
        record("mqa", seq_len=4096, params=999, kv_bytes_per_token=8.0, latency_ms=999.0, latency_ratio=9.0),
    ]  # fmt: skip
    table = summarise(store.table(rows))
    assert list(table.columns) == list(DTYPES)
    assert table["variant"].tolist() == ["mha", "mqa"]
    mha, mqa = only(table, "mha"), only(table, "mqa")
    assert (mha["cells"], mha["ok"], mha["degraded"], mha["failed"]) == (3, 3, 0, 0)
    assert mha["prefill_ratio"] == pytest.approx(1.0)  # sqrt(0.5 * 2)
    assert (mha["prefill_ratio_min"], mha["prefill_ratio_max"]) == (0.5, 2.0)
    for name in ("params_vs_mha", "kv_bytes_per_token_vs_mha"):
        assert mha[name] == pytest.approx(1.0)
    assert mha[["prefill_latency_vs_mha", "decode_latency_vs_mha"]].isna().all()  # timed apart
    assert mqa["worst_err_ratio"] == 1.5
    assert mqa["worst_case_id"] == rows[3].case_id
    assert (mqa["worst_max_abs_err"], mqa["worst_err_budget"]) == (3e-7, 4e-7)
    assert (mqa["params_min"], mqa["params_max"]) == (50, 999)
    assert mqa["prefill_ratio"] == pytest.approx(math.exp((2 * math.log(3) + math.log(9)) / 3))
    # The cell at 4096 has no partner among the mha cells, so it counts in none of these.
    assert mqa["params_vs_mha"] == pytest.approx(0.5)
    assert mqa["kv_bytes_per_token_vs_mha"] == pytest.approx(0.125)
    assert pd.isna(mqa["decode_ratio"])
    assert pd.isna(mqa["decode_latency_vs_mha"])
    assert pd.isna(mqa["train_ratio"])


@pytest.mark.parametrize(
    "axis",
    [{"embed_dim": 512}, {"heads": 4}, {"head_dim": 64}, {"seq_len": 1}, {"batch": 2}, {"mask": "causal"},
     {"dtype": "float16"}, {"phase": "train"}, {"bias": False}, {"kernel": "sdpa"}],
)  # fmt: skip
def test_cells_that_differ_in_another_axis_are_not_compared(axis: dict[str, Any]) -> None:
    table = summarise(store.table([record("mha"), record("gqa", **axis)]))
    assert only(table, "gqa")[[name for name in DTYPES if name.endswith("_vs_mha")]].isna().all()


def test_no_mha_and_two_mha_cells_give_no_number() -> None:
    for rows in ([record("gqa")], [record("mha"), record("mha"), record("gqa")]):
        assert pd.isna(only(summarise(store.table(rows)), "gqa")["params_vs_mha"])


def test_what_failed_has_no_speed_but_its_weight() -> None:
    rows = [record("mha"), record("gqa", status="mismatch", latency_ratio=0.01, latency_ms=0.01, params=25)]
    gqa = only(summarise(store.table(rows)), "gqa")
    assert pd.isna(gqa["prefill_ratio"])
    assert pd.isna(gqa["prefill_latency_vs_mha"])
    assert gqa["failed"] == 1
    assert gqa["params_vs_mha"] == pytest.approx(0.25)


def test_kernels_have_rows_of_their_own() -> None:
    table = summarise(store.table([record(), record(kernel="sdpa"), record("mqa")]))
    assert list(zip(table["variant"], table["kernel"], strict=True)) == [
        ("mha", "eager"), ("mha", "sdpa"), ("mqa", "eager"),
    ]  # fmt: skip


def test_an_empty_run_and_an_empty_measurement() -> None:
    assert summarise(store.table([])).empty
    bare: dict[str, Any] = dict.fromkeys(
        ("err_ratio", "max_abs_err", "err_budget", "params", "latency_ratio", "latency_ms")
    )
    row = only(summarise(store.table([record(status="error", kv_bytes_per_token=None, **bare)])), "mha")
    assert row[["worst_err_ratio", "worst_case_id", "params_min", "kv_bytes_per_token_min"]].isna().all()


def test_verdict() -> None:
    rows = [record(), record(status="degraded", err_ratio=9.0, mask="x"), record(status="mismatch", err_ratio=math.inf),
            record(status="error", err_ratio=None)]  # fmt: skip
    verdict = judge(store.table(rows))
    assert verdict.statuses == {"ok": 1, "degraded": 1, "mismatch": 1, "error": 1}
    assert not verdict.passed
    assert verdict.worst_err_ratio == math.inf
    assert verdict.unjudged == 1
    assert judge(store.table(rows[:2])).passed
    assert [story.headline(judge(store.table(part))) for part in (rows[:1], rows[:2], rows)] == [
        "EQUAL", "ROUNDED WORSE", "NOT EQUAL"
    ]  # fmt: skip
    assert not judge(store.table([])).passed
    bad = not_ok(store.table([record(status="unsupported"), *rows]))["status"].tolist()
    assert bad == ["mismatch", "error", "degraded", "unsupported"]


def show(rows: list[Record], width: int = 80, **attrs: Any) -> str:
    table = store.table(rows)
    table.attrs |= attrs
    return printed(lambda console: print_summary(table, console, folder=Path("results/x")), width)


def all_variants() -> list[Record]:
    return [record(variant, seq_len=length, phase=phase, params=size, latency_ratio=1 + length / 1000)
            for variant, size in (("mha", 1_050_000), ("mqa", 590_000), ("gqa", 655_000), ("mla", 786_000))
            for length in (128, 512) for phase in ("prefill", "decode", "train")]  # fmt: skip


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_terminal_fits_and_tells_all(width: int) -> None:
    text = show(all_variants(), width, measured_share=0.713, elapsed=181.2)
    assert text.startswith("EQUAL  24 cells: 24 ok\n")
    assert "71 % of 181 s inside measured or compared calls" in text
    assert "results/x/" in text
    assert "1.05M" in text
    assert "0.56" in text
    tables = [line for line in text.split("\n") if "results/x" not in line]
    assert max(map(len, tables)) <= width
    assert ("What does it weigh?" in text) is (width < 100)
    assert "\x1b" not in text  # not a terminal


def test_terminal_lists_what_is_not_ok_and_caps_it() -> None:
    rows = [record(seq_len=n, status="error", error=HOSTILE, err_ratio=None) for n in range(23)]
    text = show([*rows, record("gqa", status="mismatch", err_ratio=240.0, worst_tensor="output")], 140)
    assert text.startswith("NOT EQUAL  24 cells: 1 mismatch, 23 error\n")
    assert text.count("ValueError: a|b [red]x[/red] \\x1b[31m") == 19
    assert "+4 more, see results.csv" in text
    assert "error 1.0e-07 = 240 N, budget 2.0e-07, in output" in text
    assert "23 failed without an error to compare" in text
    assert "Traceback" not in text
    assert "\x1b" not in text


def test_nothing_compared_is_no_success() -> None:
    assert show([]).startswith("NOTHING COMPARED")
    assert show([record(status="unsupported", err_ratio=None)]).startswith("NOTHING COMPARED")


def test_no_share_is_made_up() -> None:
    assert "inside measured" not in show([record()])


@pytest.mark.parametrize("fails", [True, False])
def test_findings_on_the_terminal(fails: bool) -> None:
    findings = [Finding("", "config", "other", False), Finding("a[red]", "params", "params 1 -> 2", fails)]
    text = printed(lambda console: print_findings(findings, console, suite="smoke"))
    assert text.startswith(
        "gate smoke: FAIL  1 failing, 1 to note" if fails else "gate smoke: PASS  0 failing, 2 to note"
    )
    assert "a[red]\n" in text
    assert "params: params 1 -> 2" in text
    assert "the whole run" in text


def cells_of(line: str) -> int:
    """Borders that GitHub sees: pipes that no backslash guards."""
    guarded = line.replace("\\\\", "").replace("\\|", "")
    return guarded.count("|")


def test_markdown_tables_hold_together_under_hostile_text() -> None:
    rows = [*all_variants(), record("gqa", kernel="x|y`z", status="error", error=HOSTILE, err_ratio=None)]
    frame = store.table(rows)
    frame.attrs |= {"measured_share": 0.5, "elapsed": 10.0}
    text = summary_markdown(frame, HERE, suite="a|<b>*")
    assert text.startswith("# a\\|&lt;b&gt;\\*: NOT EQUAL\n")
    tables = [block.split("\n") for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 6  # three questions, not ok, environment, all cells
    for table in tables:
        assert len({cells_of(line) for line in table}) == 1, table
    assert "<script>" not in text
    assert "\x1b" not in text
    assert "Traceback" not in text
    assert f"<details><summary>All {len(rows)} cells</summary>" in text
    assert len(tables[-1]) == len(rows) + 2
    assert "c0ffee (dirty)" in text
    assert "50 % of 10 s" in text


def test_markdown_of_an_empty_run() -> None:
    assert summary_markdown(store.table([]), None) == "# NOTHING COMPARED\n\n**0 cells**\n"


def test_rebuild_writes_everything_from_the_records(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "smoke")
    run.append(record(seconds=2.0, measured_seconds=1.5))
    run.append(record("mqa", seconds=2.0, measured_seconds=1.5, error="ümlaut"))
    store.write_environment(run.path, HERE)
    frame = report.rebuild(run.path)
    assert len(frame) == 2
    assert pd.read_parquet(run.path / store.PARQUET).equals(frame)
    first = (run.path / "summary.md").read_text(encoding="utf-8")
    assert "# run: EQUAL" in first
    assert "75 % of 4 s" in first
    report.rebuild(run.path, suite="smoke", elapsed=6.0)
    assert "# smoke: EQUAL" in (run.path / "summary.md").read_text(encoding="utf-8")
    assert "50 % of 6 s" in (run.path / "summary.md").read_text(encoding="utf-8")
    assert measured_share([record()]) == {}


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (pd.NA, "-"), (0, "0"), (8192, "8,192"), (9999, "9,999"), (576.5, "576.5"), (262_144, "262k"),
     (999_499, "999k"), (999_500, "1M"), (1_050_000, "1.05M"), (671e9, "671G"), (5e12, "5,000G")],
)  # fmt: skip
def test_counts(value: Any, text: str) -> None:
    assert fmt.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (math.nan, "-"), (0.5, "0.50"), (240.4, "240"), (1e9, "1.0e+09"), (math.inf, "inf")],
)
def test_ratios(value: Any, text: str) -> None:
    assert fmt.ratio(value) == text


def test_a_run_of_approximate_cells_is_not_called_equal() -> None:
    exact = record()
    sparse = record("gqa", rel_l1=0.05, sparsity=0.5, err_ratio=None)
    verdict = judge(store.table([exact, sparse]))
    assert (story.headline(verdict), verdict.approximate) == ("WITHIN LIMITS", 1)
    assert story.counts_line(verdict) == "2 cells: 2 ok (1 by error metrics)"
    assert story.headline(judge(store.table([exact]))) == "EQUAL"
    missed = record("gqa", rel_l1=0.5, sparsity=0.5, status="mismatch", error="rel_l1")
    assert story.headline(judge(store.table([exact, missed]))) == "NOT EQUAL"
