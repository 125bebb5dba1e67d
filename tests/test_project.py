"""The project's own promises: targets, pins, no registry names, and imports that go one way."""

import ast
import os
import re
import shutil
import subprocess
import tomllib
from collections import deque
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.rooms import BEGIN, ORDER, PAGE, back_edges, drawn, module_files
from tests.support import ROOT, python

TARGETS = ("help", "setup", "bench", "smoke", "test", "check", "nightly", "gate", "report", "clean")


# ---- Makefile and CI -------------------------------------------------------------------------------------------------


def makefile_targets() -> list[str]:
    text = (ROOT / "Makefile").read_text()
    return [name for name in re.findall(r"^([A-Za-z][\w-]*):(?!=)", text, re.MULTILINE) if name != "FORCE"]


def make(*arguments: str) -> str:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "MFLAGS"}
    done = subprocess.run(["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plain_make_explains_every_target():
    explained = dict(re.findall(r"^  make ([\w-]+) +(\S.*)$", make(), re.MULTILINE))
    assert set(TARGETS) <= set(explained)
    assert set(explained) == set(makefile_targets())


def test_every_target_is_phony():
    phony = re.search(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert set(makefile_targets()) <= set(phony[1].split())


def test_ci_runs_the_make_targets():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "make check test"


@pytest.mark.parametrize("workflow", ["ci.yml", "nightly.yml"])
def test_workflows_call_existing_targets(workflow):
    document = yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text())
    steps = [step for job in document["jobs"].values() for step in job["steps"]]
    called = [step["run"].split() for step in steps if step.get("run", "").startswith("make")]
    assert called
    for words in called:
        assert set(words[1:]) <= set(makefile_targets())


# ---- pins ------------------------------------------------------------------------------------------------------------


def pins() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        match = re.fullmatch(r"([\w.-]+)==([\w.]+)", line)  # exact, and without a local tag such as +cpu
        assert match, f"not an exact pin: {line!r}"
        name = canonicalize_name(match[1])
        assert name not in found, f"{name} is pinned twice"
        found[name] = match[2]
    return found


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    names = [*project["build-system"]["requires"], *project["project"]["dependencies"], *(n for e in extras for n in e)]
    return [Requirement(name) for name in names]


def test_every_declared_dependency_is_pinned_exactly():
    missing = {requirement.name for requirement in declared() if canonicalize_name(requirement.name) not in pins()}
    assert missing == set()


def test_every_installed_dependency_of_a_dependency_is_pinned_to_what_is_installed():
    pinned, queue, seen = pins(), deque((requirement, "") for requirement in declared()), set[tuple[str, str]]()
    while queue:
        requirement, extra = queue.popleft()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        queue.extend((requirement, wanted) for wanted in requirement.extras)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # ray is not installed by default
        if re.match(r"nvidia|cuda|triton", name):
            continue  # these come with the other build of torch, which pins them itself
        assert pinned.get(name) == distribution.version.partition("+")[0], name
        children = (Requirement(line) for line in distribution.requires or ())
        queue.extend((r, "") for r in children if r.marker is None or r.marker.evaluate({"extra": extra}))


def test_no_file_names_a_registry():
    sites = ("pypi", "pythonhosted", "download.pytorch", "registry.npmjs", "deb.debian", "conda.anaconda")
    hosts = [f"{site}.{'org'}".encode() for site in sites]  # put together here, or this file would name them
    named = {f"{path}: {host.decode()}" for path in project_files() for host in hosts if host in path.read_bytes()}
    assert named == set()


def project_files() -> list[Path]:
    """What git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


# ---- imports go one way ----------------------------------------------------------------------------------------------

# What --help, reports and the gate need must start without torch.
TORCH_FREE = (
    "__main__",
    "case",
    "commands",
    "environment",
    "errors",
    "gate",
    "kernels.domain",
    "kernels.domain_file",
    "kernels.names",
    "record",
    "registry",
    "report",
    "runner",
    "store",
    "suite",
    "text",
    "variants.masks",
    "variants.specs",
    "workers.job",
    "yaml_lines",
)
NEEDS_TORCH = {"torch", "transformers", "diffusers"}
MUST_NOT_IMPORT = {"kernels": {"references", "variants"}, "variants": {"references"}}


def statements_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when the module is imported: no function bodies, no `if TYPE_CHECKING`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from statements_at_import(statement.orelse)
            continue
        for _, value in ast.iter_fields(statement):
            blocks = value if isinstance(value, list) else []
            yield from statements_at_import([block for block in blocks if isinstance(block, ast.stmt)])
            for handler in blocks:
                if isinstance(handler, ast.ExceptHandler | ast.match_case):
                    yield from statements_at_import(handler.body)


def imported(name: str, files: dict[str, Path], *, anywhere: bool) -> set[str]:
    """Modules that importing `name` imports directly; with `anywhere`, also those its functions and types name."""
    tree = ast.parse(files[name].read_text())
    package = name if files[name].name == "__init__.py" else name.rpartition(".")[0]
    targets: set[str] = set()
    for node in ast.walk(tree) if anywhere else statements_at_import(tree.body):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    targets.add(name)  # a module's own packages are imported before it
    with_parents = {".".join(t.split(".")[:n]) for t in targets for n in range(1, len(t.split(".")) + 1)}
    with_parents.discard(name)
    return {t for t in with_parents if t in files or not t.startswith("harness")}


def path_to(starts: list[str], files: dict[str, Path], forbidden: set[str], *, anywhere: bool = False) -> list[str]:
    """A shortest chain of imports from one of `starts` into `forbidden` (packages included), or []."""
    queue = deque([start] for start in starts)
    seen = set(starts)
    while queue:
        chain = queue.popleft()
        for target in sorted(imported(chain[-1], files, anywhere=anywhere and len(chain) == 1)):
            if any(target == name or target.startswith(f"{name}.") for name in forbidden):
                return [*chain, target]
            if target in files and target not in seen:
                seen.add(target)
                queue.append([*chain, target])
    return []


def members(area: str, files: dict[str, Path]) -> list[str]:
    return [name for name in files if name == f"harness.{area}" or name.startswith(f"harness.{area}.")]


def chain_to_torch(area: str, files: dict[str, Path]) -> list[str]:
    return path_to(members(area, files), files, NEEDS_TORCH)


def chain_against_the_direction(area: str, files: dict[str, Path]) -> list[str]:
    return path_to(members(area, files), files, {f"harness.{other}" for other in MUST_NOT_IMPORT[area]}, anywhere=True)


@pytest.mark.parametrize("area", TORCH_FREE)
def test_starts_without_torch(area):
    files = module_files(ROOT)
    if not members(area, files):
        pytest.fail(f"harness.{area} is gone: say here what took its place")
    assert chain_to_torch(area, files) == []


def test_really_starts_without_torch():
    """The same again by importing: what the syntax tree cannot see."""
    files = module_files(ROOT)
    names = ["harness", *(name for area in TORCH_FREE for name in members(area, files))]
    block = "".join(f"sys.modules[{name!r}] = None\n" for name in sorted(NEEDS_TORCH))
    program = f"import importlib, sys\n{block}for name in {names}:\n    importlib.import_module(name)\n"
    done = python("-c", program)
    assert done.code == 0, done.err


@pytest.mark.parametrize("area", MUST_NOT_IMPORT)
def test_imports_go_one_way(area):
    assert chain_against_the_direction(area, module_files(ROOT)) == []


# The checks above must be able to fail: each of these small trees breaks (or keeps) a rule in its own way.

CLEAN = {
    "__init__": "",
    "gate": "import harness.store\ndef f():\n    import torch\n",
    "store": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
    "kernels/__init__": "import torch\n",
    "kernels/eager": "from harness.shapes import B\n",
    "shapes": "B = 1\n",
    "variants/__init__": "from harness.kernels import eager\n",
    "references/__init__": "import torch\n",
    "references/golden": "G = 1\n",
}


def tree(root: Path, changes: dict[str, str]) -> dict[str, Path]:
    for name, text in {**CLEAN, **changes}.items():
        path = root / "harness" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return module_files(root)


def test_a_clean_tree_passes(tmp_path):
    files = tree(tmp_path, {})
    assert chain_to_torch("gate", files) == []
    assert chain_against_the_direction("kernels", files) == []
    assert chain_against_the_direction("variants", files) == []


def short(chain: list[str]) -> str:
    return " > ".join(name.removeprefix("harness.") for name in chain)


@pytest.mark.parametrize(
    ("changes", "chain"),
    [
        ({"gate": "import torch.nn as nn"}, "gate > torch"),
        ({"gate": "try:\n    pass\nexcept OSError:\n    from torch import Tensor"}, "gate > torch"),
        ({"gate": "class A:\n    import transformers"}, "gate > transformers"),
        ({"gate": "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"}, "gate > torch"),
        ({"store": "from harness import shapes", "shapes": "import torch"}, "gate > store > shapes > torch"),
        ({"store": "from . import kernels"}, "gate > store > kernels > torch"),
        ({"store": "from harness.kernels.eager import x"}, "gate > store > kernels > torch"),
        ({"__init__": "from harness.kernels import eager"}, "gate > harness > kernels > torch"),
    ],
)
def test_a_way_to_torch_is_found(tmp_path, changes, chain):
    assert short(chain_to_torch("gate", tree(tmp_path, changes))) == chain


@pytest.mark.parametrize(
    ("changes", "chain"),
    [
        ({"kernels/eager": "import harness.variants"}, "kernels.eager > variants"),
        ({"kernels/eager": "from ..references import golden"}, "kernels.eager > references"),
        ({"shapes": "import harness.variants"}, "kernels.eager > shapes > variants"),
        ({"variants/mha": "def f():\n    from harness import references"}, "variants.mha > references"),
        ({"variants/mha": "from harness.build import f", "build": "import harness.references.golden"},
         "variants.mha > build > references"),
    ],
)  # fmt: skip
def test_an_import_against_the_direction_is_found(tmp_path, changes, chain):
    area = re.split(r"\W", chain)[0]
    assert short(chain_against_the_direction(area, tree(tmp_path, changes))) == chain


# ---- rooms -----------------------------------------------------------------------------------------------------------


def test_every_entry_of_the_package_has_its_place_in_the_order():
    entries = {
        path.stem for path in (ROOT / "harness").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert entries - {"__init__"} == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


def test_rooms_import_only_what_stands_before_them():
    assert back_edges(ROOT) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"store": "from harness.gate import f"}, "harness.store imports harness.gate.f"),
        ({"store": "def f():\n    import harness.gate"}, "harness.store imports harness.gate"),
        ({"store": "if TYPE_CHECKING:\n    from .gate import x"}, "harness.store imports harness.gate.x"),
        ({"kernels/eager": "PLACE = 'harness.gate'"}, "harness.kernels.eager imports harness.gate"),
        ({"kernels/eager": "load(f'harness.gate.{name}')"}, "harness.kernels.eager imports harness.gate"),
        ({"store": "from harness.attic import x", "attic": ""}, "harness.store imports harness.attic.x"),
    ],
)  # fmt: skip
def test_an_import_of_a_later_room_is_found(tmp_path, changes, told):
    tree(tmp_path, {"kernels/eager": "", "shapes": ""})
    assert back_edges(tmp_path) == []
    tree(tmp_path, {"kernels/eager": "", "shapes": ""} | changes)
    assert back_edges(tmp_path) == [told]


def test_the_picture_of_the_rooms_is_current(tmp_path):
    page = PAGE.read_text()
    assert BEGIN in page
    assert page == drawn(page), "stale: run `make architecture`"
    tree(tmp_path, {"kernels/eager": ""})
    assert page != drawn(page, tmp_path)  # other imports give another picture
