"""A run as the page, `harness show` and `harness compare` read it from its folder."""

import json
import shlex
from dataclasses import dataclass, fields
from pathlib import Path

import pandas as pd

from harness import store
from harness.environment import Environment
from harness.errors import BadInput
from harness.gate.baseline import read_gated_run
from harness.gate.exact import gate
from harness.gate.findings import Finding, TimingVerdict
from harness.record import Record
from harness.report.folder import told
from harness.report.gate_files import JSON

SABOTEURS, THRESHOLDS = "sensitivity.csv", "cells.csv"


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The two tables of a study: a row for each saboteur in each cell, and one for each cell."""

    findings: pd.DataFrame
    cells: pd.DataFrame


@dataclass(frozen=True)
class StoredRun:
    """`findings` is None where no gate was asked; an empty tuple means that the gate found nothing. `timing` is what it
    said of the cells' times, where it timed them."""

    label: str
    frame: pd.DataFrame
    environment: Environment | None = None
    config: str | None = None
    command: str | None = None
    notes: tuple[str, ...] = ()  # what a reader must know besides the rows: missing cells, a user's own kernels
    findings: tuple[Finding, ...] | None = None
    timing: tuple[TimingVerdict, ...] = ()
    sensitivity: Sensitivity | None = None
    approximate: tuple[Record, ...] = ()  # those of kernels that left something out


def read_run(
    folder: Path, *, label: str | None = None, baseline: Path | None = None, sensitivity: Path | None = None
) -> StoredRun:
    """From a run's stored records; `baseline` asks the gate, `sensitivity` is the folder of a study. Without a baseline
    the folder's own gate.json tells, if a gate has written one.

    `frame.attrs` holds what `told` says, as after `rebuild`: without it an incomplete run would look whole.
    """
    folder = Path(folder)
    stored = store.read(folder)
    config = folder / store.CONFIG
    frame = store.table(stored.records)
    frame.attrs |= told(stored, folder)
    findings, timing = read_gate(folder / JSON)
    return StoredRun(
        label=label or folder.resolve().name,
        frame=frame,
        environment=store.read_environment(folder) if (folder / store.ENVIRONMENT).exists() else None,
        config=store.read_regular(config).decode(errors="replace") if config.exists() else None,
        command=_command(stored.manifest),
        notes=tuple(frame.attrs.get("notes", ())),
        findings=findings if baseline is None else gate(read_gated_run(folder), baseline),
        timing=timing,
        sensitivity=None if sensitivity is None else read_sensitivity(sensitivity),
        approximate=tuple(record for record in stored.records if record.approximation),
    )


def read_gate(path: Path) -> tuple[tuple[Finding, ...] | None, tuple[TimingVerdict, ...]]:
    """What the gate wrote of this run; None and nothing where there was none."""
    if not path.exists():
        return None, ()
    try:
        document = json.loads(store.read_regular(path).decode())
        known = {field.name for field in fields(TimingVerdict)}
        timing = [{key: value for key, value in row.items() if key in known} for row in document["timing"]]
        return tuple(Finding(**row) for row in document["findings"]), tuple(TimingVerdict(**row) for row in timing)
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} was not written by this gate: {error!r}") from error


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
