"""The history keeps every night, and finds a step at its night, between its commits, and none in noise."""

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness import store
from harness.__main__ import main
from harness.environment import Environment
from harness.gate import nights as files
from harness.gate.change_points import FEWEST, find_steps
from harness.gate.nights import COLUMNS, HistoryError
from harness.gate.trend import fewest_nights, trends
from harness.record import Record
from harness.report.trend import print_trends, trends_markdown
from tests.support import printed
from tests.support.records import HERE, folder, record

START = datetime(2026, 1, 1, 2, 17, tzinfo=UTC)
numbers = itertools.count()


def night(root: Path, *records: Record, day: float = 0, environment: Environment = HERE, suite: str = "smoke") -> Path:
    """Its files are as new as this test: the night is that of the folder's name."""
    path = root / f"run-{START + timedelta(days=day):%Y%m%dT%H%M%SZ}-{next(numbers)}"
    return folder(path, *records, suite=suite, config=f"name: {suite}\n", environment=environment)


def history(ratios: dict[str, list[float]], *, machine: str = "A", **columns: Any) -> pd.DataFrame:
    """One night a number; the commit of night 7 is c07."""
    rows = []
    for case_id, values in ratios.items():
        for day, value in enumerate(values):
            row: dict[str, Any] = dict.fromkeys(COLUMNS)
            row |= {"suite": "smoke", "time": pd.Timestamp(START + timedelta(days=day)), "run": f"{machine}{day}",
                    "commit": f"c{day:02}", "machine": machine, "cpu": machine, "cores": 2, "threads": 2,
                    "torch": "2.13", "python": "3.11", "numpy": "2", "platform": "Linux", "case_id": case_id,
                    "status": "ok", "latency_ratio": value}  # fmt: skip
            row |= {name: each[day] for name, each in columns.items()}
            rows.append(row)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def stepped(count: int, at: int, *, by: float = 0.05, noise: float = 0.01, seed: int = 0) -> list[float]:
    series = 1.5 * np.exp(np.random.default_rng(seed).normal(0, noise, count))
    series[at:] *= 1 + by
    return [float(value) for value in series]


# ---- keeping nights --------------------------------------------------------------------------------------------------


def test_a_night_has_a_row_per_cell_with_where_it_came_from(tmp_path: Path) -> None:
    run = night(tmp_path, record("a", latency_ratio=1.5, peak_bytes=9), record("b", status="error", err_ratio=None))
    path, is_new = files.add(run, tmp_path / "history")
    assert is_new
    assert path.parent == tmp_path / "history" / "smoke"
    assert path.name.startswith("20260101T021700Z-c0ffee-")
    frame = files.read("smoke", tmp_path / "history")
    assert list(frame.columns) == list(COLUMNS)
    first, second = frame.to_dict("records")
    assert (first["case_id"], first["status"], first["latency_ratio"], first["peak_bytes"]) == ("a", "ok", 1.5, 9)
    assert (first["commit"], first["torch"], first["cpu"], first["suite"]) == ("c0ffee", "2.13", HERE.cpu, "smoke")
    assert first["time"] == pd.Timestamp(START)
    assert (second["case_id"], second["status"]) == ("b", "error")
    assert pd.isna(second["latency_ratio"])
    assert pd.isna(second["err_ratio"])


def test_adding_never_touches_an_older_night_and_a_run_is_added_once(tmp_path: Path) -> None:
    runs = [night(tmp_path, record("a", latency_ratio=1.0 + day), day=day) for day in (1, 0, 2)]
    kept: dict[Path, bytes] = {}
    for run in runs:
        path, is_new = files.add(run, tmp_path / "history")
        assert is_new
        assert all(older.read_bytes() == data for older, data in kept.items())
        kept[path] = path.read_bytes()
    assert files.add(runs[0], tmp_path / "history") == (next(iter(kept)), False)
    assert len(list((tmp_path / "history" / "smoke").iterdir())) == 3
    assert files.read("smoke", tmp_path / "history")["latency_ratio"].tolist() == [1.0, 2.0, 3.0]  # by time


def test_a_copied_run_keeps_its_night(tmp_path: Path) -> None:
    older, newer = (night(tmp_path, record("a", latency_ratio=1.0 + day), day=day) for day in (0, 1))
    (tmp_path / "elsewhere").mkdir()
    copied = Path(shutil.copytree(older, tmp_path / "elsewhere" / older.name, copy_function=shutil.copyfile))
    (tmp_path / "latest").symlink_to(copied)
    for run in (newer, tmp_path / "latest"):
        files.add(run, tmp_path / "history")
    frame = files.read("smoke", tmp_path / "history")
    assert frame["latency_ratio"].tolist() == [1.0, 2.0]
    assert frame["time"][0] == pd.Timestamp(START)


@pytest.mark.parametrize("name", ["mine", "mine-20269999T999999Z"])
def test_a_folder_without_a_time_in_its_name_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    run = night(tmp_path, record("a")).rename(tmp_path / name)
    os.utime(run / store.RECORDS, (START.timestamp() + 60,) * 2)
    path, _ = files.add(run, tmp_path / "history")
    assert path.name.startswith("20260101T021800Z-")
    assert "no time in the folder's name, so 2026-01-01 02:18:00 UTC counts" in caplog.text


def test_two_suites_with_one_folder_name_are_not_mixed_up(tmp_path: Path) -> None:
    files.add(night(tmp_path, record("a"), suite="a b"), tmp_path / "history")
    assert len(files.read("a b", tmp_path / "history")) == len(files.read("a-b", tmp_path / "history")) == 1
    with pytest.raises(HistoryError, match="a night of suite 'a b', not of 'a/b'"):
        files.read("a/b", tmp_path / "history")
    files.add(night(tmp_path, record("a", seconds=1.0), day=1, suite="a/b"), tmp_path / "history")
    for name in ("a b", "a-b"):
        with pytest.raises(HistoryError, match="a night of suite 'a/b', not of 'a b'"):
            files.read(name, tmp_path / "history")


def test_a_run_without_commit_or_environment(tmp_path: Path) -> None:
    run = night(tmp_path, record("a"), environment=replace(HERE, commit=None, dirty=None, torch=None))
    path, _ = files.add(run, tmp_path / "history")
    assert "-nocommit-" in path.name
    assert pd.isna(files.read("smoke", tmp_path / "history")["commit"][0])


@pytest.mark.parametrize("damage", [b"", b"PAR1 not really", None, "column", "rows"])
def test_a_bad_file_is_named_and_the_others_stay(tmp_path: Path, damage: bytes | str | None) -> None:
    good, bad = (
        files.add(night(tmp_path, record("a", seconds=day), day=day), tmp_path / "history")[0] for day in (0.0, 1.0)
    )
    before = good.read_bytes()
    if damage is None:
        bad.write_bytes(bad.read_bytes()[:-50])  # cut off while it was being copied
    elif isinstance(damage, bytes):
        bad.write_bytes(damage)
    else:
        frame = pd.read_parquet(bad)
        (frame.drop(columns="commit") if damage == "column" else frame.iloc[:0]).to_parquet(bad)
    with pytest.raises(HistoryError, match=bad.name):
        files.read("smoke", tmp_path / "history")
    assert good.read_bytes() == before
    assert files.add(night(tmp_path, record("a", seconds=2.0), day=2), tmp_path / "history")[
        1
    ]  # tonight is kept all the same
    bad.unlink()
    assert len(files.read("smoke", tmp_path / "history")) == 2


def test_a_night_from_before_a_metric_was_kept_is_read(tmp_path: Path) -> None:
    path, _ = files.add(night(tmp_path, record("a")), tmp_path / "history")
    pd.read_parquet(path).drop(columns="peak_bytes").to_parquet(path)
    files.add(night(tmp_path, record("a", peak_bytes=7), day=1), tmp_path / "history")
    found = files.read("smoke", tmp_path / "history")["peak_bytes"]
    assert pd.isna(found[0]) and found[1] == 7


def test_what_is_no_night(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="no cells"):
        files.add(night(tmp_path), tmp_path / "history")
    with pytest.raises(HistoryError, match="has no nights"):
        files.read("smoke", tmp_path / "history")
    assert not list((tmp_path).glob("history/*/*"))


def test_an_unfinished_run_is_no_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = night(tmp_path, record("a"))
    whole = store.read(run)
    cut = store.Stored(whole.records, whole.manifest, ("b",))
    monkeypatch.setattr(store, "read", lambda folder: cut)
    monkeypatch.setattr(store.Stored, "lack", "incomplete: 1 of 2 cells")
    with pytest.raises(HistoryError, match="incomplete: 1 of 2 cells"):
        files.add(run, tmp_path / "history")


# ---- change points ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw",
    [
        lambda generator, n: generator.normal(0, 0.01, n),
        lambda generator, n: 0.01 * generator.standard_t(3, n),
        lambda generator, n: generator.normal(0, 0.01, n) + 0.08 * (generator.random(n) < 0.07),  # bad nights
    ],
    ids=["normal", "heavy tails", "bad nights"],
)
def test_pure_noise_has_no_step_in_95_of_100(draw: Callable[[np.random.Generator, int], Any]) -> None:
    generator = np.random.default_rng(7)
    series = [draw(generator, n) for n in (8, 30) for _ in range(100)]
    alarms = sum(bool(find_steps(each, seed=number)) for number, each in enumerate(series))
    # 5 % of 200 are 10; more than 17 are 1 in 100 by chance alone, and the draws are fixed.
    assert alarms <= 17


@pytest.mark.parametrize(("count", "at"), [(16, 8), (30, 20), (30, 27)])
def test_a_step_of_5_percent_in_1_percent_noise_is_found_at_its_night(count: int, at: int) -> None:
    found = [find_steps(np.log(stepped(count, at, seed=seed))) for seed in range(12)]
    right = sum(any(step.at == at for step in steps) for steps in found)
    near = sum(any(abs(step.at - at) <= 1 for step in steps) for steps in found)
    assert right >= 10
    assert near >= 11
    rises = [step.after - step.before for steps in found for step in steps if step.at == at]
    assert float(np.mean(rises)) == pytest.approx(np.log(1.05), abs=0.01)


def test_up_and_down_again_are_two_steps() -> None:
    series = np.array(stepped(40, 15, seed=3))
    series[25:] /= 1.05
    assert [step.at for step in find_steps(np.log(series))] == [15, 25]


def test_one_or_two_bad_nights_are_no_step() -> None:
    for first, height in ((20, 0.5), (20, 0.05), (28, 0.5), (0, 0.5)):
        series = np.log(stepped(30, 30))
        series[first : first + 2] += height
        assert find_steps(series) == ()


def test_a_short_or_constant_series_has_no_step() -> None:
    assert find_steps([1.0] * (2 * FEWEST - 1)) == ()
    assert find_steps([1.0] * 50) == ()
    with pytest.raises(ValueError, match="finite"):
        find_steps([1.0] * 10 + [float("nan")])


def test_a_step_without_any_noise_is_found() -> None:
    assert [step.at for step in find_steps([1.0] * 10 + [1.05] * 10)] == [10]


# ---- which commits ---------------------------------------------------------------------------------------------------


def test_the_commits_around_a_step_are_named() -> None:
    (trend,) = trends(history({"a": stepped(30, 20)}))
    (change,) = trend.changes
    assert (change.good, change.bad) == ("c19", "c20")
    assert change.kind == "worse"
    assert change.relative == pytest.approx(0.05, abs=0.01)
    assert change.also == ()


def test_software_that_changed_with_the_step_is_named() -> None:
    versions = ["2.13"] * 20 + ["2.14"] * 10
    ((change,),) = (trend.changes for trend in trends(history({"a": stepped(30, 20, by=-0.1)}, torch=versions)))
    assert change.also == ("torch 2.13 -> 2.14",)
    assert change.kind == "better"


def test_a_night_that_failed_leaves_a_gap_and_widens_the_range() -> None:
    values = stepped(30, 20)
    values[19] = float("nan")
    ((trend),) = trends(history({"a": values}))
    assert [(each.good, each.bad) for each in trend.changes] == [("c18", "c20")]
    assert np.isnan(trend.values[19])


def test_machines_are_not_mixed() -> None:
    fast, slow = stepped(20, 20), [2 * value for value in stepped(20, 20, seed=1)]
    mixed = pd.concat([history({"a": fast}), history({"a": slow}, machine="B")])
    found = trends(mixed.sort_values("time", kind="stable"))
    assert [(trend.machine.split(",")[0], len(trend.values), trend.changes) for trend in found] == [
        ("A", 20, ()),
        ("B", 20, ()),
    ]


def test_many_quiet_cells_give_no_false_change_and_hide_no_true_one() -> None:
    cells = {f"quiet{number}": stepped(30, 30, seed=100 + number) for number in range(60)}
    found = {trend.case_id: trend.changes for trend in trends(history(cells | {"slow": stepped(30, 20)}))}
    assert [case_id for case_id, changes in found.items() if changes] == ["slow"]


def test_a_lone_step_among_many_series_is_found() -> None:
    """Equal nights cost no permutation, and count as series all the same."""
    cells = {f"quiet{number}": [1.0] * 24 for number in range(600)}
    found = trends(history(cells | {"slow": stepped(24, 14)}))
    ((trend, change),) = ((trend, change) for trend in found for change in trend.changes)
    assert (trend.case_id, change.good, change.bad) == ("slow", "c13", "c14")
    assert change.p_value is not None
    assert change.p_value <= 0.05 / 601


def test_more_permutations_make_no_step_of_chance_surer() -> None:
    """The p-value of a step that is near chance is the same with and without them: they are for the clearest alone."""
    weak = np.log(stepped(16, 8, by=0.012, seed=2))
    (usual,), (finer,) = find_steps(weak), find_steps(weak, finest=50_000)
    assert usual == finer
    assert usual.p_value > 1e-4


def test_an_exact_metric_changes_at_every_night_that_differs() -> None:
    bytes_ = [100, 100, 100, 101, 101, 100]
    ((trend),) = trends(history({"a": stepped(6, 6)}, peak_bytes=bytes_), metric="peak_bytes")
    assert [(each.good, each.bad, each.after, each.p_value) for each in trend.changes] == [
        ("c02", "c03", 101.0, None),
        ("c04", "c05", 100.0, None),
    ]


def test_unknown_metrics_and_cells_are_named() -> None:
    frame = history({"a": [1.0]})
    with pytest.raises(HistoryError, match="'speed': known are latency_ratio"):
        trends(frame, metric="speed")
    with pytest.raises(HistoryError, match="no cell of the history is like 'b"):
        trends(frame, cells="b*")


# ---- the command -----------------------------------------------------------------------------------------------------


def test_from_runs_to_the_commit_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["trend"]) == 2
    assert "harness trend --add results/latest" in capsys.readouterr().err
    for day, value in enumerate(stepped(12, 6, by=0.2)):
        environment = replace(HERE, commit=f"{day:02}".ljust(40, "f"))
        run = night(tmp_path, record("a", latency_ratio=value), day=day, environment=environment)
        assert main(["trend", "--add", str(run)]) == 0
    assert capsys.readouterr().out.count("added results/history/smoke/") == 12
    assert main(["trend", "--add", str(run)]) == 0
    assert "already there: results/history/smoke/" in capsys.readouterr().out
    assert main(["trend", "smoke"]) == 0
    shown = capsys.readouterr().out
    assert "05ffffffffff..06ffffffffff" in shown
    assert "between 2026-01-06 02:17 and 2026-01-07 02:17" in shown
    assert " %  a\n" in shown
    assert "▁" in shown
    assert main(["trend", "--quiet", "--out", "trend.md"]) == 0
    assert capsys.readouterr().out == ""
    page = Path("trend.md").read_text()
    assert page.startswith("# Trend\n\n```text\ntrend smoke latency_ratio: 1 cell")
    assert "05ffffffffff..06ffffffffff" in page
    assert "\x1b" not in page
    assert main(["trend", "other", "--out", "trend.md"]) == 2
    assert "suites that have: smoke" in capsys.readouterr().err
    assert not Path("trend.md").exists()  # an older answer is none to this question


def test_a_cells_name_cannot_end_the_block_of_the_page() -> None:
    page = trends_markdown(trends(history({"a````b": stepped(20, 10, by=0.3)})), suite="s", metric="latency_ratio")
    assert page.startswith("# Trend\n\n`````text\n")
    assert page.endswith("\n`````\n")


def shown(frame: pd.DataFrame, metric: str = "latency_ratio") -> str:
    found = trends(frame, metric=metric)
    return printed(lambda console: print_trends(found, console, suite="s", metric=metric), width=100)


@pytest.mark.parametrize("cells", [1, 3, 32])
def test_too_few_nights_are_not_called_no_change(cells: int) -> None:
    """A step that nobody could miss is found with just the nights that are said to be needed."""
    enough = fewest_nights("latency_ratio", cells)

    def nights(count: int, *, by: float, seed: int = 0) -> pd.DataFrame:
        quiet = {f"quiet {seed}": stepped(count, count, seed=seed) for seed in range(1, cells)}
        return history(quiet | {"a": stepped(count, count // 2, by=by, seed=seed)})

    for count in (1, 2, enough - 1):
        text = shown(nights(count, by=0.0))
        assert f"too few nights to tell; a change in one cell alone needs {enough}" in text
        assert "no change" not in text
    assert all("1 change" in shown(nights(enough, by=2.0, seed=100 + seed)) for seed in range(5))
    text = shown(nights(enough, by=0.0))
    assert "no change" in text and "too few" not in text


def test_a_change_that_all_cells_share_is_told_by_fewer_nights() -> None:
    few = fewest_nights("latency_ratio", 1)
    frame = history({f"{seed}": stepped(few, few // 2, by=1.0, seed=seed) for seed in range(12)})
    assert few < fewest_nights("latency_ratio", 12)
    assert "12 changes" in shown(frame)


def test_series_with_too_few_nights_are_counted() -> None:
    enough = fewest_nights("latency_ratio", 3)
    gaps = stepped(enough - 4, enough) + [float("nan")] * 4
    never = [float("nan")] * enough  # an unsupported cell has no time, and never will
    text = shown(history({"a": stepped(enough, enough), "b": gaps, "c": never}))
    assert "no change" in text
    assert f"1 of 3 series have fewer than {enough} nights: too few to tell" in text


def test_an_exact_metric_needs_two_nights() -> None:
    assert "a change in one cell alone needs 2" in shown(history({"a": [1.0]}, peak_bytes=[9]), "peak_bytes")
    assert "no change" in shown(history({"a": [1.0, 1.0]}, peak_bytes=[9, 9]), "peak_bytes")


def test_the_same_commit_on_both_sides_is_said() -> None:
    frame = history({"a": stepped(20, 10, by=0.3)}, commit=["c00"] * 20)
    text = printed(lambda console: print_trends(trends(frame), console, suite="s", metric="latency_ratio", every=True))
    assert "the code is the same" in text


@pytest.mark.parametrize("commits", [["c00"] * 20, [f"c{day:02}" for day in range(20)]])
def test_changes_that_were_not_committed_are_said(commits: list[str]) -> None:
    frame = history({"a": stepped(20, 10, by=0.3)}, commit=commits, dirty=[day == 10 for day in range(20)])
    shown = trends_markdown(trends(frame), suite="s", metric="latency_ratio")
    assert "with changes that were not committed" in shown and "the code is the same" not in shown
