"""What every test file shares."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # `from tests import ...` also under a bare `pytest`


@pytest.fixture
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a wide terminal; what a test adds to the path is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """The command line configures the package's logger; a later test must neither write to its closed stream nor lose
    its own capture."""
    logger = logging.getLogger("harness")
    before = (logger.level, logger.propagate, list(logger.handlers))
    yield
    logger.level, logger.propagate, logger.handlers = before
    logger.manager._clear_cache()  # type: ignore[attr-defined]  # isEnabledFor is cached per level
