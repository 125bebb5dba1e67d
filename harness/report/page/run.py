"""What the page knows of one run."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness import store
from harness.environment import Environment
from harness.errors import BadInput
from harness.gate.exact import Finding, gate
from harness.record import Record
from harness.report.folder import told

SABOTEURS, THRESHOLDS = "sensitivity.csv", "cells.csv"


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The two tables of a study: a row for each saboteur in each cell, and one for each cell."""

    findings: pd.DataFrame
    cells: pd.DataFrame


@dataclass(frozen=True)
class Run:
    """`findings` is None where no gate was asked; an empty tuple means that the gate found nothing."""

    label: str
    frame: pd.DataFrame
    environment: Environment | None = None
    config: str | None = None
    command: str | None = None
    notes: tuple[str, ...] = ()  # what a reader must know besides the rows: missing cells, a user's own kernels
    findings: tuple[Finding, ...] | None = None
    sensitivity: Sensitivity | None = None
    approximate: tuple[Record, ...] = ()  # those of kernels that left something out


def read_run(
    folder: Path,
    *,
    label: str | None = None,
    baseline: Path | None = None,
    sensitivity: Path | None = None,
) -> Run:
    """From a run's stored records; `baseline` asks the gate, `sensitivity` is the folder of a study.

    `frame.attrs` holds what `told` says, as after `rebuild`: without it an incomplete run would look whole.
    """
    folder = Path(folder)
    stored = store.read(folder)
    config = folder / store.CONFIG
    frame = store.table(stored.records)
    frame.attrs |= told(stored, folder)
    return Run(
        label=label or folder.resolve().name,
        frame=frame,
        environment=store.read_environment(folder) if (folder / store.ENVIRONMENT).exists() else None,
        config=config.read_text(encoding="utf-8", errors="replace") if config.exists() else None,
        command=_command(stored.manifest),
        notes=tuple(frame.attrs.get("notes", ())),
        findings=None if baseline is None else gate(folder, baseline),
        sensitivity=None if sensitivity is None else read_sensitivity(sensitivity),
        approximate=tuple(record for record in stored.records if record.approximation),
    )


def read_sensitivity(folder: Path) -> Sensitivity:
    folder = Path(folder)
    if lost := [name for name in (SABOTEURS, THRESHOLDS) if not (folder / name).exists()]:
        raise BadInput(f"{folder} is not the folder of a sensitivity study: it has no {', '.join(lost)}")
    return Sensitivity(pd.read_csv(folder / SABOTEURS), pd.read_csv(folder / THRESHOLDS))


def _command(manifest: store.Manifest | None) -> str | None:
    """None where it is not known: a run started from Python, or one of an older version."""
    if manifest is None or manifest.command is None:
        return None
    return shlex.join(["harness", *manifest.command])
