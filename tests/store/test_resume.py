"""A run that was cut short goes on exactly, or is refused with the reason; what is missing is always said."""

import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import harness
from bench import corrupt_study
from harness import environment, report, runner, store
from harness.__main__ import main
from harness.errors import BadInput
from harness.gate import baseline, exact
from harness.gate.findings import GateError
from harness.runner import Interrupted, run
from harness.store import StoreError
from harness.workers.crew import CannotStart
from harness.workers.interrupts import Terminated
from harness.workers.job import Here
from tests.rooms import reached, room_of
from tests.support import ROOT, python
from tests.support.runs import CONFIG, MadeUp, made_up

pytestmark = pytest.mark.usefixtures("beside_a_config")

OUT = Path("out")


def interrupted(out: Path | None = OUT, *, after: int = 2, **options: object) -> str:
    with pytest.raises(Interrupted) as caught:
        run("c.yaml", out, executor=MadeUp(stop_after=after), **options)  # type: ignore[arg-type]
    return str(caught.value)


def records_lines(folder: Path = OUT) -> list[bytes]:
    return (folder / store.RECORDS).read_bytes().splitlines(keepends=True)


# Going on


@pytest.mark.parametrize("backwards", [False, True])
def test_a_resumed_run_has_the_table_of_an_uninterrupted_one(backwards: bool) -> None:
    whole = run("c.yaml", "whole", executor=MadeUp())
    first = MadeUp(stop_after=2, backwards=backwards)
    with pytest.raises(Interrupted):
        run("c.yaml", OUT, executor=first)
    assert len(pd.read_parquet(OUT / store.PARQUET)) == 2  # what there is, is in the tables
    second, third = MadeUp(stop_after=3, backwards=backwards), MadeUp(backwards=backwards)
    with pytest.raises(Interrupted):
        run("c.yaml", OUT, executor=second, resume=True)
    resumed = run("c.yaml", OUT, executor=third, resume=True)
    done = first.done + second.done + third.done
    assert sorted(done) == sorted(whole["case_id"])  # each once
    assert [len(one.done) for one in (first, second, third)] == [2, 3, 1]
    pd.testing.assert_frame_equal(resumed, whole)
    for name in (store.CSV, store.PARQUET):
        assert (OUT / name).read_bytes() == (Path("whole") / name).read_bytes()
    assert [json.loads(line)["case_id"] for line in records_lines()] == done  # the file keeps the order of finishing


def test_a_finished_run_has_nothing_to_do() -> None:
    whole = run("c.yaml", OUT, executor=MadeUp())
    before, idle = records_lines(), MadeUp()
    again = run("c.yaml", OUT, executor=idle, resume=True, retry=True)
    assert idle.done == []
    assert records_lines() == before
    pd.testing.assert_frame_equal(again, whole)


class Disturbed(MadeUp):
    """An executor on a busy machine: cells are disturbed the first so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.again = times, list[str]()

    def run(self, jobs):
        for job in jobs:
            self.again += [job.case.case_id] * job.retime
            seen = self.done.count(job.case.case_id)
            self.done.append(job.case.case_id)
            timing = "disturbed" if seen < self.times else "ok"
            yield replace(
                made_up(job.case), timing=timing, latency_ms=float(seen + 1), err_ratio=0.1 * (not job.retime)
            )


TIMED = CONFIG.replace("timing: {enabled: false}", "timing: {budget_s: 0.01}")


def test_disturbed_cells_are_timed_again_later_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "AGAIN", math.inf)
    Path("c.yaml").write_text(TIMED)
    busy = Disturbed(times=1)
    frame = run("c.yaml", OUT, executor=busy)
    assert busy.done == 2 * frame["case_id"].tolist()  # all once, then all again
    assert busy.again == frame["case_id"].tolist()
    assert set(frame["timing"]) == {"ok"}
    assert set(frame["latency_ms"]) == {2.0}
    assert set(frame["err_ratio"]) == {0.1}  # judged the first time


def test_timing_again_ends_with_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "AGAIN", 0.0)
    Path("c.yaml").write_text(TIMED)
    busy = Disturbed(times=1)
    frame = run("c.yaml", OUT, executor=busy)
    assert len(busy.again) == 1
    assert frame["timing"].value_counts().to_dict() == {"disturbed": 5, "ok": 1}
    with pytest.raises(BadInput, match="add --resume"):
        run("c.yaml", OUT, executor=busy, retime=True)
    frame = run("c.yaml", OUT, executor=busy, resume=True)
    assert len(busy.again) == 1  # only when asked
    frame = run("c.yaml", OUT, executor=busy, resume=True, retime=True)
    assert len(busy.again) == 6
    assert set(frame["timing"]) == {"ok"}


CONTEST = CONFIG.replace("timing: {enabled: false}", "contest: variant\nagainst: mha\ntiming: {budget_s: 0.01}")


class Contests(MadeUp):
    """An executor that judges, and times whole contests; the first `hit` of them beside a busy neighbour."""

    def __init__(self, *, hit: int = 0, stop_after: int | None = None) -> None:
        super().__init__()
        self.hit, self.left, self.held = hit, stop_after, list[str]()

    def run(self, jobs):
        for job in jobs:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left = None if self.left is None else self.left - 1
            if not job.rivals:
                assert not job.timing.enabled
                yield made_up(job.case)
                continue
            self.held.append(job.case.case_id)
            names = [case.case_id for case in (job.case, *job.rivals)]
            share = 0.9 * (len(self.held) <= self.hit)
            yield replace(made_up(job.case), samples_s={name: [1.0 + at] * 12 for at, name in enumerate(names)},
                          waited={name: [share] * 12 for name in names})  # fmt: skip


def test_contests_are_held_once_all_cells_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "AGAIN", math.inf)
    Path("c.yaml").write_text(CONTEST)
    machine = Contests(hit=2)
    frame = run("c.yaml", OUT, executor=machine)
    assert len(machine.held) == 3 + 2  # two of the three were disturbed, and are held again
    assert set(frame["timing"]) == {"ok"}
    assert dict(zip(frame["variant"], frame["ratio_to"].round(6), strict=True)) == {"mha": 1.0, "mqa": 2.0}
    assert set(frame["against"]) == set(frame.loc[frame["variant"] == "mha", "case_id"])
    with pytest.raises(BadInput, match="a contest times together"):
        run("c.yaml", "elsewhere", executor=machine, shard=(1, 2))


@pytest.mark.parametrize("after", [2, 6, 8])
def test_a_run_with_contests_goes_on_where_it_was_cut_short(after: int) -> None:
    Path("c.yaml").write_text(CONTEST)
    with pytest.raises(Interrupted):
        run("c.yaml", OUT, executor=Contests(stop_after=after))
    machine = Contests()
    frame = run("c.yaml", OUT, executor=machine, resume=True)
    assert len(machine.held) == 3 - max(0, after - 6)
    assert set(frame["timing"]) == {"ok"}
    assert frame["ratio_to"].notna().all()


def test_cells_that_are_not_equal_hold_no_contest() -> None:
    Path("c.yaml").write_text(CONTEST)

    class Wrong(Contests):
        def run(self, jobs):
            for record in super().run(jobs):
                yield replace(record, status="mismatch") if record.variant == "mqa" else record

    machine = Wrong()
    frame = run("c.yaml", OUT, executor=machine)
    assert machine.held == []
    assert set(frame["timing"]) == {"none"}


def test_a_run_that_never_began_starts_afresh() -> None:
    interrupted(after=0)
    (OUT / store.RECORDS).unlink()  # killed before its records file was made
    (OUT / store.ENVIRONMENT).unlink()
    assert len(run("c.yaml", OUT, executor=MadeUp(), resume=True)) == 6
    assert len(run("c.yaml", "elsewhere", executor=MadeUp(), resume=True)) == 6


def test_without_out_the_latest_run_goes_on() -> None:
    with pytest.raises(StoreError, match=r"there is no results/latest to resume"):
        run("c.yaml", executor=MadeUp(), resume=True)
    interrupted(None)
    frame = run("c.yaml", executor=MadeUp(), resume=True)
    assert len(frame) == 6
    assert Path(frame.attrs["folder"]).resolve() == Path("results/latest").resolve()
    assert len(list(Path("results").iterdir())) == 2  # one folder, and the link to it
    Path("c.yaml").write_text(CONFIG.replace("tiny", "other"))
    with pytest.raises(StoreError, match=r"is another run: suite tiny -> other"):
        run("c.yaml", executor=MadeUp(), resume=True)


def test_retry_repeats_what_failed_and_the_new_record_counts() -> None:
    run("c.yaml", OUT, executor=MadeUp(statuses={"mha": "timeout", "mqa": "mismatch"}))
    idle = MadeUp()
    run("c.yaml", OUT, executor=idle, resume=True)
    assert idle.done == []
    again = MadeUp(stop_after=1, statuses={"mha": "oom"})
    with pytest.raises(Interrupted):
        run("c.yaml", OUT, executor=again, resume=True, retry=True)
    last = MadeUp()
    frame = run("c.yaml", OUT, executor=last, resume=True, retry=True)
    assert list(frame["status"]) == ["ok"] * 3 + ["mismatch"] * 3  # a mismatch is a finding, and stays one
    assert len(last.done) == 3
    attempts = [(json.loads(line)["status"], json.loads(line)["attempt"]) for line in records_lines()]
    assert attempts == [("timeout", 1)] * 3 + [("mismatch", 1)] * 3 + [("oom", 2), ("ok", 3), ("ok", 2), ("ok", 2)]


def test_the_hint_of_an_interrupted_retry_goes_on_with_it() -> None:
    run("c.yaml", OUT, executor=MadeUp(statuses={"mha": "timeout"}))
    told = interrupted(after=1, resume=True, retry=True, command=["run", "c.yaml"])
    assert told.startswith("interrupted after 4 of 6 cells; go on with: ")  # three were ok, and one is now
    assert told.endswith("run c.yaml --resume --retry --out out")
    assert "resume=True, retry=True)" in interrupted(after=1, resume=True, retry=True)


def test_a_torn_last_line_is_cut_off_and_its_case_repeated(caplog: pytest.LogCaptureFixture) -> None:
    interrupted(after=3)
    path = OUT / store.RECORDS
    path.write_bytes(path.read_bytes()[:-20])
    one = MadeUp(stop_after=1)
    with pytest.raises(Interrupted):
        run("c.yaml", OUT, executor=one, resume=True)
    assert f"{path}:3: torn last line" in caplog.text
    assert f"{path}: the torn last line was cut off" in caplog.text
    path.write_bytes(path.read_bytes()[:-1])  # only its newline is missing
    frame = run("c.yaml", OUT, executor=MadeUp(), resume=True)
    assert list(frame["status"]) == ["ok"] * 6
    assert len(records_lines()) == 6


# Changes


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("seed", ["config: line 3: 'timing: {enabled: false}' -> 'seed: 5'", "seed: 0 -> 5"]),
        ("code", ["code: c0de -> c0de2"]),
        ("kernel", ["kernel eager: mine.py sha256:1111 -> mine.py sha256:2222"]),
        ("torch", ["torch: ", " -> 9.9"]),
        ("cpu", ["cpu: ", " -> abacus"]),
        ("threads", ["threads: 1 -> 64"]),
    ],
)
def test_what_changed_is_named_with_both_values(what: str, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted()
    executor = MadeUp()
    honest = environment.collect
    changed: dict[str, dict[str, Any]] = {
        "torch": {"torch": "9.9"},
        "cpu": {"cpu": "abacus"},
        "threads": {"threads": 64},
    }
    if what == "seed":
        Path("c.yaml").write_text(CONFIG.replace("timing", "seed: 5\ntiming"))
    elif what == "code":
        monkeypatch.setattr(store, "code_sha256", lambda: "c0de2")
    elif what == "kernel":
        executor.origin = "mine.py sha256:2222"
    else:
        monkeypatch.setattr(environment, "collect", lambda threads: replace(honest(threads), **changed[what]))
    before = {path.name: path.read_bytes() for path in OUT.iterdir()}
    with pytest.raises(StoreError) as caught:
        run("c.yaml", OUT, executor=executor, resume=True)
    for part in [*told, "--even-if-changed"]:
        assert part in str(caught.value)
    assert {path.name: path.read_bytes() for path in OUT.iterdir()} == before
    assert executor.done == []
    frame = run("c.yaml", OUT, executor=executor, resume=True, even_if_changed=True)
    assert len(frame) == 6
    summary = (OUT / "summary.md").read_text()
    assert "put together although these changed" in summary
    assert told[-1] in summary
    run("c.yaml", OUT, executor=executor, resume=True)  # from now on that is what it is


@pytest.mark.parametrize("killed_at", [1, 2, 3])
def test_a_kill_while_it_is_written_what_changed_leaves_a_run_that_goes_on(
    killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted()
    changed = CONFIG.replace("timing", "seed: 5\ntiming")
    Path("c.yaml").write_text(changed)
    write, written = store.files.write_atomically, 0

    def killed(path: Path, data: bytes) -> None:
        nonlocal written
        written += 1
        if written == killed_at:
            raise SystemExit
        write(path, data)

    elsewhere = replace(environment.collect(1), cpu="abacus")
    monkeypatch.setattr(environment, "collect", lambda threads: elsewhere)
    with monkeypatch.context() as patched:
        for module in (store.manifest,):
            patched.setattr(module, "write_atomically", killed)
        with pytest.raises(SystemExit):
            run("c.yaml", OUT, executor=MadeUp(), resume=True, even_if_changed=True)
    # Before the first of the three was written nothing had changed, afterwards all had.
    assert len(run("c.yaml", OUT, executor=MadeUp(), resume=True, even_if_changed=killed_at == 1)) == 6
    about = store.About.read(OUT)
    assert about.config == (OUT / store.CONFIG).read_text() == changed
    assert about.environment == store.read_environment(OUT)


def test_what_moves_no_number_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted()
    honest = environment.collect
    monkeypatch.setattr(environment, "collect", lambda threads: replace(honest(threads), commit="abc", memory_bytes=1))
    moved = MadeUp(origin="/elsewhere/mine.py sha256:1111")
    assert len(run("c.yaml", OUT, executor=moved, resume=True)) == 6


@pytest.mark.parametrize("even_if_changed", [False, True])
def test_other_cells_are_another_run(even_if_changed: bool) -> None:
    interrupted()
    for options, told in (
        ({"shard": (1, 2)}, "shard none -> 1/2"),
        ({"kernels": ["sdpa"]}, "kernels eager -> sdpa"),
    ):
        with pytest.raises(StoreError, match=told):
            run("c.yaml", OUT, executor=MadeUp(), resume=True, even_if_changed=even_if_changed, **options)


def test_a_grid_that_lost_a_finished_cell_is_refused() -> None:
    interrupted()
    Path("c.yaml").write_text(CONFIG.replace("[4, 6, 8]", "[6, 8]"))
    with pytest.raises(StoreError, match=r"records\.jsonl:1: mha-.*-l4-.* is not a cell of this run"):
        run("c.yaml", OUT, executor=MadeUp(), resume=True, even_if_changed=True)
    Path("c.yaml").write_text(CONFIG.replace("[4, 6, 8]", "[4, 6, 8, 10]"))
    assert len(run("c.yaml", OUT, executor=MadeUp(), resume=True, even_if_changed=True)) == 8


def test_options_that_need_resume() -> None:
    for options in ({"retry": True}, {"even_if_changed": True}):
        with pytest.raises(BadInput, match="add --resume"):
            run("c.yaml", OUT, executor=MadeUp(), **options)  # type: ignore[arg-type]
    assert not OUT.exists()


# What is missing


def test_a_file_cut_at_the_end_of_a_line_is_not_silently_shorter(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = run("c.yaml", OUT, executor=MadeUp(), command=["run", "c.yaml"])
    baseline.accept(OUT, Path("baseline"))
    assert not any(finding.fails for finding in exact.gate(baseline.read_gated_run(OUT), Path("baseline")))
    (OUT / store.RECORDS).write_bytes(b"".join(records_lines()[:-1]))
    lost = frame["case_id"].iloc[-1]
    assert harness.load(OUT).attrs["missing"] == [lost]
    assert f"out is incomplete: 5 of 6 cells; missing: {lost}" in caplog.text
    failing = [finding for finding in exact.gate(baseline.read_gated_run(OUT), Path("baseline")) if finding.fails]
    assert ("", "incomplete") in {(finding.case_id, finding.kind) for finding in failing}
    with pytest.raises(GateError, match="5 of 6 cells"):
        baseline.accept(OUT, Path("baseline"))
    assert main(["report", str(OUT)]) == 0
    told = capsys.readouterr().out
    assert not told.startswith("EQUAL")
    assert "incomplete: 5 of 6 cells, resume with: " in told
    assert "incomplete: 5 of 6 cells, resume with: " in (OUT / "summary.md").read_text()
    assert not report.summary.judge(report.rebuild(OUT)).passed


def test_a_record_of_no_planned_cell_is_refused() -> None:
    interrupted(after=1)
    other = json.loads(records_lines()[0]) | {"case_id": "of another run"}
    del other["crc32"]
    with (OUT / store.RECORDS).open("ab") as file:
        file.write(store.records.seal(json.dumps(other).encode()))
    with pytest.raises(StoreError, match=r"records\.jsonl:2: of another run is not a cell of this run"):
        harness.load(OUT)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data["case_ids"].pop(), "checksum"),
        (lambda data: data.update(cells=5), "the length or the checksum"),
        (lambda data: data.pop("seed"), "seed"),
        (lambda data: data.update(shard=[3, 2]), "shard"),
        (lambda data: data.update(kernels=None), "kernels"),
        (lambda data: data.update(suite=3), "suite must be text"),
    ],
)
def test_a_broken_manifest_is_refused(change, told: str) -> None:
    interrupted()
    path = OUT / store.MANIFEST
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    for reader in (harness.load, report.rebuild, store.About.read):
        with pytest.raises(StoreError, match=rf"run\.json: broken: .*{told}"):
            reader(OUT)
    path.write_bytes(b"\xff{")
    with pytest.raises(StoreError, match=r"run\.json: broken"):
        harness.load(OUT)


def test_the_manifest_says_what_ran() -> None:
    run("c.yaml", OUT, executor=MadeUp(), shard=(2, 4), command=["run", "c.yaml"])
    data = json.loads((OUT / "run.json").read_text())
    assert (data["suite"], data["seed"], data["shard"], data["cells"]) == ("tiny", 0, [2, 4], 2)
    assert data["config_sha256"] == baseline.read_gated_run(OUT).config_sha256
    assert data["kernels"] == {"eager": "mine.py sha256:1111"}
    assert len(data["case_ids"]) == 6


def test_a_users_kernel_is_named_with_its_file_and_hash(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("def f(*a, **k): ...\n")
    run("c.yaml", OUT, executor=MadeUp(), kernels=["mine.py:f"])
    assert "kernel mine.py:f from mine.py sha256:1111" in (OUT / "summary.md").read_text()
    main(["report", str(OUT)])
    assert "kernel mine.py:f from mine.py sha256:1111" in capsys.readouterr().out


def test_the_code_hash_follows_what_can_change_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    package = tmp_path / "harness"
    shutil.copytree(ROOT / "harness", package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(harness, "__file__", str(package / "__init__.py"))
    hashes = [store.manifest.code_sha256()]
    for name, text in (
        ("case.py", "1"),
        ("case.py", "2"),
        ("cell/rule.py", "1"),
        ("kernels/new.py", ""),
        ("kernels/blocksparse/deep.py", "1"),
    ):
        (package / name).write_text(text)
        hashes.append(store.manifest.code_sha256())
    assert len(set(hashes)) == 6
    for name in ("cell/note.txt", "report/story.py", "gate/exact.py", "commands/run.py", "store/files.py", "runner.py"):
        (package / name).write_text("edited")
        assert store.manifest.code_sha256() == hashes[-1], name


def test_what_is_hashed_is_what_a_worker_reaches() -> None:
    rooms = {room_of(module) for module in reached("harness.workers.worker", ROOT)}
    assert rooms == set(store.manifest.MEASURING)


# Stopping


def test_an_interrupt_before_the_folder_exists_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Impatient(MadeUp):
        def origins(self, kernels):
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "make_executor", lambda name, jobs, limits: Impatient())
    assert main(["run", "c.yaml", "--out", "out"]) == 130
    assert capsys.readouterr().err == "harness: interrupted before the first case; nothing was written\n"
    assert not OUT.exists()


def test_sigterm_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Stopped(MadeUp):
        def run(self, jobs):
            yield from super().run(jobs[:1])
            raise Terminated

    monkeypatch.setattr(runner, "make_executor", lambda name, jobs, limits: Stopped())
    assert main(["run", "c.yaml", "--out", "out"]) == 143
    assert "interrupted after 1 of 6 cells; go on with: " in capsys.readouterr().err


def test_whatever_stops_an_executor_the_run_says_how_to_go_on() -> None:
    class Stuck(MadeUp):
        def run(self, jobs):
            yield from super().run(jobs[:1])
            raise CannotStart("no worker process can start")

    with pytest.raises(
        BadInput, match=r"no worker process can start\nstopped after 1 of 6 cells; go on with: .*resume"
    ):
        run("c.yaml", OUT, executor=Stuck())


def test_a_job_without_a_record_is_an_error_and_not_a_shorter_run() -> None:
    class Forgetful(MadeUp):
        def run(self, jobs):
            yield from super().run(jobs[1:])

    with pytest.raises(
        StoreError, match=r"no record came back for mha-\S*-l4-.*\nstopped after 5 of 6 cells; go on with"
    ):
        run("c.yaml", OUT, executor=Forgetful())


def test_a_latest_run_that_is_gone_is_named() -> None:
    interrupted(None)
    folder = Path("results") / Path("results/latest").readlink()
    folder.rename("elsewhere")
    with pytest.raises(StoreError, match=rf"results/latest points to {folder.name}, which is gone; name .* --out"):
        run("c.yaml", executor=MadeUp(), resume=True)


MINE = "from torch.nn.functional import scaled_dot_product_attention as f\n"


def test_a_kernel_that_is_edited_during_the_run_is_not_mixed_into_it() -> None:
    class Edited(Here):
        def run(self, jobs):
            for number, record in enumerate(super().run(jobs)):
                if number == 1:
                    Path("mine.py").write_text(MINE + "# edited\n")
                yield record

    Path("mine.py").write_text(MINE)
    frame = run("c.yaml", OUT, executor=Edited(), kernels=["mine.py:f"])
    assert list(frame["status"]) == ["ok"] * 2 + ["error"] * 4
    ((error, _),) = frame["error"].dropna().value_counts().items()
    assert re.fullmatch(
        r"mine\.py changed during the run: (sha256:\w{16}) -> (?!\1)sha256:\w{16}; "
        "start a new run, or --resume --even-if-changed --retry",
        str(error),
    )
    options = {"resume": True, "retry": True, "kernels": ["mine.py:f"], "executor": "here"}
    with pytest.raises(StoreError, match=r"kernel mine.py:f: .* -> "):
        run("c.yaml", OUT, **options)  # type: ignore[arg-type]
    again = run("c.yaml", OUT, even_if_changed=True, **options)  # type: ignore[arg-type]
    assert list(again["status"]) == ["ok"] * 6


def test_the_hint_of_an_interrupt_is_a_command_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Path("a folder; with $odd 'name'")
    told = interrupted(out, shard=(1, 2), command=["run", "c.yaml", "--shard", "1/2", "--executor", "here"])
    assert told.startswith("interrupted after 2 of 3 cells; go on with: ")
    words = shlex.split(told.partition("go on with: ")[2])
    assert words[-3:] == ["--resume", "--out", str(out)]
    monkeypatch.setattr(runner, "make_executor", lambda name, jobs, limits: MadeUp())
    assert main(words[words.index("run") :]) == 0
    assert len(harness.load(out)) == 3


def test_a_disk_that_fills_up_stops_the_run_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "make_executor", lambda name, jobs, limits: MadeUp())
    write, written = os.write, 0

    def full(handle: int, data: bytes) -> int:
        nonlocal written
        if not os.readlink(f"/proc/self/fd/{handle}").endswith(store.RECORDS):
            return write(handle, data)
        written += 1
        if written == 4:
            raise OSError(28, "No space left on device")
        return write(handle, data[:100] if written == 3 else data)

    monkeypatch.setattr(os, "write", full)
    assert main(["run", "c.yaml", "--out", "out"]) == 2
    told = capsys.readouterr().err
    assert "out/records.jsonl: cannot be written: No space left on device; cut back to its last whole line" in told
    assert "stopped after 2 of 6 cells; go on with: " in told
    monkeypatch.setattr(os, "write", write)
    assert len(records_lines()) == 2
    assert main([*shlex.split(told.partition("go on with: ")[2])[-5:]]) == 0


def test_a_dry_run_shows_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(after=2)
    for options, cells in (([], 6), (["--resume"], 4)):
        assert main(["run", "c.yaml", "--out", "out", "--dry-run", *options]) == 0
        assert capsys.readouterr().out.startswith(f"tiny: {cells} cells would run")
    run("c.yaml", "failed", executor=MadeUp(statuses={"mqa": "error"}))
    assert main(["run", "c.yaml", "--out", "failed", "--dry-run", "--resume", "--retry"]) == 0
    assert capsys.readouterr().out.startswith("tiny: 3 cells would run")


# One writer


@pytest.mark.parametrize("name", [store.CONFIG, "summary.md", store.CSV, store.ENVIRONMENT, "report.html"])
def test_files_that_are_not_a_runs_are_not_overwritten(name: str) -> None:
    OUT.mkdir()
    (OUT / name).write_text("mine")
    for resume in (False, True):
        with pytest.raises(
            StoreError, match=rf"out/{name} is not a run's and would be overwritten; give another --out"
        ):
            run("c.yaml", OUT, executor=MadeUp(), resume=resume)
    assert [path.name for path in OUT.iterdir()] == [name]
    assert (OUT / name).read_text() == "mine"


def test_a_file_that_something_else_wrote_into_is_not_written_any_more() -> None:
    class Disturbed(MadeUp):
        def run(self, jobs):
            for number, record in enumerate(super().run(jobs)):
                if number == 2:
                    with (OUT / store.RECORDS).open("ab") as file:
                        file.write(b"half a li")
                yield record

    with pytest.raises(
        StoreError, match=r"records\.jsonl: has \d+ bytes where this run left \d+: .*\nstopped after 2 of 6"
    ):
        run("c.yaml", OUT, executor=Disturbed())
    assert (OUT / store.RECORDS).read_bytes().endswith(b"}\nhalf a li")
    assert len(run("c.yaml", OUT, executor=MadeUp(), resume=True)) == 6


HOLD = """\
import sys, time
from pathlib import Path
from harness.store.files import Lock
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_in_use_is_refused_and_its_owner_named() -> None:
    interrupted()
    command = [sys.executable, "-c", HOLD, str(OUT)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        for resume in (True, False):
            with pytest.raises(
                StoreError, match=rf"out is in use by another run: pid {owner.pid} on .*, since 20.* UTC"
            ):
                run("c.yaml", OUT, executor=MadeUp(), resume=resume)
        assert len(harness.load(OUT)) == 2  # reading is free
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    assert len(run("c.yaml", OUT, executor=MadeUp(), resume=True)) == 6
    assert not (OUT / "run.lock").exists()


def test_the_lock_is_held_while_cases_run_and_freed_after_a_failure() -> None:
    class Nested(MadeUp):
        def run(self, jobs):
            with pytest.raises(StoreError, match="in use by another run"):
                run("c.yaml", OUT, executor=MadeUp(), resume=True)
            yield from super().run(jobs[:1])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run("c.yaml", OUT, executor=Nested())
    assert len(run("c.yaml", OUT, executor=MadeUp(), resume=True)) == 6


# Studies in short


def test_a_run_survives_being_killed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of its own: a copy by fork must come from one whose torch has not worked yet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = python(ROOT / "bench" / "kill_study.py", "--kills", "10", "--spawned", "0", timeout=300)
    assert done.code == 0, done
    assert done.out.startswith("10 kills of a forked run (")
    assert done.out.endswith("0 records lost, 0 doubled, 0 tables unequal\n")


def test_no_damage_of_the_records_goes_unsaid(tmp_path: Path) -> None:
    met = corrupt_study.study(200, 1, tmp_path / "run")
    assert sum(met.values()) == 200
    assert [how for _, how in met if how.startswith("SILENT")] == []
    assert {how for _, how in met} >= {"refused", "loss announced", "nothing lost"}


# Executors


def test_bad_choices_are_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="unknown executor 'moon'; known: local, here, ray"):
        run("c.yaml", OUT, executor="moon")
    with pytest.raises(BadInput, match="only the local executor"):
        runner.make_executor("here", 2, harness.suite.schema.Limits())
    with pytest.raises(BadInput, match="jobs = 0"):
        run("c.yaml", OUT, executor="here", jobs=0)
    Path("c.yaml").write_text(CONFIG.replace("timing: {enabled: false}\n", ""))
    with pytest.raises(BadInput, match="timings need the machine to themselves"):
        run("c.yaml", OUT, executor="local", jobs=2)
    assert not OUT.exists()


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(text: str) -> int:
        Path("c.yaml").write_text(text)
        return harness.suite.config.threads_of(harness.suite.config.load_suite("c.yaml"))

    untimed = CONFIG.replace("threads: 1\n", "")
    timed = untimed.replace("timing: {enabled: false}\n", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads(CONFIG.replace("threads: 1", "threads: 3")) == 3
    assert threads(untimed) == 1
    assert threads(timed) == 5
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert 1 <= threads(timed) <= len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert 1 <= threads(timed) <= (os.cpu_count() or 1)


def test_an_executor_that_gives_a_record_twice_spoils_nothing() -> None:
    class Twice(MadeUp):
        def run(self, jobs):
            yield from super().run(jobs)
            yield from super().run(jobs[:1])

    with pytest.raises(KeyError):
        run("c.yaml", OUT, executor=Twice())
    assert len(harness.load(OUT)) == 6


def test_quiet_readers_do_not_hide_what_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    interrupted(after=1)
    with caplog.at_level(logging.WARNING):
        harness.load(OUT)
    assert "missing: mha-e16-h2-kv2-d8-l6-b1-causal-prefill-float32-eager, " in caplog.text
