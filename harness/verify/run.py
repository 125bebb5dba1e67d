"""`harness verify`: one family or all of them, told of as it goes, and written to a folder."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.console import Console

from harness import environment, store
from harness.errors import BadInput
from harness.families.family import FamilyError
from harness.families.names import family_names
from harness.kernels.front import find_kernel
from harness.report.verification import print_layers, print_name, print_step, print_verdict, verification_markdown
from harness.swaps.engine import ADAPTERS
from harness.tuning import file as tuning_file
from harness.tuning.use import placeholder, tuned_name
from harness.verify.result import Verification
from harness.verify.steps import not_loaded, verify

MARKDOWN, TABLE, LAYERS = "verify.md", "verify.csv", "layers.csv"


def run(
    targets: Sequence[str],
    *,
    kernel: str = "eager",
    tuned: Path | None = None,
    budget: Mapping[str, Any] | None = None,
    console: Console,
    out: Path | None = None,
    config: Mapping[str, Any] | None = None,
    path: Path | None = None,
    every_layer: bool = False,
) -> list[Verification]:
    """One target, or several one after the other: of several, one that cannot be loaded does not stop the rest."""
    tuned = tuned or tuned_name(kernel)
    thresholds = None if tuned is None else tuning_file.load(tuned)
    found_kernel = find_kernel(kernel) if thresholds is None else placeholder(thresholds)
    _refuse_taken(out)
    where = environment.collect(torch.get_num_threads())
    folder: Path | None = None
    found: list[Verification] = []
    for target in targets:
        print_name(target, console)
        try:
            done = verify(
                target,
                kernel=found_kernel,
                tuned=thresholds,
                budget=budget,
                config=config,
                path=path,
                on_step=lambda step: print_step(step, console),
            )
        except BadInput as error:
            if len(targets) == 1:
                raise
            done = not_loaded(target, found_kernel, error)
            for step in done.steps:
                print_step(step, console)
        if every_layer or done.approximate:
            print_layers(done, console, every_batch=every_layer)
        found.append(done)
        folder = folder or _create(out)
        _write(folder, found, where)  # after each, so that an interrupted run leaves what it found
    assert folder is not None
    print_verdict(found, console, folder=folder)
    return found


def all_families() -> tuple[str, ...]:
    missing = [library for library, _ in ADAPTERS if importlib.util.find_spec(library) is None]
    if missing:
        raise FamilyError(f"--all needs {' and '.join(missing)}: pip install 'attention-harness[models]'")
    return family_names()


def _refuse_taken(out: Path | None) -> None:
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise BadInput(f"{out} is a file; --out needs a folder")
    if (out / TABLE).exists():
        raise BadInput(f"{out} already holds {TABLE} of another run; give another --out or move it")


def _create(out: Path | None) -> Path:
    if out is None:
        return store.new_folder(Path("results"), "verify")
    out.mkdir(parents=True, exist_ok=True)
    return out


def _write(folder: Path, found: Sequence[Verification], where: environment.Environment) -> None:
    layers = [each.layers for each in found if not each.layers.empty] or [found[0].layers]
    tables = {
        TABLE: pd.DataFrame([each.row() for each in found]),
        LAYERS: pd.concat(layers, ignore_index=True),
    }
    for name, frame in tables.items():
        store.write_atomically(folder / name, frame.to_csv(index=False, lineterminator="\n").encode())
    store.write_atomically(folder / MARKDOWN, verification_markdown(found, where).encode())
    store.write_environment(folder, where)
