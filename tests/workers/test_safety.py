"""Files that others wrote are data: no YAML tag, no pickle and no shell ever runs them."""

import ast
from collections.abc import Iterator

import pytest

from harness.suite.config import ConfigError, load_suite
from tests.support import ROOT

PACKAGE = ROOT / "harness"
FORBIDDEN = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open", "dill.load"),
    *("joblib.load", "pandas.read_pickle", "numpy.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load"),
    *("yaml.full_load", "yaml.unsafe_load_all", "yaml.full_load_all"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "eval", "builtins.eval"),
}
# The one place that runs a user's file, because its name was given on the command line or in the config.
EXEC_ALLOWED = {"kernels/plugin.py"}
# The kernel's own process reads modules that the judge sends; nothing is ever unpickled in the other direction.
UNPICKLES = {"candidate/server.py"}


def imported_names(tree: ast.AST) -> dict[str, str]:
    """What each local name stands for: `import numpy as np` and `from os import system as s` hide nothing."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def dangers(source: str, *, may_exec: bool = False) -> Iterator[str]:
    tree = ast.parse(source)
    names = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and dotted(node, names) in FORBIDDEN:
            yield f"{node.lineno}: {dotted(node, names)}"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func, names)
        options = {keyword.arg: keyword.value for keyword in node.keywords}
        if name == "torch.load" and not is_true(options.get("weights_only")):
            yield f"{node.lineno}: torch.load without weights_only=True"
        if "shell" in options and not is_false(options["shell"]):
            yield f"{node.lineno}: a shell"
        if name == "exec" and not may_exec:
            yield f"{node.lineno}: exec"


def is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def test_the_package_runs_no_data():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    found = {
        f"{path.relative_to(PACKAGE)}:{danger}"
        for path in files
        for danger in dangers(path.read_text(), may_exec=path.relative_to(PACKAGE).as_posix() in EXEC_ALLOWED)
    }
    unpickled = {danger for danger in found if danger.endswith("pickle.Unpickler")}
    assert {danger.partition(":")[0] for danger in unpickled} == UNPICKLES
    assert found == unpickled


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "import pickle as p\np.load(f)",
        "from pickle import loads as read\nread(b'')",
        "def f():\n    from pickle import Unpickler\n    Unpickler(f)",
        "import yaml\nyaml.load(text, yaml.Loader)",
        "import yaml\nread = yaml.unsafe_load",
        "import pandas as pd\npd.read_pickle(path)",
        "import numpy as np\nnp.load(path)",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import os\nos.system('ls')",
        "from os import popen\npopen('ls')",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.Popen('ls', shell=flag)",
        "eval(text)",
        "exec(text)",
    ],
)
def test_each_danger_is_seen(source):
    assert list(dangers(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import torch\ntorch.load(path, weights_only=True)",
        "import json\njson.loads(text)",
        "import yaml\nyaml.safe_load(text)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "import pickle\npickle.dumps(x)",
    ],
)
def test_what_is_safe_is_let_through(source):
    assert list(dangers(source)) == []


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch pwned']",
        "!!python/object/new:os.system ['touch pwned']",
        "!!python/object:harness.case.Case {}",
        "!!python/name:os.system",
        "!!python/module:os",
        "!<tag:yaml.org,2002:python/object/apply:os.mkdir> [pwned]",
        "[1, {a: !!python/object/apply:os.mkdir [pwned]}]",
    ],
)
def test_a_config_cannot_make_objects(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "c.yaml"
    path.write_text(f"name: a\nseed: {value}\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:2: .*YAML tags are not allowed"):
        load_suite(path)
    assert list(tmp_path.iterdir()) == [path]
