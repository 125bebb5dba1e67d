"""summary.md: the terminal's story as GitHub tables, for a CI job's page and for reading later."""

from operator import itemgetter

import pandas as pd

from harness.environment import Environment
from harness.report import story
from harness.report.summary import judge, not_ok, summarise
from harness.report.table import Code, Column, Table, code, escaped
from harness.text import count, first_line, interval, milliseconds, ratio, small

SHOWN = 20
ID = Column("cell", lambda row: Code(row["case_id"]), left=True)
STATUS = Column("status", lambda row: row["status"], left=True)
CELL = [
    ID,
    STATUS,
    Column("error/N", lambda row: ratio(row["err_ratio"])),
    Column("max error", lambda row: small(row["max_abs_err"])),
    Column("budget", lambda row: small(row["err_budget"])),
    Column("params", lambda row: count(row["params"])),
    Column("KV B/token", lambda row: count(row["kv_bytes_per_token"])),
    Column("ms", lambda row: milliseconds(row["latency_ms"])),
    Column("ref ms", lambda row: milliseconds(row["ref_latency_ms"])),
    Column("x ref", lambda row: ratio(row["latency_ratio"])),
    Column("interval", lambda row: interval(row["latency_ratio_lo"], row["latency_ratio_hi"])),
    Column("x against", lambda row: ratio(row["ratio_to"])),
    Column("timing", lambda row: row["timing"], left=True),
    Column("message", lambda row: first_line(row["error"]), left=True),
]


def summary_markdown(frame: pd.DataFrame, environment: Environment | None, *, suite: str | None = None) -> str:
    verdict = judge(frame)
    parts = [f"# {escaped(suite)}: {story.headline(verdict)}" if suite else f"# {story.headline(verdict)}"]
    worst = story.worst_line(verdict)
    parts.append(f"**{story.counts_line(verdict)}**" + (f"; {worst} in {code(verdict.worst_case_id)}" if worst else ""))
    parts += [line] if (line := story.disturbed_line(verdict)) else []
    parts += [code(note) for note in frame.attrs.get("notes", ())]
    if len(frame):
        for table in story.by_question(summarise(frame), ranges=True):
            parts += [f"## {table.title}", table.markdown()]
        parts.append("<br>".join(story.LEGEND))
    if len(bad := not_ok(frame)):
        columns = [STATUS, ID, Column("why", story.explain, left=True)]
        parts += ["## Not ok", Table(columns, bad.head(SHOWN).to_dict("records")).markdown()]
        parts += [f"+{len(bad) - SHOWN} more, see results.csv"] if len(bad) > SHOWN else []
    if line := story.measured_line(frame):
        parts.append(line)
    if environment is not None:
        parts += ["## Environment", environment_table(environment)]
    if len(frame):
        parts.append(folded(f"All {len(frame)} cells", Table(CELL, frame.to_dict("records")).markdown()))
    return "\n\n".join(parts) + "\n"


def folded(title: str, text: str) -> str:
    """A text that opens when its title is clicked."""
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def environment_table(environment: Environment) -> str:
    state = " (dirty)" if environment.dirty else ""
    versions = {name: getattr(environment, name) for name in ("python", "torch", "numpy", "pandas", "harness")}
    rows = [
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)),
        ("machine", f"{environment.cpu}, {environment.cores} logical cores, {environment.threads} threads used"),
        ("memory", f"{environment.memory_bytes / 2**30:.1f} GiB"),
        ("platform", environment.platform),
        ("commit", f"{environment.commit}{state}" if environment.commit else f"none{state}"),
    ]
    columns = [Column("", itemgetter(place), left=True) for place in (0, 1)]
    return Table(columns, rows).markdown()
