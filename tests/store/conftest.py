"""What the tests of a run's folder share."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness import environment, store
from tests.support.runs import CONFIG


@pytest.fixture
def beside_a_config(in_an_empty_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with c.yaml in it and nothing else, on a machine that stays as it is."""
    monkeypatch.setattr(store, "code_sha256", lambda: "c0de")  # someone may be editing the source
    here = environment.collect(1)  # asks git: once is enough
    monkeypatch.setattr(environment, "collect", lambda threads: replace(here, threads=threads))
    Path("c.yaml").write_text(CONFIG)
