"""A run's folder as its readers see it: one record a cell, and what is missing said aloud."""

import logging
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.record import Record
from harness.store.manifest import MANIFEST, Manifest, read_manifest
from harness.store.records import latest, read_lines
from harness.store.tables import table

NAMED = 5  # missing cells that a message names

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    records: list[Record]
    manifest: Manifest | None
    missing: tuple[str, ...]

    @property
    def lack(self) -> str | None:
        """What is missing, in words; None where nothing is."""
        if not self.missing or self.manifest is None:
            return None
        return f"incomplete: {len(self.records)} of {len(self.manifest.planned)} cells"


def read(folder: Path) -> Stored:
    lines = read_lines(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        log.warning("%s has no %s: whether cells are missing is not known", folder, MANIFEST)
        return Stored(latest(lines, None), None, ())
    records = latest(lines, manifest.planned)
    found = {record.case_id for record in records}
    return Stored(records, manifest, tuple(case_id for case_id in manifest.planned if case_id not in found))


def some(case_ids: tuple[str, ...]) -> str:
    more = f" and {len(case_ids) - NAMED} more" if len(case_ids) > NAMED else ""
    return ", ".join(case_ids[:NAMED]) + more


def read_records(folder: Path) -> list[Record]:
    """One record for every finished case, in the suite's order."""
    return read(folder).records


def load(folder: Path) -> pd.DataFrame:
    """The table of a run; `frame.attrs["missing"]` names the cells that it should have and has not."""
    stored = read(folder)
    if stored.lack:
        log.warning("%s is %s; missing: %s", folder, stored.lack, some(stored.missing))
    frame = table(stored.records)
    frame.attrs["missing"] = list(stored.missing)
    return frame
