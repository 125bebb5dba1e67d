"""What `harness verify` shows: a line for each step, a table of all families, and both as Markdown."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.environment import Environment
from harness.report import markdown
from harness.report.story import Column
from harness.report.terminal import fits, table_of
from harness.text import ABSENT, count, first_line, is_absent, plain, plural, ratio, small

if TYPE_CHECKING:
    from harness.cell.rule import Equivalence
    from harness.models.tuning.file import Head, Tuned
    from harness.models.tuning.search import LayerTuned
    from harness.models.verify.result import Verification, VerifyStep
    from harness.swaps.report import SwapReport

# For each status of a step: its mark, the same for a terminal that has only ASCII, and its colour.
MARKS = {
    "passed": ("✓", "ok", "green"),
    "failed": ("✗", "XX", "bold red"),
    "none": ("-", "-", "dim"),
    "not run": ("-", "-", "dim"),
}
LEGEND = (
    "layer/N, end/N: the worst error at a swapped layer and at the model's end, over the noise floor N; ok up to 2.",
    "generate: tokens equal one by one, or the error of the denoised latents over N.",
)
LEGEND_APPROXIMATE = (
    "sparsity: share of the visible blocks that the kernel skipped; L1 = sum|C - G| / sum|G| against dense in float64,",
    "of a layer's attention on the q, k and v that it was given (worst batch), and of the model's output.",
    "generate: the step of the first token that is another one, or L1 of the denoised latents; no failure by itself.",
)


def print_name(name: str, console: Console) -> None:
    console.print(Text(plain(name), "bold"), highlight=False, soft_wrap=True)


def print_step(step: "VerifyStep", console: Console) -> None:
    mark, ascii_mark, style = MARKS[step.status]
    line = Table.grid(padding=(0, 1))
    line.add_column(width=3, justify="right")
    line.add_column(width=8)
    line.add_column(overflow="fold")
    shown = mark if (console.encoding or "").lower().startswith("utf") else ascii_mark
    line.add_row(Text(shown, style), Text(step.name), Text(_message(step)))
    console.print(line)


def print_layers(found: "Verification", console: Console, *, every_batch: bool = True) -> None:
    """Every tensor that was judged, in order of execution; of an approximate kernel, else, each layer's worst batch."""
    if found.layers.empty:
        return
    columns = _approximate_columns(found, every_batch=every_batch) if found.approximate else _exact_columns(found)
    table = table_of(columns)
    for title in ("max", "RMSE", "cosine") if found.approximate else ():  # all of them are in layers.csv
        if not fits(table, console):
            columns = [column for column in columns if column.title != title]
            table = table_of(columns)
    console.print(table)


def _exact_columns(found: "Verification") -> list[Column]:
    rows: list[Any] = found.layers.to_dict("records")
    return [
        Column("batch", [plain(row["batch"]) for row in rows], left=True),
        Column("tensor", [_tensor(row) for row in rows], left=True),
        Column("status", [plain(row["status"]) for row in rows], left=True),
        Column("error/N", [ratio(row["err_ratio"]) for row in rows]),
        Column("max error", [small(row["max_abs_err"]) for row in rows]),
        Column("budget", [small(row["err_budget"]) for row in rows]),
    ]


def _approximate_columns(found: "Verification", *, every_batch: bool) -> list[Column]:
    rows: list[Any] = found.layers[found.layers["rel_l1"].notna() | (found.layers["status"] != "ok")].to_dict("records")
    if not every_batch:
        worst: dict[str, Any] = {}
        for row in rows:
            if row["tensor"] not in worst or not row["rel_l1"] <= worst[row["tensor"]]["rel_l1"]:
                worst[row["tensor"]] = row
        rows = list(worst.values())
    return [
        Column("tensor", [_tensor(row) for row in rows], left=True),
        Column("batch", [plain(row["batch"]) for row in rows], left=True),
        Column("status", [plain(row["status"]) for row in rows], left=True),
        Column("sparsity", [_number(row["sparsity"], ".3f") for row in rows]),
        Column("no PV", [_number(row["pv_skipped"], ".3f") for row in rows]),
        Column("rel L1", [_number(row["rel_l1"], ".4f") for row in rows]),
        Column("cosine", [_number(row["cosine"], ".5f") for row in rows]),
        Column("RMSE", [small(row["rmse"]) for row in rows]),
        Column("max", [small(row["max_abs"]) for row in rows]),
        Column("dense/N", [ratio(row["err_ratio"]) for row in rows]),
    ]


def _number(value: Any, form: str) -> str:
    return ABSENT if is_absent(value) else format(value, form)


def print_verdict(found: Sequence["Verification"], console: Console, *, folder: Path) -> None:
    """The table where there are several, the verdict, and what is in the run's folder."""
    console.print()
    if len(found) > 1:
        columns = _columns(found)
        table = table_of(columns)
        if not fits(table, console):  # the classes stand above, and in verify.md
            table = table_of([column for column in columns if column.title != "attention"])
        console.print(table)
        console.print()
        for line in _legend(found):
            console.print(Text(line, "dim"), highlight=False)
        console.print()
    style = "bold green" if all(each.passed for each in found) else "bold red"
    console.print(Text.assemble((_headline(found), style), "  ", _counts(found)), highlight=False)
    for each in found:
        if failure := _failure(each):
            console.print(Text(f"  {plain(each.family)}: {failure}"), highlight=False, soft_wrap=True)
    console.print(Text(f"{folder}/  verify.md verify.csv layers.csv"), highlight=False, soft_wrap=True)


def verification_markdown(found: Sequence["Verification"], environment: Environment) -> str:
    parts = [
        f"# verify: {_headline(found)}",
        f"**{_counts(found)}**",
        _markdown_table(_columns(found)),
        "<br>".join(_legend(found)),
    ]
    for each in found:
        about = " · ".join(filter(None, (each.title, each.library, f"kernel {each.kernel}")))
        steps = [
            (
                MARKS[step.status][0],
                step.name,
                markdown.text(first_line(step.message, limit=600)),
                f"{step.seconds:.2f}",
            )
            for step in each.steps
        ]
        titles = ("", "step", "found", "s")
        table = markdown.table_of(titles, steps, [True, True, True, False])
        parts += [f"## {markdown.text(each.family)}", markdown.text(about), table]
        if each.approximate:
            parts.append(_markdown_table(_approximate_columns(each, every_batch=False)))
    parts += ["## Environment", markdown.environment_table(environment)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(columns: list[Column]) -> str:
    rows = zip(*([markdown.text(cell) for cell in column.cells] for column in columns), strict=True)
    return markdown.table_of([column.title for column in columns], rows, [column.left for column in columns])


def _legend(found: Sequence["Verification"]) -> tuple[str, ...]:
    exact = () if all(each.approximate for each in found) else LEGEND
    return (*exact, *(LEGEND_APPROXIMATE if any(each.approximate for each in found) else ()))


def _headline(found: Sequence["Verification"]) -> str:
    """The worst of them."""
    verdicts = {each.verdict for each in found}
    for verdict in ("not equal", "beyond budget"):
        if verdict in verdicts:
            return verdict.upper()
    if "error" in verdicts:
        return "NOT VERIFIED"
    return "WITHIN BUDGET" if "within budget" in verdicts else "EQUAL"


def _counts(found: Sequence["Verification"]) -> str:
    seconds = sum(each.seconds for each in found)
    kernel = f"kernel {plain(found[0].kernel)}, {seconds:.1f} s"
    if len(found) == 1:
        return f"{plain(found[0].family)}, {kernel}"
    within = sum(each.verdict == "within budget" for each in found)
    equal = sum(each.verdict == "equal" for each in found)
    counts = [f"{within} of {len(found)} within budget"] if within else []
    counts += [f"{equal} of {len(found)} equal"] if equal or not within else []
    return f"{', '.join(counts)}, {kernel}"


def _failure(found: "Verification") -> str | None:
    step = found.failure
    return None if step is None else f"{step.name}: {_message(step)}"


def _message(step: "VerifyStep") -> str:
    message = first_line(step.message, limit=600)
    return f"not run: {message}" if step.status == "not run" else message


def _tensor(row: Any) -> str:
    return f"{plain(row['tensor'])}, fast path on" if row["kind"] == "fast path" else plain(row["tensor"])


def _columns(found: Sequence["Verification"]) -> list[Column]:
    frame = pd.DataFrame([each.row() for each in found])
    rows: list[Any] = frame.to_dict("records")
    sparse = any(each.approximate for each in found)
    left_out = [
        Column("sparsity", [_number(row["sparsity"], ".2f") for row in rows]),
        Column("layer L1", [_number(row["worst_layer_rel_l1"], ".3f") for row in rows]),
        Column("end L1", [_number(row["end_rel_l1"], ".3f") for row in rows]),
    ]
    return [
        Column("family", [plain(row["family"]) for row in rows], left=True),
        Column("attention", [plain(row["attention_class"]) or ABSENT for row in rows], left=True),
        Column("layers", [count(row["layers"]) for row in rows]),
        Column("h/kv/d", ["/".join(count(row[name]) for name in ("heads", "kv_heads", "head_dim")) for row in rows]),
        Column("swapped", [f"{count(row['swapped'])}/{count(row['attentions'])}" for row in rows]),
        Column("layer/N", [ratio(row["worst_layer_err_ratio"]) for row in rows]),
        Column("end/N", [ratio(row["end_err_ratio"]) for row in rows]),
        *(left_out if sparse else ()),
        Column("generate", [_generated(row) for row in rows]),
        Column("s", [f"{row['seconds']:.1f}" for row in rows]),
        Column("verdict", [row["verdict"] for row in rows], left=True),
    ]


def _generated(row: Any) -> str:
    if row["generate"] in ("none", "not run"):
        return ABSENT
    if not is_absent(row["generated_rel_l1"]):
        return f"L1 {row['generated_rel_l1']:.3f}"
    if not is_absent(row["first_difference"]) and row["generate"] == "passed":
        return f"differs at {int(row['first_difference'])}"
    if not is_absent(row["generated_err_ratio"]):
        return f"{ratio(row['generated_err_ratio'])} N"
    return "tokens =" if row["generate"] == "passed" else "tokens differ"


# ----------------------------------------------------------------------------------------------------------------------
# What a swap replaced, and whether the swapped model is equal, on a terminal.


def print_swap(report: "SwapReport", found: "Equivalence", console: Console | None = None) -> None:
    console = Console() if console is None else console
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("module", "became"):
        table.add_column(title, overflow="fold")
    for title in ("params", "calls"):
        table.add_column(title, justify="right")
    for row in report.swapped:
        name = Text(row.name or "(the model)")
        table.add_row(name, Text(row.became), f"{row.params_after:,}", f"{row.calls}")
    console.print(table)
    word = Text("EQUAL", "bold green") if found.passed else Text("NOT EQUAL", "bold red")
    worst = found.worst
    ratio = "" if worst.err_ratio is None else f", worst error {worst.err_ratio:.2f} N (ok up to 2 N)"
    console.print(Text.assemble(word, f"  {len(found.verdicts)} outputs and gradients", ratio), "\n")


# ----------------------------------------------------------------------------------------------------------------------
# What `harness tune-sparse` shows: a line for each layer as it ends, and what to do with the file.


def print_layer(layer: "LayerTuned", console: Console, *, every_head: bool) -> None:
    told = _told(layer.heads)
    line = f"{layer.place}/{layer.layers}  {plain(layer.name)}: {told}, {layer.seconds:.1f} s"
    console.print(Text(line), highlight=False, soft_wrap=True)
    if not every_head:
        return
    for number, head in enumerate(layer.heads):
        thresholds = " ".join(f"{name} {value:g}" for name, value in head.options.items())
        odd = "" if head.monotone else ", not monotone"
        found = f"sparsity {head.sparsity:.3f}, {head.pv_skipped:.3f} without values, L1 {head.rel_l1:.3f}{odd}"
        line = f"     head {number}: {thresholds}  {found}"
        console.print(Text(line, "dim"), highlight=False, soft_wrap=True)


def print_tuned(found: "Tuned", path: Path, console: Console) -> None:
    heads = [head for layer in found.layers.values() for head in layer]
    layers = plural(len(found.layers), "layer", "layers")
    console.print()
    console.print(Text(f"{plain(found.family)}, {layers}: {_told(heads)}", "bold"), highlight=False, soft_wrap=True)
    if odd := sum(not head.monotone for head in heads):
        several = plural(odd, "head has", "heads have")
        told = f"{several} an error that does not only grow with sparsity: a sparser setting may have been missed"
        console.print(Text(told), highlight=False, soft_wrap=True)
    if not any(head.sparsity or head.pv_skipped for head in heads):
        told = "nothing can be left out: a larger budget, longer inputs or smaller blocks (block_q, block_k) may help"
        console.print(Text(told), highlight=False, soft_wrap=True)
    use = f"{path}  (harness verify {plain(found.family)} --tuned {path})"
    console.print(Text(use), highlight=False, soft_wrap=True)


def _told(heads: "list[Head] | tuple[Head, ...]") -> str:
    sparsity = sum(head.sparsity for head in heads) / len(heads)
    pv = sum(head.pv_skipped for head in heads) / len(heads)
    worst = max(head.rel_l1 for head in heads)
    count = plural(len(heads), "head", "heads")
    return f"{count}, mean sparsity {sparsity:.3f}, {pv:.3f} more without values, worst relative L1 {worst:.3f}"
