"""Every command, config and Python example of the README runs, and its table has today's columns."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import harness
from harness.__main__ import main
from harness.models.families.names import family_names
from harness.report.terminal import print_summary
from harness.suite.config import load_suite
from tests.support import ROOT, printed

README = (ROOT / "README.md").read_text()
NUMBER = re.compile(r"-?\d+\.?\d*(e-?\d+)?")
GUIDES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}


def fences(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


# An example that begins with its file's name is that file.
EXAMPLES = [*fences("python"), *fences("yaml")]
FILES = {match[1]: code for code in EXAMPLES if (match := re.match(r"# (\w+\.(?:py|yaml))\n", code))}
PYTHON = [code for code in fences("python") if code not in FILES.values()]
GUIDE_PYTHON = [(name, code) for name, text in GUIDES.items() for code in fences("python", text)]


def commands(text: str) -> list[str]:
    return [
        line.partition("#")[0].strip() for block in fences("bash", text) for line in block.splitlines() if line.strip()
    ]


# What a section's commands leave is for that section alone: sections can run at once.
SECTIONS = {part.partition("\n")[0]: commands(part) for part in re.split(r"^## ", README, flags=re.MULTILINE)}
COMMANDS = {title: found for title, found in SECTIONS.items() if found}
GUIDE_COMMANDS = {name: found for name, text in GUIDES.items() if (found := commands(text))}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the repository's root, with the README's own files in it."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readme_has_examples_of_each_kind():
    assert len(PYTHON) >= 3
    assert len(GUIDE_COMMANDS) >= 2
    assert sum(len(found) for found in COMMANDS.values()) >= 15
    assert [line for found in COMMANDS.values() for line in found] == commands(README), "a heading within an example"
    assert len(fences("yaml")) >= 2


def run_example(code: str, name: str) -> None:
    """The example runs by itself, and leaves the names that it made."""
    made: dict[str, object] = {"__name__": name}
    exec(compile(code, name, "exec"), made)
    assert made.keys() > {"__name__", "__builtins__"}, "nothing was made"


def test_an_example_that_does_not_run_is_seen() -> None:
    for broken, error in (("import harness\nharness.nothing()", AttributeError), ("assert 1 > 2", AssertionError)):
        with pytest.raises(error):
            run_example(broken, "readme")
    with pytest.raises(AssertionError, match="nothing was made"):
        run_example("# soon", "readme")


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_examples_run(code: str, workplace: Path):
    run_example(code, "readme")


@pytest.mark.parametrize(("name", "code"), GUIDE_PYTHON, ids=[f"{n}-{i}" for i, (n, _) in enumerate(GUIDE_PYTHON)])
def test_python_examples_of_the_guides_run(name: str, code: str, workplace: Path):
    run_example(code, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDE_COMMANDS)
def test_commands_of_a_guide_run_in_order(name: str, workplace: Path):
    for command in GUIDE_COMMANDS[name]:
        program, *arguments = shlex.split(command)
        assert program == "harness", command
        assert main(arguments) == 0, command


@pytest.mark.slow
@pytest.mark.parametrize("section", COMMANDS)
def test_commands_of_a_section_run_in_order(section: str, workplace: Path, capsys: pytest.CaptureFixture[str]):
    """Make targets are named; harness commands run, each with exit code 0. Only whether a time can be told from noise
    is up to the machine: there the gate may say that it could not decide, but not that anything got slower."""
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for command in COMMANDS[section]:
        program, *arguments = shlex.split(command)
        if program == "make":
            assert arguments[0] in targets, command
            continue
        assert program == "harness", command
        code = main(arguments)
        printed = capsys.readouterr().out
        undecided = "--base" in arguments and "timing: INCONCLUSIVE  1 cell: 1 inconclusive" in printed
        assert code == (1 if undecided else 0), command


@pytest.mark.slow
def test_the_session_from_wrong_to_fixed_is_a_real_one(workplace: Path):
    """Every line that is shown is printed by the command above it, in this order; numbers as they fall."""
    (session,) = fences("console")
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        ended = subprocess.run(
            command, shell=True, cwd=workplace, capture_output=True, text=True, check=False,
            env=os.environ | {"PATH": programs, "COLUMNS": "120"},
        )  # fmt: skip
        printed, place = NUMBER.sub("0", ended.stdout + ended.stderr), 0
        for line in (NUMBER.sub("0", each) for each in shown):
            assert line in printed[place:], f"{command}\n{printed}"
            place = printed.index(line, place) + len(line)


def test_the_config_example_is_valid_and_runs(workplace: Path):
    (example,) = (code for code in fences("yaml") if code not in FILES.values())
    (workplace / "tradeoffs.yaml").write_text(example)
    assert len(load_suite("tradeoffs.yaml").cases) == 4 * 2 * 3 * 2 - 4 + 1
    assert main(["run", "tradeoffs.yaml", "--quiet", "--shard", "1/8"]) == 0


def test_the_table_is_like_a_real_one(workplace: Path):
    """Same headings and legend as a run prints today; the numbers are the author's machine's."""
    shown = re.search(r"<!-- bench.*?-->\n```\n(.*?)```", README, flags=re.DOTALL)
    assert shown is not None
    assert main(["run", "configs/smoke.yaml", "--quiet"]) == 0
    frame = harness.load("results/latest").assign(timing="ok")  # however busy this machine is
    lines = printed(lambda console: print_summary(frame, console, folder=None)).splitlines()
    headings = [line for line in map(str.rstrip, lines) if "variant" in line or line.endswith("?")]
    assert len(headings) >= 3
    for heading in headings:
        assert heading.split() in [line.split() for line in shown[1].splitlines()], heading


def test_the_readme_counts_the_cells_of_make_bench():
    cells = len(load_suite(ROOT / "configs" / "default.yaml").cases)
    assert f"judge, weigh and time {cells} cells" in README
    assert f"EQUAL  {cells} cells: {cells} ok" in README


def test_every_linked_file_exists():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    links += [f"docs/{link}" for text in GUIDES.values() for link in re.findall(r"\]\(([^)#:]+)\)", text)]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_verify_table_names_every_family():
    shown = re.search(r"<!-- verify.*?-->\n```\n(.*?)```", README, flags=re.DOTALL)
    assert shown is not None
    rows = [line.split()[0] for line in shown[1].splitlines() if line.endswith("equal")]
    assert rows == [*family_names()]


def test_every_named_file_exists():
    for name in re.findall(r"`((?:harness|configs|docs)/[\w./]*)`", README):
        assert (ROOT / name).exists(), name
