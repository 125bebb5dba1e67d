"""Everything in a run's folder that can be derived is derived again from its records."""

from pathlib import Path
from typing import Any

import pandas as pd

from harness import store
from harness.gate.baseline import suite_name
from harness.kernels.names import is_plugin
from harness.record import Record
from harness.report.benchmark_file import write_benchmarks
from harness.report.markdown import summary_markdown
from harness.report.sparsity import is_approximate, sparsity_markdown

SUMMARY = "summary.md"


def rebuild(folder: Path, *, suite: str | None = None, elapsed: float | None = None) -> pd.DataFrame:
    """Tables, summary.md, benchmark.json. `elapsed`: the wall time of the run where known, else the time of its cases.

    `frame.attrs` holds what else is to be told: which cells are missing, how to go on, which file each kernel of a
    user's own came from, and the share of time that was measured.
    """
    folder = Path(folder)
    stored = store.read(folder)
    frame = store.write_tables(folder, stored.records)
    frame.attrs |= told(stored, folder) | measured_share(stored.records, elapsed)
    environment = store.read_environment(folder) if (folder / store.ENVIRONMENT).exists() else None
    if suite is None:
        suite = suite_name(folder) if (folder / store.CONFIG).exists() else folder.resolve().name
    text = summary_markdown(frame, environment, suite=suite)
    if is_approximate(frame):
        text += "\n" + "\n\n".join(sparsity_markdown(folder)) + "\n"
    store.write_atomically(folder / SUMMARY, text.encode())
    write_benchmarks(folder, stored.records)
    return frame


def told(stored: store.Stored, folder: Path) -> dict[str, Any]:
    """What a table's readers must know besides its rows; kept in `frame.attrs`."""
    manifest = stored.manifest
    if manifest is None:
        return {}
    notes = []
    if stored.lack:
        command = manifest.resume_command(folder)
        notes.append(f"{stored.lack}, resume with: {command}" if command else f"{stored.lack}, merged with --partial")
    for name, origin in manifest.kernels.items():
        if is_plugin(name):
            notes.append(f"kernel {name} from {origin}")
    if manifest.changes:
        notes.append(f"put together although these changed: {'; '.join(manifest.changes)}")
    return {"missing": list(stored.missing), "notes": notes}


def measured_share(records: list[Record], elapsed: float | None = None) -> dict[str, Any]:
    """For `frame.attrs`: the share of time spent inside measured or compared calls, and of how many seconds. Nothing
    where nothing was clocked: no share is made up."""
    measured = [record.measured_seconds for record in records if record.measured_seconds is not None]
    seconds = elapsed if elapsed is not None else sum(record.seconds or 0.0 for record in records)
    return {"measured_share": sum(measured) / seconds, "elapsed": seconds} if measured and seconds > 0 else {}
