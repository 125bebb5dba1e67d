"""summary.md: the terminal's story as GitHub tables, for a CI job's page and for reading later."""

import html
import re
from collections.abc import Iterable, Sequence

import pandas as pd

from harness.environment import Environment
from harness.report import story
from harness.report.summary import judge, not_ok, summarise
from harness.text import count, first_line, interval, measured_line, milliseconds, plain, ratio, small

SHOWN = 20
CELL_TITLES = ("cell", "status", "error/N", "max error", "budget", "params", "KV B/token", "ms", "ref ms", "x ref",
               "interval", "message")  # fmt: skip


def summary_markdown(
    frame: pd.DataFrame,
    environment: Environment | None,
    *,
    suite: str | None = None,
    measured_share: float | None = None,
    elapsed: float | None = None,
) -> str:
    verdict = judge(frame)
    parts = [f"# {text(suite)}: {story.headline(verdict)}" if suite else f"# {story.headline(verdict)}"]
    worst = story.worst_line(verdict)
    parts.append(f"**{story.counts_line(verdict)}**" + (f"; {worst} in {code(verdict.worst_case_id)}" if worst else ""))
    parts += [code(note) for note in frame.attrs.get("notes", ())]
    if len(frame):
        parts += _variants(summarise(frame))
    parts += _not_ok(not_ok(frame))
    if line := measured_line(measured_share, elapsed):
        parts.append(line)
    if environment is not None:
        parts += ["## Environment", environment_table(environment)]
    if len(frame):
        parts.append(f"<details><summary>All {len(frame)} cells</summary>\n\n{_cells(frame)}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _variants(summary: pd.DataFrame) -> list[str]:
    names = story.names(summary)
    parts = []
    for group in story.groups(summary, ranges=True):
        columns = [*names, *group.columns]
        rows = zip(*([text(cell) for cell in column.cells] for column in columns), strict=True)
        lefts = [column.left for column in columns]
        parts += [f"## {group.question}", table_of([column.title for column in columns], rows, lefts)]
    return [*parts, "<br>".join(story.LEGEND)]


def _not_ok(bad: pd.DataFrame) -> list[str]:
    if bad.empty:
        return []
    rows = [
        (row["status"], code(row["case_id"]), text(story.explain(row))) for row in bad.head(SHOWN).to_dict("records")
    ]
    more = [f"+{len(bad) - SHOWN} more, see results.csv"] if len(bad) > SHOWN else []
    return ["## Not ok", table_of(("status", "cell", "why"), rows, [True] * 3), *more]


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
    return table_of(("", ""), [(name, text(value)) for name, value in rows], [True, True])


def _cells(frame: pd.DataFrame) -> str:
    rows = [
        (
            code(row["case_id"]),
            row["status"],
            ratio(row["err_ratio"]),
            small(row["max_abs_err"]),
            small(row["err_budget"]),
            count(row["params"]),
            count(row["kv_bytes_per_token"]),
            milliseconds(row["latency_ms"]),
            milliseconds(row["ref_latency_ms"]),
            ratio(row["latency_ratio"]),
            interval(row["latency_ratio_lo"], row["latency_ratio_hi"]),
            text(first_line(row["error"])),
        )
        for row in frame.to_dict("records")
    ]
    return table_of(CELL_TITLES, rows, [title in ("cell", "status", "message") for title in CELL_TITLES])


def table_of(titles: Sequence[str], rows: Iterable[Sequence[str]], lefts: Sequence[bool]) -> str:
    rule = [":--" if left else "--:" for left in lefts]
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, rule, *rows))


def text(value: object) -> str:
    """Foreign text as itself: no markup, no HTML, no cell border, no line break."""
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", html.escape(plain(value), quote=False))


def code(value: object) -> str:
    """An id as code, unless it could end the code span or the cell."""
    shown = plain(value)
    return text(shown) if re.search(r"[`|\\]", shown) or not shown else f"`{shown}`"
