"""What every test file shares."""

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # `from tests import ...` also under a bare `pytest`

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script, where tests of Ctrl-C would fail
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first: at the end the other process would wait for one of them."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a wide terminal; what a test adds to the path is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(autouse=True)
def _processes_with_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels' processes, workers and the gate's are forks of one that has imported torch, which takes 2 to 4 seconds.

    Not where a test is marked `fresh`, and not in the processes that a test starts itself.
    """
    from harness.candidate import child
    from harness.gate import process
    from tests.support import nursery

    users = [vars(child), vars(process)]
    for names in users if request.node.get_closest_marker("fresh") is None else ():
        names["subprocess"] = nursery.SUBPROCESS
    yield
    for names in users:
        names["subprocess"] = subprocess


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """The command line configures the package's logger; a later test must neither write to its closed stream nor lose
    its own capture."""
    logger = logging.getLogger("harness")
    before = (logger.level, logger.propagate, list(logger.handlers))
    yield
    logger.level, logger.propagate, logger.handlers = before
    logger.manager._clear_cache()  # type: ignore[attr-defined]  # isEnabledFor is cached per level
