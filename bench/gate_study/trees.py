"""The versions of the study as real trees: the base, the same again, and one that does extra work."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.gate_study.extra_work import ADDED, COUNTS
from harness.store import write_atomically

SOURCE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Trees:
    """Copies, so that a study that runs for hours is not disturbed by edits."""

    base: Path
    same: Path  # a second copy: head of an A/A night
    slowed: Path  # head of a night with slowed cells; `slow_down` says which

    def slow_down(self, rows: Mapping[str, int]) -> None:
        """Before a night: the rows of extra work for each cell that is slowed in it."""
        write_atomically(self.slowed / "harness" / COUNTS, json.dumps(dict(rows)).encode())


def make_trees(folder: Path, source: Path = SOURCE) -> Trees:
    """In `folder`, once: a study that is continued goes on with the code that it began with."""
    trees = Trees(folder / "base", folder / "same", folder / "slowed")
    for tree in (trees.base, trees.same, trees.slowed):
        if tree.exists():
            continue
        unfinished = tree.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        for part in ("harness", "bench"):
            shutil.copytree(source / part, unfinished / part, ignore=shutil.ignore_patterns("__pycache__"))
        if tree == trees.slowed:
            with (unfinished / "harness" / "cell" / "measure.py").open("a", encoding="utf-8") as file:
                file.write(ADDED)
            (unfinished / "harness" / COUNTS).write_text("{}")
        unfinished.rename(tree)
    return trees
