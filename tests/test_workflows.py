"""CI calls make targets and nothing else, and its files are valid."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT

ALL = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS = [path for path in ALL if path.name != "gate-kernel.yml"]  # which others call, who have no Makefile of ours
TARGETS = set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps(path: Path) -> list[dict[str, Any]]:
    document = yaml.safe_load(path.read_text())
    return [step for job in document["jobs"].values() for step in job["steps"]]


def strange(lines: list[str]) -> list[str]:
    """The run lines that are not one make target, as it could be typed here."""
    called = [re.fullmatch(r"make ([\w-]+)", line) for line in lines]
    return [line for line, match in zip(lines, called, strict=True) if match is None or match[1] not in TARGETS]


def valid(*paths: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("check-jsonschema")
    command = [str(program), "--builtin-schema", "vendor.github-workflows", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_there_are_two() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "nightly.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_run_line_is_a_make_target(path: Path) -> None:
    lines = [line.strip() for step in steps(path) for line in step.get("run", "").splitlines()]
    assert lines
    assert strange(lines) == []


def test_other_run_lines_are_found() -> None:
    wrong = ["make nothing", "cat results/latest/gate.md", "make check && rm -rf /", "make", "make gate BASE=main"]
    assert strange(["make check", *wrong]) == wrong


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_make_knows_how_to_do_every_step(path: Path) -> None:
    """A dry run: make reads the whole recipe, with the variables that the step sets."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for step in (step for step in steps(path) if "run" in step):
        given = [f"{name}={value}" for name, value in step.get("env", {}).items() if "${{" not in str(value)]
        command = ["make", "--dry-run", "--old-file=.venv/.installed", *step["run"].split()[1:], *given]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr


def test_the_workflows_fit_githubs_schema() -> None:
    done = valid(*ALL)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("right", "wrong"), [("runs-on:", "run-on:"), ("timeout-minutes: 180", "timeout-minutes: [180]"), ("jobs:", "job:")]
)
def test_a_broken_workflow_is_refused(tmp_path: Path, right: str, wrong: str) -> None:
    text = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert right in text
    (tmp_path / "nightly.yml").write_text(text.replace(right, wrong))
    assert valid(tmp_path / "nightly.yml").returncode == 1


def test_make_check_looks_at_the_workflows() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert "check-jsonschema --builtin-schema vendor.github-workflows $(wildcard .github/workflows/*.yml)" in recipe[1]


def test_the_nightly_runs_gates_keeps_the_history_and_posts_the_summary() -> None:
    found = steps(ROOT / ".github" / "workflows" / "nightly.yml")
    called = [step["run"] for step in found if "run" in step]
    assert called == ["make setup", "make nightly", "make gate", "make history", "make trend", "make ci-summary"]
    (checkout,) = (step for step in found if step.get("uses", "").startswith("actions/checkout"))
    assert checkout["with"]["fetch-depth"] == 0  # the baseline's commit is somewhere in the past
    (timing,) = (step for step in found if step.get("run") == "make gate")
    assert timing["env"] == {"BASE": "baseline"}
    names = {step["with"]["name"]: step for step in found if "artifact" in step.get("uses", "")}
    assert "history" in names
    (fetched,) = (step for step in found if "download-artifact" in step.get("uses", ""))
    assert fetched["with"]["path"].rstrip("/") == names["history"]["with"]["path"].rstrip("/") == "results/history"


def test_a_history_that_was_not_fetched_is_not_replaced() -> None:
    """Uploading after a failed download would leave tonight's night alone."""
    found = {step.get("id"): step for step in steps(ROOT / ".github" / "workflows" / "nightly.yml")}
    assert "steps.newest.outcome == 'success'" in found["history"]["if"]
    assert "steps.fetch.outcome != 'failure'" in found["history"]["if"]
    # The night itself goes on without it: `outcome` is that before continue-on-error.
    assert found["newest"]["continue-on-error"] is True and found["fetch"]["continue-on-error"] is True
    # Steps with a condition of their own also run after a failure: only one that has the search behind it may.
    assert "steps.run.outcome != 'skipped'" in found["history"]["if"]
    uploads = [
        step
        for step in steps(ROOT / ".github" / "workflows" / "nightly.yml")
        if "upload-artifact" in step.get("uses", "") and step["with"]["name"] == "history"
    ]
    assert [step["if"] for step in uploads] == ["${{ !cancelled() && steps.history.outcome == 'success' }}"]


def summary(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    command = ["make", "-f", str(ROOT / "Makefile"), "ci-summary", *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)


def test_the_trend_is_on_the_summary(tmp_path: Path) -> None:
    (tmp_path / "results" / "latest").mkdir(parents=True)
    for name in ("gate", "trend", "summary"):
        (tmp_path / "results" / "latest" / f"{name}.md").write_text(f"# {name}\n")
    assert "# gate\n# trend\n# summary\n" in summary(tmp_path, "GITHUB_STEP_SUMMARY=").stdout
    command = ["make", "-f", str(ROOT / "Makefile"), "--dry-run", "--old-file=.venv/.installed", "trend"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert "harness trend --out results/latest/trend.md" in done.stdout
    (tmp_path / "results" / "latest").rename(tmp_path / "results" / "other")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert "harness trend" in done.stdout
    assert "--out" not in done.stdout


def test_the_summary_is_posted(tmp_path: Path) -> None:
    assert "no run in results/latest" in summary(tmp_path).stdout
    (tmp_path / "results" / "latest").mkdir(parents=True)
    (tmp_path / "results" / "latest" / "gate.md").write_text("# Gate: PASS\n")
    (tmp_path / "results" / "latest" / "summary.md").write_text("# EQUAL\n")
    assert "# Gate: PASS\n# EQUAL\n" in summary(tmp_path, "GITHUB_STEP_SUMMARY=").stdout
    posted = tmp_path / "page.md"
    posted.write_text("before\n")
    done = summary(tmp_path, f"GITHUB_STEP_SUMMARY={posted}")
    assert done.returncode == 0
    assert posted.read_text() == "before\n# Gate: PASS\n# EQUAL\n"


def test_ci_runs_on_each_python_that_is_promised() -> None:
    document = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert document["jobs"]["check-and-test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


def test_the_action_fits_githubs_schema_and_calls_what_there_is() -> None:
    program = Path(sys.executable).with_name("check-jsonschema")
    command = [str(program), "--builtin-schema", "vendor.github-actions", str(ROOT / "action.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    called = [(ROOT / "action.yml").read_text(), ALL[1].read_text()]
    for text in called:
        (line,) = (line.strip() for line in text.splitlines() if "harness gate --base" in line)
        from harness.__main__ import _parser

        words = [word.strip('"') for word in line.removeprefix("run: ").split() if not word.startswith('"${flags')]
        options = _parser().parse_args(words[1:])
        assert options.kernel == ["$KERNEL"] and str(options.timing_only) == "$CONFIG"
