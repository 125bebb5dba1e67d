"""What the study shows, on a terminal and as Markdown; the only place where its numbers become text."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Console
from rich.text import Text

from bench.kernel_study.targets import REACHED, Verdict, all_reached
from harness.environment import Environment
from harness.report import markdown
from harness.report.story import Column
from harness.report.terminal import table_of
from harness.text import ABSENT, count, first_line, interval, is_absent, milliseconds, plain, ratio

if TYPE_CHECKING:
    from bench.kernel_study.run import Study

TITLES = {
    "prefill": "Prefill",
    "decode": "Decode: one query over S keys",
    "step": "A decode step of a whole GQA layer",
    "mla": "A decode step of MLA",
    "mha": "Whole modules beside nn.MultiheadAttention",
}
MAIN_BASELINE = {"prefill": "sdpa", "decode": "sdpa", "step": "sdpa", "mla": "transformers", "mha": "torch_mha"}
LEGEND = (
    "x: time over the other side's, the median of pairs taken in the same block (95 % interval over the blocks).",
    "% peak, % mem: the FLOPs and bytes that the mathematics needs (hidden pairs and copies not counted), over this "
    "machine's best matrix product and best reading speed in this run. Above 100: operands stay in the cache, or the "
    "kernel computes in a dtype that this processor is faster in.",
    "extra MiB: the most that one call held at once through torch's allocator, its output included.",
    "exponent: slope of log time over log length, where overhead no longer dominates: from L = 512, S = 2048 on.",
)


def print_study(study: "Study", console: Console, *, folder: Path) -> None:
    for name, rows in _by_study(study.frame, required=True):
        console.print(table_of(_measurements(rows, name), title=TITLES[name]))
        console.print()
    fitted = study.growth[study.growth["required"].astype(bool)]
    if len(fitted):
        console.print(table_of(_growth(fitted), title="Growth"))
        console.print()
    for line in LEGEND:
        console.print(Text(line, "dim"), highlight=False)
    console.print()
    console.print(table_of(_targets(study.verdicts), title="Targets"))
    console.print()
    for line in left_out_lines(study.frame):
        console.print(Text(line), highlight=False, soft_wrap=True)
    style = "bold green" if all_reached(study.verdicts) else "bold red"
    console.print(Text.assemble((headline(study), style), "  ", counts_line(study)), highlight=False)
    console.print(Text(f"{folder}/  kernels.md kernels.csv targets.csv exponents.csv"), highlight=False, soft_wrap=True)


def kernels_markdown(study: "Study", where: Environment, *, pictures: Sequence[str]) -> str:
    parts = [
        f"# kernels: {headline(study)}",
        f"**{counts_line(study)}**",
        "## Targets",
        _table(_targets(study.verdicts)),
    ]
    parts += [f"![{name}]({name})" for name in pictures]
    for name, rows in _by_study(study.frame, required=False):
        parts += [f"## {TITLES[name]}", _table(_measurements(rows, name))]
    if len(study.growth):
        parts += ["## Growth", _table(_growth(study.growth[study.growth["exponent"].notna()]))]
    parts += ["<br>".join(LEGEND), "## Not run"]
    parts += [f"- {markdown.text(line)}" for line in left_out_lines(study.frame)] or ["Nothing was left out."]
    parts += ["## Environment", roofline_line(study), markdown.environment_table(where)]
    return "\n\n".join(parts) + "\n"


def headline(study: "Study") -> str:
    if study.interrupted:
        return "INTERRUPTED"
    return "REACHED" if all_reached(study.verdicts) else "NOT ALL REACHED"


def counts_line(study: "Study") -> str:
    reached = sum(verdict.status == REACHED for verdict in study.verdicts)
    rows = study.frame["status"].value_counts()
    found = ", ".join(f"{number} {plain(status)}" for status, number in rows.items())
    return f"{reached} of {len(study.verdicts)} targets; sides of points: {found}; {study.seconds:.0f} s"


def roofline_line(study: "Study") -> str:
    peaks = ", ".join(f"{name} {value / 1e9:.0f} GFLOP/s" for name, value in study.roofline.flops_per_s.items())
    return f"Best matrix product: {peaks}. Best reading speed: {study.roofline.bytes_per_s / 1e9:.1f} GB/s."


def left_out_lines(frame: pd.DataFrame) -> list[str]:
    """Each reason once, with how many sides of points it kept out, and the first of them."""
    rest = frame[frame["status"] != "measured"]
    lines = []
    for (status, side, reason), rows in rest.groupby(["status", "side", "reason"], sort=False):
        first = rows.iloc[0]
        length = f"S{first['keys']}" if first["queries"] == 1 else f"L{first['queries']}"
        where = f"{first['study']} B{first['batch']} {first['heads']}/{first['kv_heads']} {length} {first['dtype']}"
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        lines.append(f"{status}: {plain(side)} at {where}{more}: {first_line(reason)}")
    return lines


def _by_study(frame: pd.DataFrame, *, required: bool) -> list[tuple[str, pd.DataFrame]]:
    """Measured rows; on the terminal those of the targets' cells alone."""
    shown = frame[frame["status"] == "measured"]
    if required:
        shown = shown[shown["required"].astype(bool)]
    order = ["dtype", "heads", "kv_heads", "head_dim", "batch", "note", "causal", "queries", "keys"]
    studies = ((name, shown[shown["study"] == name].sort_values(order, kind="stable")) for name in TITLES)
    return [(name, rows) for name, rows in studies if len(rows)]


def _measurements(rows: pd.DataFrame, study: str) -> list[Column]:
    listed = rows.to_dict("records")
    length = "L" if study in ("prefill", "mha") else "S"
    main = MAIN_BASELINE[study]
    columns = [
        Column("H/kv", [f"{row['heads']}/{row['kv_heads']}" for row in listed]),
        Column("D", [str(row["head_dim"]) for row in listed]),
        Column("B", [str(row["batch"]) for row in listed]),
        Column(length, [count(row["keys"]) for row in listed]),
        Column("", [_remark(row) for row in listed], left=True),
        Column("side", [plain(row["side"]) for row in listed], left=True),
        Column("ms", [milliseconds(row["ms"]) for row in listed]),
        Column(f"x {main}", [ratio(row[f"x_{main}"]) for row in listed]),
        Column("interval", [interval(row[f"x_{main}_lo"], row[f"x_{main}_hi"]) for row in listed]),
    ]
    if study == "prefill":
        columns.append(Column("x textbook", [ratio(row["x_textbook"]) for row in listed]))
    return [
        *columns,
        Column("GFLOP/s", [_number(row["gflops"]) for row in listed]),
        Column("% peak", [_percent(row["share_of_peak"]) for row in listed]),
        Column("GB/s", [_number(row["gbytes_per_s"]) for row in listed]),
        Column("% mem", [_percent(row["share_of_bandwidth"]) for row in listed]),
        Column("extra MiB", [_mebibytes(row["peak_bytes"]) for row in listed]),
    ]


def _growth(growth: pd.DataFrame) -> list[Column]:
    rows = growth.to_dict("records")
    return [
        Column("study", [plain(row["study"]) for row in rows], left=True),
        Column("side", [plain(row["side"]) for row in rows], left=True),
        Column("H/kv", [f"{row['heads']}/{row['kv_heads']}" for row in rows]),
        Column("D", [str(row["head_dim"]) for row in rows]),
        Column("B", [str(row["batch"]) for row in rows]),
        Column("", [_remark(row) for row in rows], left=True),
        Column("lengths", [f"{count(row['shortest'])}…{count(row['longest'])} ({row['lengths']})" for row in rows]),
        Column("exponent", [ratio(row["exponent"]) for row in rows]),
        Column("interval", [interval(row["lo"], row["hi"]) for row in rows]),
    ]


def _targets(verdicts: Sequence[Verdict]) -> list[Column]:
    return [
        Column("target", [verdict.target.title for verdict in verdicts], left=True),
        Column("at most", [_limit(verdict.target.limit) for verdict in verdicts]),
        Column("worst", [_limit(verdict.worst) for verdict in verdicts]),
        Column("points", [str(verdict.points) for verdict in verdicts]),
        Column("", [verdict.status for verdict in verdicts], left=True),
        Column("where", [plain(verdict.where) or ABSENT for verdict in verdicts], left=True),
    ]


def _remark(row: Any) -> str:
    words = ["causal"] * bool(row["causal"]) + ([plain(row["note"])] if row["note"] else [])
    return " ".join([*words, *([] if row["dtype"] == "float32" else [row["dtype"]])])


def _limit(value: float | None) -> str:
    """Three digits: 0.0499 must not look like its limit of 0.05."""
    return ABSENT if is_absent(value) else f"{value:.3g}"


def _number(value: Any) -> str:
    return ABSENT if is_absent(value) else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _percent(value: Any) -> str:
    return ABSENT if is_absent(value) else f"{100 * value:.0f}"


def _mebibytes(value: Any) -> str:
    return ABSENT if is_absent(value) else f"{value / 2**20:,.1f}"


def _table(columns: list[Column]) -> str:
    rows = zip(*([markdown.text(cell) for cell in column.cells] for column in columns), strict=True)
    return markdown.table_of([column.title for column in columns], rows, [column.left for column in columns])
