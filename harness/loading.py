"""`harness.load`: a run's table for a notebook, or several runs' under each other."""

import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from harness import store
from harness.errors import BadInput

Folder = str | os.PathLike[str]


def load(folders: Folder | Sequence[Folder]) -> pd.DataFrame:
    """One row a cell, a missing measurement is missing. Of a list, with the run's name in a first column `run`.

    `frame.attrs["missing"]` names the cells that a run should have and has not.
    """
    if isinstance(folders, str | os.PathLike):
        return store.load(Path(folders))
    paths = [Path(folder) for folder in folders]
    if not paths:
        raise BadInput("no folder is given: there is nothing to load")
    refuse_twice(paths)
    frames = [store.load(path) for path in paths]
    for name, frame in zip(labels(paths), frames, strict=True):
        frame.insert(0, "run", pd.Series(name, index=frame.index, dtype="string"))
    missing = [case_id for frame in frames for case_id in frame.attrs.pop("missing")]
    whole = pd.concat(frames, ignore_index=True)
    whole.attrs["missing"] = missing
    return whole


def refuse_twice(folders: Sequence[Path]) -> None:
    """One run under two names would count its cells twice."""
    seen: dict[Path, Path] = {}
    for folder in folders:
        first = seen.setdefault(folder.resolve(), folder)
        if first is not folder:
            same = "" if first == folder else f", as {first} and as {folder}"
            raise BadInput(f"{folder.resolve()}: the same folder is given twice{same}")


def labels(folders: Sequence[Path]) -> list[str]:
    """The folders' names, or their paths where two have the same name."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    return [str(folder) for folder in folders]
