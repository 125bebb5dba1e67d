"""As a new user has it: the built wheel in a new environment, an empty folder, and what `harness init` writes there."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support import ROOT, git

SLOWER = """

def slower(q, k, v, **options):
    for _ in range({extra}):
        fast(q, k, v, **options)
    return fast(q, k, v, **options)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`harness` of the wheel. What it depends on is found where this test finds it: nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), "./source"]
    # Of the files that git knows, so that nothing else that lies here is taken for a part of it.
    listed = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "harness", "configs", "pyproject.toml",
                 "README.md", "LICENSE").splitlines()  # fmt: skip
    for name in listed:
        if (ROOT / name).exists() and not (ROOT / name).is_symlink():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    (folder / "source" / "harness" / "configs").symlink_to("../configs")
    subprocess.run([*pip, *build], cwd=folder, check=True)
    (wheel,) = folder.glob("*.whl")
    home = folder / "environment"
    venv.create(home)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = ["--python", str(home / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run([*pip, *install], check=True)
    return home / "bin" / "harness"


@pytest.mark.slow
def test_init_run_pytest_and_gate_from_the_wheel(program: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    mine = tmp_path / "mine"
    mine.mkdir()

    def call(*words: str | Path) -> tuple[int, str]:
        done = subprocess.run(list(map(str, words)), cwd=mine, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    where = call(program.with_name("python"), "-c", "import harness; print(harness.__file__)")[1].strip()
    assert Path(where).is_relative_to(program.parents[1]), where
    assert call(program, "run", "smoke", "--dry-run")[0] == 0  # a config of the package
    code, said = call(program, "init")
    assert code == 0, said
    code, said = call(program, "run", "attention.yaml", "--out", "results/a")
    assert code == 0 and "EQUAL" in said, said
    words = ("-m", "pytest", "-q", "-k", "first or sdpa or how_fast", "--harness-report", "report")
    code, said = call(program.with_name("python"), *words)
    assert code == 0 and re.search(r"my_kernels\.py:fast: [34]\d ok; worst error", said), said
    assert json.loads((mine / "report" / "benchmark.json").read_text())["benchmarks"]

    git(mine, "init", "-q", "-b", "main")
    kernels = mine / "my_kernels.py"
    plain = kernels.read_text()
    for extra in (0, 4):  # one function does its work five times; the other is as it was
        kernels.write_text(plain + SLOWER.format(extra=extra))
        git(mine, "add", "my_kernels.py")
        git(mine, "commit", "-q", "-m", f"{extra} more")
    both = ("--kernel", "my_kernels.py:fast", "--kernel", "my_kernels.py:slower")
    one_cell = ("--cells", "mha-*-none-prefill-*", "--seconds", "4", "--out", "gate")
    code, said = call(program, "gate", "--base", "HEAD~1", *both, *one_cell)
    timing = json.loads((mine / "gate" / "gate.json").read_text())["timing"]
    found = {one["case_id"].rpartition(":")[2]: one["verdict"] for one in timing}
    assert code == 1 and found["slower"] == "regression", said
    # Whether a time can be told from noise is up to the machine; slower it is not.
    assert found["fast"] in ("pass", "inconclusive", "improvement"), said
