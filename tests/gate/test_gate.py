"""Every rule of the exact gate, broken on purpose."""

import hashlib
import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness import store
from harness.gate import exact
from harness.gate.baseline import accept, edited, read_baseline, read_gated_run
from harness.gate.exact import exact_findings
from harness.gate.findings import EXACT, PEAK, Finding, GateError
from harness.gate.worker import PROTOCOL
from harness.record import Record
from harness.suite.config import load_suite
from tests.support import ROOT
from tests.support.records import COUNTS, HERE, folder, record


def compare(before: list[Record], after: list[Record]) -> tuple[Finding, ...]:
    return exact_findings(store.table(after), store.table(before))


def gate(folder: Path, baseline: Path) -> tuple[Finding, ...]:
    return exact.gate(read_gated_run(folder), baseline)


def changed(before: dict[str, Any], after: dict[str, Any]) -> Finding | None:
    findings = compare([record(**before)], [record(**after)])
    assert len(findings) <= 1
    return findings[0] if findings else None


def test_the_same_run_passes() -> None:
    assert compare([record("a"), record("b")], [record("b"), record("a")]) == ()


@pytest.mark.parametrize("column", EXACT)
@pytest.mark.parametrize("step", [1, -1])
def test_one_more_or_less_fails(column: str, step: int) -> None:
    found = changed({}, {column: COUNTS[column] + step})
    assert found is not None
    assert found.fails
    assert found.kind == column
    assert str(COUNTS[column]) in found.message
    assert str(COUNTS[column] + step) in found.message


@pytest.mark.parametrize("column", EXACT)
def test_a_value_that_vanishes_or_appears_fails(column: str) -> None:
    lost, came = changed({}, {column: None}), changed({column: None}, {})
    assert lost is not None
    assert lost.fails
    assert "-> empty" in lost.message
    assert came is not None
    assert came.fails
    assert "empty ->" in came.message
    assert changed({column: None}, {column: None}) is None


def test_big_counts_are_compared_exactly() -> None:
    found = changed({"flops": 2**60}, {"flops": 2**60 + 1})
    assert found is not None
    assert found.fails


@pytest.mark.parametrize(
    ("before", "after", "fails"),
    [
        ("ok", "degraded", True), ("ok", "mismatch", True), ("ok", "unsupported", True), ("degraded", "oom", True),
        ("degraded", "unsupported", True), ("unsupported", "error", True), ("degraded", "ok", False),
        ("mismatch", "ok", False), ("mismatch", "error", True), ("mismatch", "timeout", True),
        ("mismatch", "oom", True), ("unsupported", "mismatch", True), ("timeout", "mismatch", False),
        ("error", "oom", False),
    ],
)  # fmt: skip
def test_status(before: str, after: str, fails: bool) -> None:
    found = changed({"status": before}, {"status": after})
    assert found is not None
    assert found.kind == "status"
    assert found.fails is fails
    assert found.message == f"{before} -> {after}"


@pytest.mark.parametrize(
    ("before", "after", "fails"),
    [
        (1.2, 2.4, False), (1.2, 2.41, True), (0.001, 0.9, False), (0.4, 1.0, False), (0.4, 1.01, True),
        (1.0, math.inf, True), (1.0, math.nan, True), (1.0, None, True), (1.2, 0.1, False),
    ],
)  # fmt: skip
def test_drift_of_the_error_ratio(before: float, after: float | None, fails: bool) -> None:
    found = changed({"err_ratio": before}, {"err_ratio": after})
    assert (found is not None and found.fails and found.kind == "err_ratio") is fails


def test_an_equal_cell_without_a_ratio_fails_even_if_the_baseline_has_none() -> None:
    found = changed({"err_ratio": None}, {"err_ratio": math.nan})
    assert found is not None
    assert found.fails
    nothing = {"status": "unsupported", "err_ratio": None}
    assert changed(nothing, nothing) is None


def test_missing_and_renamed_cells_fail_and_new_ones_are_told() -> None:
    assert [(one.kind, one.fails) for one in compare([record("a"), record("b")], [record("a")])] == [("missing", True)]
    renamed = compare([record("a")], [record("A")])
    assert [(one.case_id, one.kind, one.fails) for one in renamed] == [("a", "missing", True), ("A", "new", False)]


def test_a_renamed_cell_fails_with_the_name_it_may_have_now() -> None:
    old = [record("a-eager", kernel="eager"), record("b-eager", kernel="eager", mask="causal"), record("c", params=7)]
    new = [record("a-fast", kernel="fast"), record("b-fast", kernel="fast", mask="causal"), record("d", params=8)]
    messages = {one.case_id: one.message for one in compare(old, new) if one.kind == "missing"}
    assert messages == {
        "a-eager": "in the baseline, not in this run; renamed to a-fast?",
        "b-eager": "in the baseline, not in this run; renamed to b-fast?",
        "c": "in the baseline, not in this run: removed or renamed",  # other counts: another cell
    }


def test_a_cell_of_another_size_or_with_two_other_axes_is_no_rename() -> None:
    for other in ({"seq_len": 64, "flops": 500}, {"mask": "causal", "kernel": "fast"}):
        (missing,) = (one for one in compare([record("a")], [record("b", **other)]) if one.kind == "missing")
        assert "renamed to" not in missing.message


def test_one_new_cell_is_the_rename_of_one_missing_one() -> None:
    findings = compare([record("mha-1"), record("mha-2", mask="causal")], [record("mha-one")])
    messages = [one.message for one in findings if one.kind == "missing"]
    assert sum("renamed to mha-one?" in message for message in messages) == 1


@pytest.mark.parametrize(
    ("before", "after", "fails"),
    [(1000, 1001, True), (1000, 1000, None), (1000, 999, False), (2**60, 2**60 + 1, True)],
)
def test_peak_memory(before: int, after: int, fails: bool | None) -> None:
    found = changed({PEAK: before, "latency_ms": 1.0}, {PEAK: after, "latency_ms": 1.0})
    assert (None if found is None else found.fails) is fails
    if fails:
        assert found is not None
        assert found.message == f"{before} -> {after} (1 byte more)"


def test_a_peak_that_vanishes_fails_where_the_cell_was_timed() -> None:
    found = changed({PEAK: 1000}, {PEAK: None, "latency_ms": 1.0})
    assert found is not None
    assert found.fails
    assert "although the cell was timed" in found.message


def test_peaks_that_cannot_be_gated_are_noted_once() -> None:
    timed = [record("a", peak_bytes=9, latency_ms=1.0), record("b", peak_bytes=9, latency_ms=1.0)]
    untimed = [record("a"), record("b")]
    (untimed_run,) = compare(timed, untimed)
    (old_baseline,) = compare(untimed, timed)
    for found, words in ((untimed_run, "not timed in this run"), (old_baseline, "accept a new one")):
        assert (found.case_id, found.kind, found.fails) == ("", PEAK, False)
        assert "not gated in 2 cells" in found.message
        assert words in found.message


def test_on_another_machine_rounding_and_allocations_are_noted_and_counts_still_fail() -> None:
    before = store.table([record(err_ratio=0.6, peak_bytes=1000, latency_ms=1.0)])
    moved = store.table([record(err_ratio=1.9, peak_bytes=2000, latency_ms=1.0)])
    here, there = exact_findings(moved, before), exact_findings(moved, before, moved=("cpu", "torch"))
    assert [(one.kind, one.fails) for one in here] == [("err_ratio", True), (PEAK, True)]
    assert [(one.kind, one.fails) for one in there] == [("err_ratio", False), (PEAK, False)]
    assert all("noted only: cpu, torch changed" in one.message for one in there)
    for worse in ({"kv_cache_bytes": 4097}, {"status": "degraded"}, {"err_ratio": math.nan}):
        found = exact_findings(store.table([record(**worse)]), store.table([record()]), moved=("cpu",))
        assert [one.fails for one in found] == [True]


def test_a_new_cell_that_is_wrong_fails() -> None:
    (found,) = compare([record("a")], [record("a"), record("b", status="mismatch")])
    assert found.kind == "new"
    assert found.fails


def test_an_empty_run_fails() -> None:
    for baseline in ([], [record()]):
        (found,) = compare(baseline, [])
        assert found.kind == "empty_run"
        assert found.fails


def test_an_empty_baseline_fails() -> None:
    (found,) = compare([], [record("a"), record("b")])
    assert (found.case_id, found.kind, found.fails) == ("", "empty_baseline", True)
    assert "accept a run" in found.message


def test_no_message_repeats_its_kind_or_says_1_cells() -> None:
    worse: dict[str, Any] = {name: value + 1 for name, value in COUNTS.items()}
    worse |= {"status": "mismatch", "err_ratio": 9.0, PEAK: 1001}
    findings = [
        *compare([record(peak_bytes=1000)], [record(**worse, latency_ms=1.0)]),
        *compare([record(peak_bytes=1000)], [record(err_ratio=math.nan, peak_bytes=None, latency_ms=1.0)]),
        *compare([record(peak_bytes=1000)], [record(peak_bytes=999)]),
        *compare([record(peak_bytes=1000)], [record()]),
        *compare([record()], [record(peak_bytes=1000, latency_ms=1.0)]),
    ]
    assert {one.kind for one in findings} == {"status", *EXACT, "err_ratio", PEAK}
    assert [one for one in findings if one.message.startswith(one.kind)] == []
    assert sum("not gated in 1 cell:" in one.message for one in findings) == 2


def test_duplicates_fail() -> None:
    (found,) = compare([record("a")], [record("a"), record("a")])
    assert found == Finding("a", "duplicate", "2 times in the run", True)
    (found,) = compare([record("a"), record("a")], [record("a")])
    assert found.kind == "duplicate"
    assert found.fails


def test_a_table_without_a_gated_column_is_refused() -> None:
    with pytest.raises(GateError, match="baseline's table has no column flops"):
        exact_findings(store.table([record()]), store.table([record()]).drop(columns="flops"))


def test_no_baseline_tells_the_command(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="harness gate --accept"):
        gate(folder(tmp_path / "run", record()), tmp_path / "baseline")


def test_an_accepted_run_passes_its_own_gate(tmp_path: Path) -> None:
    awkward = (
        record("z", err_ratio=1.23456789, kv_bytes_per_token=0.1 + 0.2, flops=2**60 + 1, mask="NA"),
        record("a", status="error", err_ratio=math.inf, kv_heads=None, **dict.fromkeys(EXACT)),
        record("u", status="unsupported", err_ratio=None, kernel="a,b|c:ü"),
    )
    run = folder(tmp_path / "run", *awkward)
    text = accept(run, tmp_path / "baseline")
    assert text.startswith("baseline smoke: 3 cells at c0ffee: 3 new, 0 removed, 0 changed\n+ a  error")
    assert gate(run, tmp_path / "baseline") == ()
    table, about = read_baseline("smoke", tmp_path / "baseline")
    assert table["case_id"].tolist() == ["a", "u", "z"]
    assert table["mask"].tolist()[2] == "NA"
    assert about.commit == "c0ffee"
    assert about.environment == HERE
    assert len(about.config_sha256) == 64
    first = (tmp_path / "baseline" / "smoke.csv").read_bytes()
    assert accept(run, tmp_path / "baseline").splitlines()[0].endswith("0 new, 0 removed, 0 changed")
    assert (tmp_path / "baseline" / "smoke.csv").read_bytes() == first


def test_one_byte_more_fails_the_gate_on_disk(tmp_path: Path) -> None:
    accept(folder(tmp_path / "old", record()), tmp_path / "baseline")
    (found,) = gate(folder(tmp_path / "new", record(kv_cache_bytes=4097)), tmp_path / "baseline")
    assert found == Finding("a", "kv_cache_bytes", "4096 -> 4097", True)


def test_accepting_shows_what_changes(tmp_path: Path) -> None:
    accept(folder(tmp_path / "old", record("a"), record("b"), record("c")), tmp_path / "baseline")
    new = folder(tmp_path / "new", record("a", params=101, err_ratio=1.3), record("b"), record("d"))
    assert accept(new, tmp_path / "baseline").split("\n") == [
        "baseline smoke: 3 cells at c0ffee: 1 new, 1 removed, 1 changed",
        "~ a  params 100 -> 101; err_ratio 1.2 -> 1.3",
        "- c",
        "+ d  ok",
    ]
    assert gate(new, tmp_path / "baseline") == ()


def test_accepting_shows_another_machine_or_config_and_warns_of_failing_cells(tmp_path: Path) -> None:
    baseline = tmp_path / "baseline"
    accept(folder(tmp_path / "old", record()), baseline)
    moved = folder(
        tmp_path / "new", record(), config="name: smoke\nseed: 1\n", environment=replace(HERE, threads=1, commit="beef")
    )
    lines = accept(moved, baseline).splitlines()
    assert lines[1:] == ["~ threads 2 -> 1", "~ the config"]
    wrong = folder(tmp_path / "wrong", record(), record("b", status="error", error="ValueError: no"))
    assert "warning: 1 cell accepted as failing: b" in accept(wrong, baseline)


def test_a_cell_that_fails_now_is_told_once_with_its_own_words() -> None:
    nothing: dict[str, Any] = dict.fromkeys(("err_ratio", *COUNTS))
    broken = record(**nothing | {"status": "error", "error": "ValueError: boom\n  in gqa"})
    (found,) = compare([record()], [broken])
    assert (found.kind, found.message) == ("status", "ok -> error: ValueError: boom in gqa")
    (new,) = [each for each in compare([record("b")], [record("b"), broken]) if each.kind == "new"]
    assert new.fails and "its status is error: ValueError: boom in gqa" in new.message
    # A wrong answer still has its numbers, and each that differs is told.
    wrong = record(status="mismatch", error="output: 40 N", kv_cache_bytes=4097)
    assert {each.kind for each in compare([record()], [wrong])} == {"status", "kv_cache_bytes"}


def test_a_baseline_of_uncommitted_changes_is_warned_of(tmp_path: Path) -> None:
    dirty = folder(tmp_path / "dirty", record(), environment=replace(HERE, dirty=True))
    text = accept(dirty, tmp_path / "baseline")
    assert text.startswith("baseline smoke: 1 cell at c0ffee (dirty): 1 new")
    assert "\nwarning: accepted from c0ffee with changes that were not committed" in text
    clean = folder(tmp_path / "clean", record())
    (found,) = gate(clean, tmp_path / "baseline")
    assert (found.case_id, found.kind, found.fails) == ("", "baseline", False)
    assert "--base times something else" in found.message
    assert "warning" not in accept(clean, tmp_path / "baseline")
    assert gate(clean, tmp_path / "baseline") == ()


def test_a_baseline_that_lost_its_rows_fails_and_can_be_accepted_again(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", record("a"), record("b"))
    accept(run, tmp_path / "baseline")
    csv = tmp_path / "baseline" / "smoke.csv"
    csv.write_text(csv.read_text().splitlines(keepends=True)[0])
    found = gate(run, tmp_path / "baseline")
    assert [(one.kind, one.fails) for one in found] == [("edited_baseline", True), ("empty_baseline", True)]
    assert "2 new" in accept(run, tmp_path / "baseline")
    assert gate(run, tmp_path / "baseline") == ()


def test_a_baseline_that_was_edited_by_hand_fails(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", record("a"), record("b"))
    accept(run, tmp_path / "baseline")
    csv = tmp_path / "baseline" / "smoke.csv"
    accepted = csv.read_bytes()
    csv.write_bytes(accepted.replace(b"\n", b"\r\n"))  # as a checkout on another system may leave it
    assert gate(run, tmp_path / "baseline") == ()
    csv.write_bytes(b"".join(accepted.splitlines(keepends=True)[:-1]))
    edited, new = gate(run, tmp_path / "baseline")
    assert (edited.kind, edited.fails, new.case_id, new.kind, new.fails) == ("edited_baseline", True, "b", "new", False)
    assert "smoke.csv is not what was accepted" in edited.message and "smoke.json" in edited.message
    accept(run, tmp_path / "baseline")
    assert gate(run, tmp_path / "baseline") == ()


def set_hash(baseline: Path, digest: str | None) -> None:
    about = baseline / "smoke.json"
    kept = {k: v for k, v in json.loads(about.read_text()).items() if k != "table_sha256"}
    about.write_text(json.dumps(kept | ({} if digest is None else {"table_sha256": digest})))


def accept_table(baseline: Path) -> None:
    """The table as it is now, as if an older version had accepted it."""
    set_hash(baseline, hashlib.sha256((baseline / "smoke.csv").read_bytes()).hexdigest())


def test_a_baseline_without_a_hash_of_its_table_fails(tmp_path: Path) -> None:
    """Else an edit of the table is unseen as soon as one line of the file beside it is taken out, too."""
    run = folder(tmp_path / "run", record("a"), record("b"))
    accept(run, tmp_path / "baseline")
    set_hash(tmp_path / "baseline", None)
    (finding,) = gate(run, tmp_path / "baseline")
    assert (finding.kind, finding.fails) == ("edited_baseline", True)
    assert "smoke.json has no hash of" in finding.message and "accept a run" in finding.message


def test_an_incomplete_run_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = folder(tmp_path / "run", record("a"))
    accept(run, tmp_path / "baseline")
    cut = store.Stored(store.read(run).records, None, ("b",))
    monkeypatch.setattr(store, "read", lambda folder: cut)
    monkeypatch.setattr(store.Stored, "lack", "incomplete: 1 of 2 cells")
    assert gate(run, tmp_path / "baseline") == (Finding("", "incomplete", "1 of 2 cells; missing: b", True),)


def test_another_machine_or_config_is_told_and_is_no_failure(tmp_path: Path) -> None:
    accept(folder(tmp_path / "old", record()), tmp_path / "baseline")
    there = replace(HERE, torch="2.14", commit="other", memory_bytes=1)
    new = folder(tmp_path / "new", record(), config="name: smoke\nseed: 1\n", environment=there)
    assert gate(new, tmp_path / "baseline") == (
        Finding("", "config", "the config differs from the baseline's", False),
        Finding("", "environment", "torch 2.13 -> 2.14", False),
    )


@pytest.mark.parametrize(
    ("change", "fails"),
    [({"torch": "2.14"}, False), ({"cpu": "other"}, False), ({"threads": 1}, False), ({"pandas": "9"}, True)],
)
def test_drift_is_judged_by_where_it_was_measured(tmp_path: Path, change: dict[str, Any], fails: bool) -> None:
    accept(folder(tmp_path / "old", record(peak_bytes=1000, latency_ms=1.0)), tmp_path / "baseline")
    drifted = record(err_ratio=2.5, peak_bytes=1001, latency_ms=1.0)
    new = folder(tmp_path / "new", drifted, environment=replace(HERE, **change))
    found = [one for one in gate(new, tmp_path / "baseline") if one.case_id]
    assert [(one.kind, one.fails) for one in found] == [("err_ratio", fails), (PEAK, fails)]


def test_a_baseline_from_before_peak_memory_was_gated_still_gates(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", record(peak_bytes=1000, latency_ms=1.0))
    accept(run, tmp_path / "baseline")
    csv = tmp_path / "baseline" / "smoke.csv"
    pd.read_csv(csv).drop(columns=PEAK).to_csv(csv, index=False)
    accept_table(tmp_path / "baseline")
    (found,) = gate(run, tmp_path / "baseline")
    assert (found.kind, found.fails) == (PEAK, False)
    assert "accept a new one" in found.message
    assert "peak_bytes empty -> 1000" in accept(run, tmp_path / "baseline")


COMMITTED = ROOT / "results" / "baseline"


def test_there_is_a_baseline_for_each_suite_that_is_gated() -> None:
    assert sorted(path.stem for path in COMMITTED.glob("*.csv")) == ["default", "nightly", "smoke"]


@pytest.mark.parametrize("name", ["default", "nightly", "smoke"])
def test_a_committed_baseline_guards_every_cell_of_its_suite(name: str) -> None:
    table, about = read_baseline(name, COMMITTED)
    assert set(table["case_id"]) == {case.case_id for case in load_suite(ROOT / "configs" / f"{name}.yaml").cases}
    assert set(table["status"]) == {"ok"} and table[PEAK].notna().all()
    assert about.table_sha256 is not None and edited(about, COMMITTED) is None and about.warning is None


@pytest.mark.parametrize(
    "name",
    [
        "default",
        "smoke",
        pytest.param(
            "nightly",
            marks=pytest.mark.xfail(strict=True, reason="accepted before there was a timing protocol: accept it again"),
        ),
    ],
)
def test_the_commit_of_a_committed_baseline_can_be_timed(name: str) -> None:
    """`harness gate --base` checks it out and speaks with its harness/gate/worker.py."""
    commit = read_baseline(name, COMMITTED)[1].commit
    shown = subprocess.run(
        ["git", "show", f"{commit}:harness/gate/worker.py"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    if shown.returncode != 0 and not _has_all_commits():
        pytest.skip("no git, or a clone without its history")
    assert shown.returncode == 0, shown.stderr
    assert f"\nPROTOCOL = {PROTOCOL}\n" in shown.stdout


def _has_all_commits() -> bool:
    words = ["git", "rev-parse", "--is-shallow-repository"]
    asked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30)
    return asked.stdout.strip() == "false"


def test_what_cannot_be_a_baseline(tmp_path: Path) -> None:
    with pytest.raises(GateError, match="no cells"):
        accept(folder(tmp_path / "empty"), tmp_path / "baseline")
    with pytest.raises(store.StoreError, match="a is recorded twice"):
        accept(folder(tmp_path / "twice", record(), record()), tmp_path / "baseline")
    with pytest.raises(GateError, match="has no `name`"):
        accept(folder(tmp_path / "nameless", record(), config="grid: {}\n"), tmp_path / "baseline")
    assert not (tmp_path / "baseline").exists()


def test_a_broken_baseline_is_named(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", record())
    accept(run, tmp_path / "baseline")
    csv = tmp_path / "baseline" / "smoke.csv"
    csv.write_text(csv.read_text().replace("4096", "many"))
    with pytest.raises(GateError, match=r"smoke\.csv"):
        gate(run, tmp_path / "baseline")


@pytest.mark.parametrize("damage", ["no json", "no column", "no axis", "broken"])
def test_accepting_mends_a_broken_baseline_and_says_so(tmp_path: Path, damage: str) -> None:
    run, baseline = folder(tmp_path / "run", record()), tmp_path / "baseline"
    accept(run, baseline)
    csv, about = baseline / "smoke.csv", baseline / "smoke.json"
    match damage:
        case "no json":
            about.unlink()
        case "broken":
            about.write_text("{")
        case _:
            pd.read_csv(csv).drop(columns="flops" if damage == "no column" else "mask").to_csv(csv, index=False)
    with pytest.raises(GateError, match=r"accept a|broken"):
        gate(run, baseline)
    assert "warning: nothing could be compared" in accept(run, baseline)
    assert gate(run, baseline) == ()


def test_two_suites_with_one_file_name_are_not_mixed_up(tmp_path: Path) -> None:
    accept(folder(tmp_path / "a", record(), config="name: a b\n"), tmp_path / "baseline")
    with pytest.raises(GateError, match="baseline of suite 'a b', not of 'a/b'"):
        accept(folder(tmp_path / "c", record(), config="name: a/b\n"), tmp_path / "baseline")
    with pytest.raises(GateError, match="baseline of suite 'a b', not of 'a/b'"):
        gate(folder(tmp_path / "b", record(), config="name: a/b\n"), tmp_path / "baseline")


def test_frames_read_from_parquet_compare_too(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", record())
    store.write_tables(run, store.read_records(run))
    assert exact_findings(pd.read_parquet(run / store.PARQUET), store.load(run)) == ()


# An approximate kernel: no error ratio, but metrics

SKIPPING: dict[str, Any] = {
    "kernel": "sparse?topk=0.5", "err_ratio": None, "rel_l1": 0.04, "cosine": 0.9992, "sparsity": 0.5,
    "skipped_blocks": 8,
}  # fmt: skip


def test_an_approximate_run_passes_against_itself(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", record(**SKIPPING), record("b"))
    accept(run, tmp_path / "baseline")
    assert gate(run, tmp_path / "baseline") == ()
    failing = SKIPPING | {"status": "mismatch", "rel_l1": math.nan, "cosine": math.nan}
    assert changed(failing, failing) is None


@pytest.mark.parametrize(
    ("column", "value", "fails"),
    [
        ("rel_l1", 0.05, False), ("rel_l1", 0.0501, True), ("rel_l1", 0.01, False), ("rel_l1", math.nan, True),
        ("rel_l1", math.inf, True), ("cosine", 0.9988, False), ("cosine", 0.9987, True), ("cosine", math.nan, True),
        ("sparsity", 0.48, False), ("sparsity", 0.47, True), ("sparsity", 0.0, True), ("sparsity", 0.9, False),
    ],
)  # fmt: skip
def test_drift_of_an_approximate_kernel(column: str, value: float, fails: bool) -> None:
    found = changed(SKIPPING, SKIPPING | {column: value})
    assert (found is not None and found.fails and found.kind == column) is fails
    assert (found is None) is not fails


def test_below_its_floor_the_error_may_move() -> None:
    exact = SKIPPING | {"rel_l1": 1e-7, "cosine": 1.0}
    assert changed(exact, exact | {"rel_l1": 9e-4, "cosine": 1 - 9e-7}) is None
    assert changed(exact, exact | {"rel_l1": 1.1e-3}) is not None


def test_a_kernel_that_skips_no_more_or_for_the_first_time_is_seen() -> None:
    all_kept = SKIPPING | {"err_ratio": 1.2, "rel_l1": 1e-7, "cosine": 1.0, "sparsity": 0.0}
    assert changed(all_kept, all_kept) is None
    (less,) = compare([record(**SKIPPING)], [record(**all_kept)])
    assert (less.kind, less.fails) == ("sparsity", True)
    kinds = {found.kind for found in compare([record(**all_kept)], [record(**SKIPPING)]) if found.fails}
    assert kinds == {"rel_l1", "cosine"}


def test_a_kernel_that_is_no_more_judged_by_metrics_is_seen() -> None:
    judged = SKIPPING | {"err_ratio": 0.5, "rel_l1": None, "cosine": None, "sparsity": None}
    (found,) = compare([record(**SKIPPING)], [record(**judged)])
    assert (found.kind, found.fails) == ("sparsity", True) and "empty" in found.message
    # One that failed is told by its status, once.
    (found,) = compare([record(**SKIPPING)], [record(**judged | {"status": "oom", "err_ratio": None})])
    assert found.kind == "status"


def test_an_exact_kernel_does_not_become_approximate_unseen() -> None:
    found = compare([record()], [record(**SKIPPING | {"kernel": "eager"})])
    assert ("err_ratio", True) in [(one.kind, one.fails) for one in found]


def test_on_another_machine_the_metrics_are_noted_and_a_nan_fails(tmp_path: Path) -> None:
    accept(folder(tmp_path / "old", record(**SKIPPING)), tmp_path / "baseline")
    for value, fails in ((0.2, False), (math.nan, True)):
        run = folder(tmp_path / str(value), record(**SKIPPING | {"rel_l1": value}), environment=replace(HERE, cpu="B"))
        found = [(one.kind, one.fails) for one in gate(run, tmp_path / "baseline") if one.case_id]
        assert found == [("rel_l1", fails)]


def test_a_baseline_from_before_metrics_were_gated_still_gates(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", record(**SKIPPING), record("b"))
    accept(run, tmp_path / "baseline")
    csv = tmp_path / "baseline" / "smoke.csv"
    pd.read_csv(csv).drop(columns=["rel_l1", "cosine", "sparsity"]).to_csv(csv, index=False)
    accept_table(tmp_path / "baseline")
    (found,) = gate(run, tmp_path / "baseline")
    assert (found.kind, found.fails) == ("rel_l1", False)
    assert "not gated in 1 cell: the baseline has none; accept a new one" in found.message
    assert "rel_l1 empty -> 0.04" in accept(run, tmp_path / "baseline")
    assert gate(run, tmp_path / "baseline") == ()


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [("status", "banana", "must be one of ok"), ("status", "", "must be one of ok"),
     ("err_ratio", "inf", "err_ratio inf"), ("err_ratio", "-1", "err_ratio -1")],
)  # fmt: skip
def test_nonsense_in_a_baseline_does_not_loosen_it(tmp_path: Path, column: str, value: str, message: str) -> None:
    for name in ("smoke.csv", "smoke.json"):
        (tmp_path / name).write_bytes((ROOT / "results" / "baseline" / name).read_bytes())
    assert len(read_baseline("smoke", tmp_path)[0]) == 32
    table = pd.read_csv(tmp_path / "smoke.csv", dtype=str, keep_default_na=False)
    table.loc[3, column] = value
    table.to_csv(tmp_path / "smoke.csv", index=False)
    with pytest.raises(GateError, match=message):
        read_baseline("smoke", tmp_path)
