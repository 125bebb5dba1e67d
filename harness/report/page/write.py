"""report.html on disk."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from harness import store
from harness.errors import BadInput
from harness.report.page.build import build_page
from harness.report.page.run import Run, read_run

PAGE = "report.html"
log = logging.getLogger(__name__)

NEEDED = {"altair": "altair", "jinja2": "jinja2", "vl_convert": "vl-convert-python"}


def missing_packages() -> list[str]:
    """What the page needs and this installation has not: the `report` extra brings it."""
    return [name for module, name in NEEDED.items() if find_spec(module) is None]


def write_own_page(folder: Path, frame: pd.DataFrame) -> None:
    """At the end of a run: the page is part of its folder, but no run fails for want of it."""
    if lost := missing_packages():
        log.warning("no %s: it needs %s (the `report` extra)", PAGE, ", ".join(lost))
        return
    try:
        write_page([replace(read_run(folder), frame=frame)], folder / PAGE)
    except Exception as error:  # whatever it is, the verdict stands: it is told, and `harness report` shows it again
        log.warning("no %s: %s: %s", PAGE, type(error).__name__, error)


def write_page(runs: Sequence[Run], path: Path) -> None:
    if lost := missing_packages():
        raise BadInput(
            f"{path.name} needs {', '.join(lost)}; install them with: pip install 'attention-harness[report]'"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # A label may hold half of a surrogate pair, from a folder name that is no UTF-8.
    store.write_atomically(path, build_page(runs).encode(errors="backslashreplace"))
