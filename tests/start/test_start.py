"""The first minutes: a config by its name, a version, an answer to each typo, a reference that is fresh, five files."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.suite.config import ConfigError, find_config, load_suite, shipped_configs
from harness.suite.grid import AXES
from harness.suite.reference import axis_keys, markdown, top_keys
from harness.suite.schema import Document
from tests.support import ROOT, called


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_config_of_the_package_has_a_name(tmp_path: Path) -> None:
    assert {"smoke", "default", "nightly", "kernel"} <= shipped_configs().keys()
    for name, about in shipped_configs().items():
        assert about and load_suite(name).name == name
        assert load_suite(name).cases == load_suite(ROOT / "configs" / f"{name}.yaml").cases  # known once
    (tmp_path / "smoke").mkdir()  # a folder is no config
    assert load_suite("smoke").name == "smoke"


def test_a_path_wins(tmp_path: Path) -> None:
    (tmp_path / "smoke.yaml").write_text("name: mine\ngrid: {variant: mha, embed_dim: 8, heads: 2, seq_len: 3}\n")
    assert load_suite("smoke.yaml").name == "mine" and load_suite("smoke").name == "smoke"
    (tmp_path / "smoke.yaml").rename(tmp_path / "smoke")
    assert load_suite("smoke").name == "mine" and find_config("smoke") == Path("smoke")


def test_the_version_is_told(capsys) -> None:
    from importlib.metadata import version

    told = called(capsys, "--version")
    assert (told.code, told.out) == (0, f"harness {version('attention-harness')}\n")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["rnu", "smoke"], "run"),
        (["run", "smok"], "smoke"),
        (["run", "smoke.yml"], "smoke"),
        (["run", "smoke", "--kernle", "eager"], "--kernel"),
        (["run", "smoke", "--kernel", "eagr"], "eager"),
        (["run", "smoke", "--executor", "lokal"], "local"),
        (["verify", "lama"], "llama"),
        (["advise", "--model", "lama-3-8b"], "llama-3-8b"),
        (["report", "x", "--format", "htm"], "html"),
        (["sensitivity", "smoke", "--only", "softmax_over_querys"], "softmax_over_queries"),
        (["gate", "--base", "HEAD", "--timing-only", "smok"], "smoke"),
    ],
)
def test_a_typo_is_answered(words: list[str], meant: str, capsys) -> None:
    told = called(capsys, *words)
    assert told.code == 2
    assert f"did you mean {meant!r}?" in told.err


def test_the_reference_is_fresh_and_whole(capsys) -> None:
    told = called(capsys, "list", "--config")
    assert told.out == markdown() == (ROOT / "docs" / "config.md").read_text(), "harness list --config > docs/config.md"
    assert [key.where for key in axis_keys()] == list(AXES)
    assert {key.where.partition(".")[0] for key in top_keys()} == Document.model_fields.keys()
    assert all(key.rule and key.about for key in (*top_keys(), *axis_keys()))


def test_a_rule_of_the_reference_is_what_a_wrong_value_is_told() -> None:
    (rule,) = (key.rule for key in axis_keys() if key.where == "heads")
    assert rule == "a positive whole number; at most 65536"
    with pytest.raises(ConfigError, match="must be a positive whole number"):
        load_suite({"name": "x", "grid": {"variant": "mha", "embed_dim": 8, "heads": "two", "seq_len": 3}})


def test_init_writes_files_that_are_in_order(tmp_path: Path, capsys) -> None:
    told = called(capsys, "init", "new")
    assert told.code == 0 and told.out.splitlines()[-1] == "next: cd new && harness run attention.yaml"
    new = tmp_path / "new"
    assert load_suite(new / "attention.yaml").cases
    program = Path(sys.executable).with_name("ruff")
    done = subprocess.run([program, "check", "--isolated", "."], cwd=new, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    schema = [str(Path(sys.executable).with_name("check-jsonschema")), "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*schema, new / ".github/workflows/attention.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_init_overwrites_nothing(tmp_path: Path, capsys) -> None:
    (tmp_path / "Makefile").write_text("mine:\n")
    told = called(capsys, "init")
    assert told.code == 0 and "add to it: include attention.mk" in told.out
    assert (tmp_path / "Makefile").read_text() == "mine:\n" and (tmp_path / "attention.mk").exists()
    (tmp_path / "my_kernels.py").write_text("years of work")
    refused = called(capsys, "init")
    assert refused.code == 2 and "my_kernels.py" in refused.err and "nothing was written" in refused.err
    assert (tmp_path / "my_kernels.py").read_text() == "years of work"
