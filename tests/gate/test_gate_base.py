"""The two versions: a worktree that comes and goes, processes that run the right code, and the command around them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.__main__ import main
from harness.case import Case
from harness.gate import sampling
from harness.gate.findings import GateOutcome, TimingSettings
from harness.gate.process import Died, Process, Refused
from harness.gate.timing import TimingError, judge_times
from harness.gate.versions import (
    Version,
    VersionError,
    baseline_commit,
    checked_out,
    folder_version,
    resolve,
    working_tree,
)
from harness.report.gate_text import SHOWN, print_timing
from harness.workers.interrupts import Terminated
from tests.report.test_gate_outputs import verdict
from tests.support import ROOT, git
from tests.support.records import folder, record

PACKAGES = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits: the first has no harness, the second has one that says where it is from."""
    tree = tmp_path / "repository"
    tree.mkdir()
    git(tree, "init", "-q", "-b", "main")
    (tree / "README").write_text("empty\n")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "no harness")
    (tree / "harness").mkdir()
    (tree / "harness" / "__init__.py").write_text("WHICH = 'committed'\n")
    git(tree, "add", ".")
    git(tree, "commit", "-q", "-m", "a harness")
    return tree


# ---- versions --------------------------------------------------------------------------------------------------------


def test_a_worktree_comes_and_goes(repository: Path) -> None:
    (repository / "harness" / "__init__.py").write_text("WHICH = 'not committed'\n")
    with checked_out("main", repository) as base:
        assert (base.root / "harness" / "__init__.py").read_text() == "WHICH = 'committed'\n"
        assert base.commit == git(repository, "rev-parse", "HEAD")
        assert base.name == f"main ({base.commit[:9]})"
        assert len(git(repository, "worktree", "list").splitlines()) == 2
    assert not base.root.exists() and not base.root.parent.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert git(repository, "worktree", "prune", "--dry-run", "--verbose") == ""
    assert (repository / "harness" / "__init__.py").read_text() == "WHICH = 'not committed'\n"


def test_it_goes_after_an_error_too(repository: Path) -> None:
    with pytest.raises(KeyboardInterrupt), checked_out("HEAD", repository) as base:
        raise KeyboardInterrupt
    assert not base.root.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_goes_after_a_signal(repository: Path, number: signal.Signals) -> None:
    code = (
        # Under nohup it is ignored from the start, and then stays so: that is what nohup is for.
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "import sys, time; from pathlib import Path; from harness.gate.versions import checked_out\n"
        "with checked_out('HEAD', Path(sys.argv[1])) as base:\n    print(base.root, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(repository)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        root = Path(child.stdout.readline().strip())
        assert root.is_dir()
        child.send_signal(number)
        assert child.wait(30) != 0
    assert not root.parent.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_commit_under_way_is_left_alone(repository: Path, tmp_path: Path) -> None:
    """In a hook git names the index of the commit in the environment, and in a linked worktree its folder too."""
    linked = tmp_path / "linked"
    git(repository, "worktree", "add", "-q", "-b", "side", str(linked))
    for name in ("one", "two"):
        (linked / name).write_text("text\n")
    git(linked, "add", ".")
    git(linked, "commit", "-q", "-m", "more files")
    code = "from pathlib import Path; from harness.gate.versions import checked_out, working_tree\n"
    code += f"with checked_out('main', Path({str(linked)!r})) as base: Path({str(tmp_path / 'seen')!r}).write_text("
    code += f"base.commit + working_tree(Path({str(linked)!r})).name)"
    script = tmp_path / "hook.py"
    script.write_text(code)
    hook = repository / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {script}\n")
    hook.chmod(0o755)
    (linked / "one").write_text("another\n")
    git(linked, "commit", "-q", "-a", "-m", "one line")
    assert git(repository, "rev-parse", "main") in (tmp_path / "seen").read_text()  # the hook has run
    assert git(linked, "show", "--stat", "--format=", "HEAD").splitlines()[-1].strip().startswith("1 file changed")
    assert git(linked, "status", "--porcelain") == ""


def test_worktrees_of_the_user_whose_disk_is_away_stay(repository: Path, tmp_path: Path) -> None:
    git(repository, "worktree", "add", "-q", "-b", "side", str(tmp_path / "disk"))
    (tmp_path / "disk").rename(tmp_path / "away")
    with checked_out("main", repository):
        pass
    assert len(git(repository, "worktree", "list").splitlines()) == 2
    (tmp_path / "away").rename(tmp_path / "disk")
    assert git(tmp_path / "disk", "status", "--porcelain") == ""


def test_a_half_made_worktree_goes_too(repository: Path) -> None:
    with checked_out("main", repository) as base:
        (base.root / ".git").unlink()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_what_is_no_version(repository: Path, tmp_path: Path) -> None:
    first = git(repository, "rev-list", "--max-parents=0", "HEAD")
    with pytest.raises(VersionError, match="has no harness"), checked_out(first, repository):
        pass
    for wrong in ("no-such-branch", "-h", "--all"):
        with pytest.raises(VersionError, match="no such commit"):
            resolve(wrong, repository)
    with pytest.raises(VersionError, match="no git repository"):
        resolve("HEAD", tmp_path)
    with pytest.raises(VersionError, match="no such folder"):
        folder_version(tmp_path / "absent")
    with pytest.raises(VersionError, match="there is no harness"):
        folder_version(tmp_path)


def test_the_working_tree_says_when_it_is_not_committed(repository: Path) -> None:
    clean = working_tree(repository)
    assert clean.dirty is False and clean.commit is not None and clean.name == clean.commit[:9]
    (repository / "README").write_text("no matter\n")
    assert working_tree(repository).dirty is False
    (repository / "harness" / "new.py").write_text("")
    dirty = working_tree(repository)
    assert dirty.dirty is True and "not committed" in dirty.name


def test_the_default_base_is_the_baselines_commit(tmp_path: Path) -> None:
    (tmp_path / "smoke.json").write_text('{"commit": "abc123"}')
    assert baseline_commit("smoke", tmp_path) == "abc123"
    for text in ('{"commit": null}', "{}", "nonsense"):
        (tmp_path / "smoke.json").write_text(text)
        with pytest.raises(VersionError, match="name a revision"):
            baseline_commit("smoke", tmp_path)
    with pytest.raises(VersionError, match="name a revision"):
        baseline_commit("other", tmp_path)


# ---- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.fresh
def test_a_process_runs_the_harness_of_its_own_tree(tmp_path: Path) -> None:
    raising = ("__init__.py", "import importlib", "raise ImportError('this is the other tree')")
    other = copy_of_harness(tmp_path, raising)
    process = Process(other, threads=1, allowed=None, path=[str(ROOT), *PACKAGES])
    try:
        with pytest.raises(Died, match="exit code 1; it said: ImportError: this is the other tree"):
            process.greet()
    finally:
        process.kill()


def test_a_version_that_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "PROCESSES", 2)
    broken = copy_of_harness(tmp_path, ("case.py", "from ", "import no_such_module_at_all\nfrom "))
    with pytest.raises(TimingError, match=r"the base cannot be timed.*no_such_module_at_all"):
        judge_times(broken, broken, [cell("mha")], TimingSettings())


def test_a_version_that_lacks_what_a_cell_needs_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "PROCESSES", 1)
    old = copy_of_harness(tmp_path / "old", ("cell/measure.py", "def timed_call(", "def timed_call_of_another_name("))
    with pytest.raises(TimingError, match=r"the base cannot be timed.*timed_call"):
        judge_times(old, folder_version(ROOT), [cell("mha"), cell("mqa")], TimingSettings())


def copy_of_harness(where: Path, *changes: tuple[str, str, str]) -> Version:
    """This very tree, with some text replaced: (file, old, new)."""
    shutil.copytree(ROOT / "harness", where / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in changes:
        path = where / "harness" / file
        text = path.read_text()
        assert old in text, f"{file} has no {old!r}"
        path.write_text(text.replace(old, new, 1))
    return folder_version(where)


def cell(variant: str) -> Case:
    return Case(
        variant, "eager", 32, 4, {"mha": 4, "mqa": 1, "gqa": 2}[variant], 8, 24, 1, "none", "float32", "prefill"
    )


TIMED = "    return _call_of(subject_of(pair, side, seed))\n"
# Twice the work in one variant, death in another.
SPOILT = f"""\
    if side is pair.candidate and pair.case.variant == "mha":
        once = _call_of(subject_of(pair, side, seed))
        return lambda: [once(), once()]
    if pair.case.variant == "gqa":
        import os
        os._exit(7)
{TIMED}"""
LACKING = (
    "cell/build.py",
    "    spec, dtype = VARIANTS[case.variant], ",
    "    spec, dtype = VARIANTS[case.variant.replace('mqa', 'none')], ",
)


@pytest.mark.slow
def test_two_versions_are_timed_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "PROCESSES", 2)
    base = copy_of_harness(tmp_path / "base", LACKING)
    head = copy_of_harness(tmp_path / "head", ("cell/measure.py", TIMED, SPOILT))
    cases = [cell("mha"), cell("mqa"), cell("gqa")]
    told: list[tuple[int, str]] = []
    found = judge_times(base, head, cases, TimingSettings(seed=1), progress=lambda *step: told.append(step))
    assert [each.case_id for each in found] == [case.case_id for case in cases]
    doubled, lacking, dead = found
    assert doubled.verdict == "regression" and doubled.remeasured, doubled
    assert doubled.change is not None and 0.6 < doubled.change < 1.5
    assert doubled.reference_ms is not None and doubled.head_ms is not None and doubled.base_ms is not None
    assert lacking.verdict == "inconclusive" and "the base cannot build this cell" in lacking.reason
    assert dead.verdict == "regression" and dead.reason.startswith("head died: exit code 7")
    assert told[-1][0] == 3
    assert not [child for child in _children() if "worker.py" in child]


@pytest.mark.slow
def test_a_version_is_not_slower_than_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "PROCESSES", 2)
    same = copy_of_harness(tmp_path / "same")
    (found,) = judge_times(same, same, [cell("mha")], TimingSettings(seed=1))
    # Which of them, and whether six rounds fit the time, the machine decides; that it was timed at all, it does not.
    assert found.verdict in ("pass", "inconclusive")
    assert found.base_ms is not None and found.head_ms is not None and found.reference_ms is not None
    assert 0.5 < found.head_ms / found.base_ms < 2


def _children() -> list[str]:
    import psutil

    return [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]


@pytest.mark.slow
def test_a_process_that_ends_or_hangs_is_told_apart(tmp_path: Path) -> None:
    sleeping = f"    time.sleep(60)\n{TIMED}"
    harness = copy_of_harness(tmp_path, ("cell/measure.py", TIMED, sleeping))
    process = Process(harness, threads=1, allowed=None, path=PACKAGES)
    try:
        process.greet()
        from dataclasses import asdict

        fields = {**asdict(cell("mha")), "invented": 3}
        build: dict[str, Any] = {"fields": fields, "seed": 0, "shift": 0}
        with pytest.raises(Refused, match="its cells have no invented"):
            process.ask("build", 30.0, cell=build)
        fields["invented"] = None  # a newer axis that says nothing here is no obstacle
        started = time.monotonic()
        with pytest.raises(Died, match=r"no answer within 0\.5 s"):
            process.ask("build", 0.5, cell=build)
        assert time.monotonic() - started < 10
        os.kill(process._process.pid, signal.SIGKILL)
        with pytest.raises(Died, match="SIGKILL"):
            process.ask("build", 30.0, cell=build)
    finally:
        process.kill()


# ---- the command -----------------------------------------------------------------------------------------------------


def fake(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """The timing is made up: one verdict a word. Gives what it was asked for."""
    asked: dict[str, Any] = {}

    def judge(base: Version, head: Version, cases: Any, settings: TimingSettings, *, progress: Any) -> Any:
        asked.update(base=base, head=head, cases=cases, settings=settings)
        return tuple(verdict(case.case_id, word) for case, word in zip(cases, words, strict=True))

    monkeypatch.setattr("harness.gate.timing.judge_times", judge)
    return asked


CONFIG = "name: tiny\nthreads: 1\ngrid: {variant: [mha, mqa], embed_dim: 16, heads: 2, seq_len: 4}\n"


def timing_only(tmp_path: Path, *more: str) -> int:
    config = tmp_path / "tiny.yaml"
    config.write_text(CONFIG)
    return main(["gate", "--base-dir", str(ROOT), "--timing-only", str(config), *more])


@pytest.mark.parametrize(
    ("words", "more", "code"),
    [
        (("pass", "improvement"), (), 0),
        (("pass", "regression"), (), 1),
        (("pass", "inconclusive"), (), 0),
        (("inconclusive", "regression"), (), 1),
        (("pass", "inconclusive"), ("--strict",), 1),
    ],
)
def test_exit_codes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    more: tuple[str, ...],
    code: int,
) -> None:
    asked = fake(monkeypatch, *words)
    assert timing_only(tmp_path, "--min-effect", "3", "--must-see", "6%", "--seconds", "1", *more) == code
    settings = asked["settings"]
    assert (settings.min_effect, settings.must_see, settings.seconds, settings.threads) == (0.03, 0.06, 1.0, 1)
    last = capsys.readouterr().out.splitlines()[-1]
    assert ("FAIL" if code else "PASS") in last
    assert ("1 of 2 NOT SHOWN" in last) == ("inconclusive" in words)


def test_cells_are_chosen_by_name_and_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake(monkeypatch, "pass", "pass")
    assert timing_only(tmp_path, "--cells", "mqa-*", "--kernel", "sdpa", "--kernel", "tiled", "--quiet") == 0
    assert [(case.variant, case.kernel) for case in asked["cases"]] == [("mqa", "sdpa"), ("mqa", "tiled")]
    assert timing_only(tmp_path, "--cells", "nothing-*") == 2


def test_a_night_that_decides_nothing_is_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, "inconclusive", "inconclusive")
    assert timing_only(tmp_path) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("timing: INCONCLUSIVE") and "2 of 2 NOT SHOWN" in last
    run, baseline = folder(tmp_path / "run", record()), tmp_path / "baseline"
    assert main(["gate", str(run), "--baseline", str(baseline), "--accept", "--quiet"]) == 0
    fake(monkeypatch, "inconclusive")
    assert main(["gate", str(run), "--baseline", str(baseline), "--base-dir", str(ROOT), "--quiet"]) == 1
    assert (run / "gate.md").read_text().splitlines()[0].endswith(": INCONCLUSIVE")
    told = json.loads((run / "gate.json").read_text())
    assert told["verdict"] == "INCONCLUSIVE" and told["passed"] is False


@pytest.mark.parametrize("kernel", ["nosuch", "/no/such.py:f", "sparse?nosuch=1", "tests/rooms.py:not a name"])
def test_a_kernel_that_nobody_has_is_bad_input(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    asked = fake(monkeypatch, "pass", "pass")
    assert timing_only(tmp_path, "--kernel", kernel) == 2
    assert f"--kernel {kernel}: " in capsys.readouterr().err and not asked


def test_the_files_tell_the_settings_and_what_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = record(case_id="b", variant="mqa", kv_heads=1)
    records = [record(), slow, record(case_id="c", seq_len=9, status="mismatch")]
    run, baseline = folder(tmp_path / "run", *records), tmp_path / "baseline"
    words = ["gate", str(run), "--baseline", str(baseline)]
    assert main([*words, "--accept", "--quiet"]) == 0
    asked = fake(monkeypatch, "pass")
    more = ["--base-dir", str(ROOT), "--cells", "mqa-*", "--seconds", "7", "--must-see", "6"]
    main([*words, *more])
    told, page = json.loads((run / "gate.json").read_text()), (run / "gate.md").read_text()
    settings = told["settings"]
    assert (settings["seconds"], settings["must_see"], settings["min_effect"], settings["level"]) == (
        7,
        0.06,
        0.02,
        0.01,
    )
    assert settings["seed"] == asked["settings"].seed is not None
    assert str(settings["seed"]) in page and "must-see 6.0%" in page
    output = capsys.readouterr().out
    for place in (page.replace("\\", ""), output, " ".join(told["left_out"])):
        assert "1 cell not like --cells mqa-*: not timed" in place
        assert "1 cell failed or unsupported in the run: not timed" in place
    fake(monkeypatch, "pass")
    main([*words, *more, "--quiet", "--seed", "5"])
    assert json.loads((run / "gate.json").read_text())["settings"]["seed"] == 5


def test_a_cells_name_is_whole_on_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")  # narrower than these short names, as 80 is than long ones
    asked = fake(monkeypatch, "regression", "inconclusive")
    assert timing_only(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    first, second = (case.case_id for case in asked["cases"])
    assert f"regression {first}" in lines and f"inconclusive {second}" in lines


def test_a_run_is_not_ignored_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, "pass", "pass")
    assert timing_only(tmp_path, str(tmp_path)) == 2
    assert f"leave out {tmp_path}" in capsys.readouterr().err


def test_what_is_not_written_is_not_pointed_to(capsys: pytest.CaptureFixture[str]) -> None:
    many = tuple(verdict(f"cell-{at}", "inconclusive") for at in range(SHOWN + 3))
    outcome = GateOutcome("\udcff", (), (), many, base="\udcff\x1b[31m", head="b")
    print_timing(outcome, Console(width=80), written=False)
    output = capsys.readouterr().out
    assert "gate.md" not in output and f"cell-{SHOWN + 2}" in output and "\x1b" not in output
    output.encode()  # a lone surrogate cannot be
    print_timing(outcome, Console(width=80), written=True)
    assert "+3 more of inconclusive: see gate.md" in capsys.readouterr().out


def test_a_gate_that_is_interrupted_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.gate.timing.judge_times", stop)
    assert timing_only(tmp_path) == 130
    error = capsys.readouterr().err
    assert "not finished" in error and "records.jsonl" not in error


def test_a_gate_that_is_terminated_has_the_exit_code_that_its_help_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise Terminated

    monkeypatch.setattr("harness.gate.timing.judge_times", stop)
    assert timing_only(tmp_path) == 143
    assert "stopped by SIGTERM or SIGHUP; the gate is not finished" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--min-effect", "--must-see", "--seconds"])
def test_what_is_no_number_is_told_in_words(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["gate", "--base", "HEAD", option, "abc"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and f"argument {option}: 'abc' is no number" in error


@pytest.mark.parametrize(
    "words",
    [
        ["--timing-only", "configs/smoke.yaml"],
        ["--cells", "*"],
        ["--accept", "--base", "HEAD"],
        ["--base", "HEAD", "--min-effect", "5", "--must-see", "5"],
        ["--base", "no-such-revision", "--timing-only", "configs/smoke.yaml"],
    ],
)
def test_bad_input(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["gate", *words]) == 2


def test_what_the_exact_part_found_is_kept_though_nothing_can_be_timed(tmp_path: Path) -> None:
    baseline = tmp_path / "baseline"
    good, bad = folder(tmp_path / "good", record()), folder(tmp_path / "bad", record(status="mismatch"))
    assert main(["gate", str(good), "--baseline", str(baseline), "--accept", "--quiet"]) == 0
    words = ["--baseline", str(baseline), "--base-dir", str(ROOT)]
    assert main(["gate", str(bad), *words]) == 2  # no cell to time
    assert "FAIL" in (bad / "gate.md").read_text() and "mismatch" in (bad / "gate.xml").read_text()
    # Where nothing failed there is no verdict yet, and none is left of an older gate.
    assert main(["gate", str(good), "--baseline", str(baseline), "--quiet"]) == 0
    assert main(["gate", str(good), *words, "--cells", "nothing-like-this"]) == 2
    assert not (good / "gate.md").exists()


def test_a_run_is_judged_in_both_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, baseline = folder(tmp_path / "run", record()), tmp_path / "baseline"
    assert main(["gate", str(run), "--baseline", str(baseline), "--accept", "--quiet"]) == 0
    fake(monkeypatch, "regression")
    words = ["gate", str(run), "--baseline", str(baseline), "--base-dir", str(ROOT)]
    assert main([*words]) == 1
    assert "regression" in (run / "gate.md").read_text() and (run / "gate.xml").exists()
    assert json.loads((run / "gate.json").read_text())["cells"] == 1
    assert "exact" not in capsys.readouterr().err
    fake(monkeypatch, "pass")
    assert main([*words]) == 0
    assert "1 pass" in (run / "gate.md").read_text()


def test_a_runs_folder_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, baseline = folder(tmp_path / "run", record()), tmp_path / "baseline"
    assert main(["gate", str(run), "--baseline", str(baseline), "--accept", "--quiet"]) == 0
    opened: list[str] = []
    real_open = open

    def watched(path: Any, *how: Any, **more: Any) -> Any:
        opened.append(Path(str(path)).name)
        return real_open(path, *how, **more)

    monkeypatch.setattr("builtins.open", watched)
    monkeypatch.setattr("io.open", watched)  # of Path.open
    fake(monkeypatch, "pass")
    assert main(["gate", str(run), "--baseline", str(baseline), "--base-dir", str(ROOT), "--quiet"]) == 0
    for name in ("records.jsonl", "config.yaml", "environment.json", "run.json"):
        assert opened.count(name) <= 1, name
    assert opened.count("records.jsonl") == 1
