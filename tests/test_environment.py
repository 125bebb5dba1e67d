"""The environment of a run: collected, kept, compared."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.environment import Environment, collect
from tests.support import git


def test_collects_what_is_there(tmp_path: Path) -> None:
    found = collect(3, tree=tmp_path)
    assert found.threads == 3
    assert found.cores >= 1
    assert found.memory_bytes > 2**20
    assert found.cpu
    assert found.torch
    assert found.pandas
    assert found.numpy
    assert found.commit is None
    assert found.dirty is None


def test_round_trip_through_json(tmp_path: Path) -> None:
    found = replace(collect(1, tree=tmp_path), cpu="Über-CPU ™", commit="abc", dirty=True)
    assert Environment.from_json(found.to_json()) == found


@pytest.mark.parametrize("text", ["[]", '{"python": "3.11"}'])
def test_refuses_what_is_no_environment(text: str) -> None:
    with pytest.raises(ValueError, match="not an environment"):
        Environment.from_json(text)


def test_one_of_another_version_is_read(tmp_path: Path) -> None:
    """What a newer one noted beyond ours is left out, what an older one did not is not known."""
    here = collect(1, tree=tmp_path)
    data = json.loads(here.to_json())
    assert Environment.from_json(json.dumps(data | {"moon": "full"})) == here
    del data["pandas"]
    assert Environment.from_json(json.dumps(data)) == replace(here, pandas=None)
    for broken in ("[]", json.dumps({"moon": "full"})):
        with pytest.raises(ValueError, match="not an environment"):
            Environment.from_json(broken)


def test_names_what_differs(tmp_path: Path) -> None:
    here = collect(1, tree=tmp_path)
    assert here.differences(here) == {}
    assert here.differences(replace(here, threads=8)) == {"threads": (1, 8)}


def test_commit_and_dirty_flag(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert collect(1, tree=tmp_path).commit is None  # a tree without a commit
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
    clean = collect(1, tree=tmp_path)
    assert clean.commit == git(tmp_path, "rev-parse", "HEAD")
    assert clean.dirty is False
    (tmp_path / "new.py").write_text("x = 1\n")
    assert collect(1, tree=tmp_path).dirty is True
