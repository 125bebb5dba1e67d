"""Whatever a config file holds: a plan, or exit 2 and a message that names the file; soon, and in bounded memory."""

import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.candidate.state import preserved
from tests import fuzzed_configs
from tests.fuzzed_configs import (
    BOMBS,
    FUZZED,
    PLUGIN,
    PLUGIN_SOURCE,
    TINY,
    Fuzzed,
    TooSlow,
    at_most,
    command,
    dump,
    plan,
)

MEMORY = 400 * 2**20  # beyond what the tests before it needed


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / PLUGIN).write_text(PLUGIN_SOURCE)
        yield Path(name)


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@given(fuzzed=FUZZED)
@settings(max_examples=250, deadline=None, derandomize=True, database=None)
def test_any_config_is_planned_or_refused(folder, fuzzed: Fuzzed):
    plan(folder / "fuzzed.yaml", fuzzed.data)
    assert sorted(path.name for path in folder.iterdir()) == ["fuzzed.yaml", PLUGIN]  # no tag ran, nothing was written


@pytest.mark.parametrize("bomb", BOMBS)
def test_size_takes_neither_time_nor_memory(folder, bomb: str):
    data = BOMBS[bomb](20_000).encode()
    before = peak_memory()
    plan(folder / "fuzzed.yaml", data)
    assert peak_memory() - before <= MEMORY


@given(config=TINY, cell=st.integers(0, 1000))
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
def test_what_is_planned_runs(folder, config, cell):
    path = folder / "fuzzed.yaml"
    assert plan(path, dump(config).encode()).code in (0, 2)  # a few grids hold an impossible cell
    cells = len(fuzzed_configs.cells_of(path))
    if cells:
        with tempfile.TemporaryDirectory() as out, preserved():
            found = fuzzed_configs.run_one(path, Path(out) / "run", cell=cell % cells, cells=cells)
        assert found.code in (0, 1), found
        assert found.message == "", found


# ---- the fuzzer itself -----------------------------------------------------------------------------------------------


def test_a_hang_is_noticed():
    def hang() -> None:
        while True:
            pass

    with pytest.raises(TooSlow, match=r"0\.05 s"), at_most(0.05):
        hang()


def test_a_bug_is_noticed(folder, monkeypatch):
    monkeypatch.setattr("harness.suite.config.load_suite", lambda *a, **k: 1 / 0)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        plan(folder / "fuzzed.yaml", b"a: 1")


def test_the_file_must_be_named(folder, monkeypatch):
    from harness.errors import BadInput

    def refuse(*arguments, **options):
        raise BadInput("no")

    monkeypatch.setattr("harness.suite.config.load_suite", refuse)
    with pytest.raises(AssertionError, match="no"):
        plan(folder / "fuzzed.yaml", b"a: 1")


def test_tiny_configs_are_mostly_valid(folder):
    """Or most of the fuzzing would end at the first check."""
    codes: list[int] = []

    @given(config=TINY)
    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    def count(config):
        codes.append(plan(folder / "fuzzed.yaml", dump(config).encode()).code)

    count()
    assert codes.count(0) > 0.5 * len(codes)


def test_the_streams_are_those_of_the_command():
    assert command("list", "--quiet").code == 0
