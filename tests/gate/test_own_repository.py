"""The gate in a git repository of somebody else's: their kernels, their worktree, the harness that is installed."""

import json
import sys
from pathlib import Path

import pytest

from harness.gate.versions import INSTALLED, own_repository
from tests.support import ROOT, called, git

KERNEL = """\
import torch.nn.functional as F

from {module} import extra


def f(q, k, v, **options):
    out = F.scaled_dot_product_attention(q, k, v, **options)
    for _ in range(extra()):
        F.scaled_dot_product_attention(q, k, v, **options)
    return out
"""
ONE_CELL = ("--cells", "mha-*-none-prefill-*", "--seconds", "4")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits of a package; in the second its kernel does its work five times."""
    folder = tmp_path / "theirs"
    (folder / "lib").mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    (folder / "lib" / "__init__.py").write_text("")
    (folder / "lib" / "kernel.py").write_text(KERNEL.format(module="lib.work"))
    (folder / "lib" / "work.py").write_text("def extra():\n    return 0\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "fast")
    (folder / "lib" / "work.py").write_text("def extra():\n    return 4\n")
    git(folder, "commit", "-q", "-a", "-m", "slow")
    monkeypatch.chdir(folder)
    return folder


def verdicts(folder: Path) -> dict[str, str]:
    return {one["case_id"]: one["verdict"] for one in json.loads((folder / "gate.json").read_text())["timing"]}


def test_whose_repository_it_is(repository: Path) -> None:
    assert own_repository() == own_repository(repository / "lib") == repository.resolve()
    assert own_repository(ROOT) is None and INSTALLED == ROOT
    assert own_repository(Path("/")) is None


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["lib/kernel.py:f", "lib.kernel:f"])
def test_a_slower_helper_is_a_regression_of_the_kernel(repository: Path, kernel: str, capsys, monkeypatch) -> None:
    """Each side imports its own `lib`, although the head's folder is on the path that both inherit."""
    monkeypatch.setattr(sys, "path", [str(repository), *sys.path])
    found = called(capsys, "gate", "--base", "HEAD~1", "--kernel", kernel, *ONE_CELL, "--out", "out")
    assert found.code == 1, found.out + found.err
    assert set(verdicts(repository / "out").values()) == {"regression"}
    assert "# Gate kernel: FAIL" in (repository / "out" / "gate.md").read_text()
    assert git(repository, "worktree", "list").count("\n") == 0


@pytest.mark.slow
def test_an_unchanged_kernel_is_no_regression(repository: Path, capsys, monkeypatch) -> None:
    (repository / "README").write_text("words")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "words")
    monkeypatch.setattr(sys, "path", [str(repository), *sys.path])
    called(capsys, "gate", "--base", "HEAD~1", "--kernel", "lib/kernel.py:f", *ONE_CELL, "--out", "out")
    # Whether a time can be told from noise is up to the machine.
    assert set(verdicts(repository / "out").values()) <= {"pass", "inconclusive", "improvement"}


@pytest.mark.parametrize("trick", ["outside", "absolute path"])
def test_a_file_that_both_sides_run_is_told_and_no_pass(repository: Path, trick: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(repository), *sys.path])
    if trick == "outside":
        same = repository.parent / "outside.py"
        same.write_text(KERNEL.format(module="lib.work"))
    else:
        same = repository / "leads_back.py"
        text = f"import sys\nsys.path.insert(0, {str(repository)!r})\n" + KERNEL.format(module="lib.work")
        same.write_text(text)
        git(repository, "add", ".")
        git(repository, "commit", "-q", "-m", "its helper is always the head's")
    found = called(capsys, "gate", "--base", "HEAD", "--kernel", f"{same}:f", *ONE_CELL)
    assert found.code == 2
    assert "both sides would run the same file" in found.err and "nothing to compare" in found.err
    named = same if trick == "outside" else repository / "lib"
    assert str(named) in found.err


def test_a_repository_without_a_kernel_to_time_is_told(repository: Path, capsys) -> None:
    found = called(capsys, "gate", "--base", "HEAD~1", "--timing-only", "smoke")
    assert found.code == 2 and "is your own repository: name its kernel" in found.err
