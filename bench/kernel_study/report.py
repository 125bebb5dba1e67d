"""What the study shows, on a terminal and as Markdown; the only place where its numbers become text."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Console
from rich.text import Text

from bench.kernel_study.targets import REACHED, Verdict, all_reached
from harness.environment import Environment
from harness.report.markdown import environment_table
from harness.report.table import Column, Table, escaped
from harness.report.terminal import say
from harness.text import ABSENT, count, first_line, interval, is_absent, milliseconds, number, plain, ratio

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
    fitted = study.growth[study.growth["required"].astype(bool)]
    for table in (*_measurements(study.frame, required=True), *([_growth(fitted)] if len(fitted) else [])):
        console.print(table)
        console.print()
    say(console, *LEGEND, style="dim")
    console.print()
    console.print(_targets(study.verdicts))
    console.print()
    say(console, *left_out_lines(study.frame), whole=True)
    style = "bold green" if all_reached(study.verdicts) else "bold red"
    say(console, Text.assemble((headline(study), style), "  ", counts_line(study)))
    say(console, f"{folder}/  kernels.md kernels.csv targets.csv exponents.csv", whole=True)


def kernels_markdown(study: "Study", where: Environment, *, pictures: Sequence[str]) -> str:
    targets = _targets(study.verdicts).markdown()
    parts = [f"# kernels: {headline(study)}", f"**{counts_line(study)}**", "## Targets", targets]
    parts += [f"![{name}]({name})" for name in pictures]
    tables = _measurements(study.frame, required=False)
    if len(study.growth):
        tables.append(_growth(study.growth[study.growth["exponent"].notna()]))
    for table in tables:
        parts += [f"## {table.title}", table.markdown()]
    parts += ["<br>".join(LEGEND), "## Not run"]
    parts += [f"- {escaped(line)}" for line in left_out_lines(study.frame)] or ["Nothing was left out."]
    parts += ["## Environment", roofline_line(study), environment_table(where)]
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


def _remark(row: Any) -> str:
    words = ["causal"] * bool(row["causal"]) + ([plain(row["note"])] if row["note"] else [])
    return " ".join([*words, *([] if row["dtype"] == "float32" else [row["dtype"]])])


HEADS = [
    Column("H/kv", lambda row: f"{row['heads']}/{row['kv_heads']}"),
    Column("D", lambda row: row["head_dim"]),
    Column("B", lambda row: row["batch"]),
]
SIDE = Column("side", lambda row: row["side"], left=True)
REMARK = Column("", _remark, left=True)


def _measurements(frame: pd.DataFrame, *, required: bool) -> list[Table]:
    """Of each study the measured rows; on the terminal those of the targets' cells alone."""
    shown = frame[frame["status"] == "measured"]
    if required:
        shown = shown[shown["required"].astype(bool)]
    order = ["dtype", "heads", "kv_heads", "head_dim", "batch", "note", "causal", "queries", "keys"]
    studies = ((name, shown[shown["study"] == name].sort_values(order, kind="stable")) for name in TITLES)
    return [Table(_columns(name), rows.to_dict("records"), TITLES[name]) for name, rows in studies if len(rows)]


def _columns(study: str) -> list[Column]:
    main = MAIN_BASELINE[study]
    textbook = Column("x textbook", lambda row: ratio(row["x_textbook"]))
    return [
        *HEADS,
        Column("L" if study in ("prefill", "mha") else "S", lambda row: count(row["keys"])),
        REMARK,
        SIDE,
        Column("ms", lambda row: milliseconds(row["ms"])),
        Column(f"x {main}", lambda row: ratio(row[f"x_{main}"])),
        Column("interval", lambda row: interval(row[f"x_{main}_lo"], row[f"x_{main}_hi"])),
        *([textbook] if study == "prefill" else []),
        Column("GFLOP/s", lambda row: _speed(row["gflops"])),
        Column("% peak", lambda row: number(row["share_of_peak"], ".0f", scale=100)),
        Column("GB/s", lambda row: _speed(row["gbytes_per_s"])),
        Column("% mem", lambda row: number(row["share_of_bandwidth"], ".0f", scale=100)),
        Column("extra MiB", lambda row: number(row["peak_bytes"], ",.1f", scale=2**-20)),
    ]


def _growth(growth: pd.DataFrame) -> Table:
    columns = [
        Column("study", lambda row: row["study"], left=True),
        SIDE,
        *HEADS,
        REMARK,
        Column("lengths", lambda row: f"{count(row['shortest'])}…{count(row['longest'])} ({row['lengths']})"),
        Column("exponent", lambda row: ratio(row["exponent"])),
        Column("interval", lambda row: interval(row["lo"], row["hi"])),
    ]
    return Table(columns, growth.to_dict("records"), "Growth")


def _targets(verdicts: Sequence[Verdict]) -> Table:
    """Limits with three digits: 0.0499 must not look like its limit of 0.05."""
    columns = [
        Column("target", lambda verdict: verdict.target.title, left=True),
        Column("at most", lambda verdict: number(verdict.target.limit, ".3g")),
        Column("worst", lambda verdict: number(verdict.worst, ".3g")),
        Column("points", lambda verdict: verdict.points),
        Column("", lambda verdict: verdict.status, left=True),
        Column("where", lambda verdict: plain(verdict.where) or ABSENT, left=True),
    ]
    return Table(columns, verdicts, "Targets")


def _speed(value: Any) -> str:
    return ABSENT if is_absent(value) else f"{value:.3g}" if value < 100 else f"{value:,.0f}"
