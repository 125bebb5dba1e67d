"""What `harness verify` shows: a line for each step, a table of all families, and both as Markdown.

And what its neighbours show: `print_swap` a swapped model, `print_layer` and `print_tuned` what `tune-sparse` found.
"""

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from harness.environment import Environment
from harness.record import OK_FACTOR
from harness.report import markdown
from harness.report.story import ROUNDED_WORSE
from harness.report.table import Column, Table, escaped
from harness.report.terminal import say
from harness.text import ABSENT, count, first_line, is_absent, number, plain, plural, ratio, small

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
    "layer/N, end/N: the worst error at a swapped layer and at the model's end, over the noise floor N; "
    f"ok up to {OK_FACTOR:g}.",
    "generate: tokens equal one by one, or the error of the denoised latents over N.",
)
LEGEND_APPROXIMATE = (
    "sparsity: share of the visible blocks that the kernel skipped; L1 = sum|C - G| / sum|G| against dense in float64,",
    "of a layer's attention on the q, k and v that it was given (worst batch), and of the model's output.",
    "generate: the step of the first token that is another one, or L1 of the denoised latents; no failure by itself.",
)


def print_step(step: "VerifyStep", console: Console) -> None:
    mark, ascii_mark, style = MARKS[step.status]
    line = Grid.grid(padding=(0, 1))
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
    if found.approximate:  # layers.csv has all columns
        console.print(_approximate_table(found, every_batch=every_batch).fitted(console, ("max", "RMSE", "cosine")))
    else:
        console.print(Table(EXACT, found.layers.to_dict("records")))


def _approximate_table(found: "Verification", *, every_batch: bool) -> Table:
    rows: list[Any] = found.layers[found.layers["rel_l1"].notna() | (found.layers["status"] != "ok")].to_dict("records")
    if not every_batch:
        worst: dict[str, Any] = {}
        for row in rows:
            if row["tensor"] not in worst or not row["rel_l1"] <= worst[row["tensor"]]["rel_l1"]:
                worst[row["tensor"]] = row
        rows = list(worst.values())
    return Table(APPROXIMATE, rows)


def print_verdict(found: Sequence["Verification"], console: Console, *, folder: Path) -> None:
    """The table where there are several, the verdict, and what is in the run's folder."""
    console.print()
    if len(found) > 1:
        console.print(_families(found).fitted(console, ("attention",)))  # the classes stand above, and in verify.md
        console.print()
        say(console, *_legend(found), style="dim")
        console.print()
    style = "bold green" if all(each.passed for each in found) else "bold red"
    say(console, Text.assemble((_headline(found), style), "  ", _counts(found)))
    for each in found:
        if (step := each.failure) is not None:
            say(console, f"  {plain(each.family)}: {step.name}: {_message(step)}", whole=True)
    say(console, f"{folder}/  verify.md verify.csv layers.csv", whole=True)


def verification_markdown(found: Sequence["Verification"], environment: Environment) -> str:
    parts = [
        f"# verify: {_headline(found)}",
        f"**{_counts(found)}**",
        _families(found).markdown(),
        "<br>".join(_legend(found)),
    ]
    for each in found:
        about = " · ".join(filter(None, (each.title, each.library, f"kernel {each.kernel}")))
        parts += [f"## {escaped(each.family)}", escaped(about), Table(STEP, each.steps).markdown()]
        if each.approximate:
            parts.append(_approximate_table(each, every_batch=False).markdown())
    parts += ["## Environment", markdown.environment_table(environment)]
    return "\n\n".join(parts) + "\n"


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
    if "rounded worse" in verdicts:
        return ROUNDED_WORSE
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


def _message(step: "VerifyStep") -> str:
    message = first_line(step.message, limit=600)
    return f"not run: {message}" if step.status == "not run" else message


def _tensor(row: Any) -> str:
    return f"{plain(row['tensor'])}, fast path on" if row["kind"] == "fast path" else plain(row["tensor"])


def _families(found: Sequence["Verification"]) -> Table:
    table = Table(FAMILY, [each.row() for each in found])
    return table if any(each.approximate for each in found) else table.without("sparsity", "layer L1", "end L1")


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


STEP = [
    Column("", lambda step: MARKS[step.status][0], left=True),
    Column("step", lambda step: step.name, left=True),
    Column("found", lambda step: first_line(step.message, limit=600), left=True),
    Column("s", lambda step: f"{step.seconds:.2f}"),
]
TENSOR = Column("tensor", _tensor, left=True)
BATCH = Column("batch", itemgetter("batch"), left=True)
STATUS = Column("status", itemgetter("status"), left=True)
EXACT = [
    BATCH,
    TENSOR,
    STATUS,
    Column("error/N", lambda row: ratio(row["err_ratio"])),
    Column("max error", lambda row: small(row["max_abs_err"])),
    Column("budget", lambda row: small(row["err_budget"])),
]
APPROXIMATE = [
    TENSOR,
    BATCH,
    STATUS,
    Column("sparsity", lambda row: number(row["sparsity"], ".3f")),
    Column("no PV", lambda row: number(row["pv_skipped"], ".3f")),
    Column("rel L1", lambda row: number(row["rel_l1"], ".4f")),
    Column("cosine", lambda row: number(row["cosine"], ".5f")),
    Column("RMSE", lambda row: small(row["rmse"])),
    Column("max", lambda row: small(row["max_abs"])),
    Column("dense/N", lambda row: ratio(row["err_ratio"])),
]
FAMILY = [
    Column("family", itemgetter("family"), left=True),
    Column("attention", lambda row: plain(row["attention_class"]) or ABSENT, left=True),
    Column("layers", lambda row: count(row["layers"])),
    Column("h/kv/d", lambda row: "/".join(count(row[name]) for name in ("heads", "kv_heads", "head_dim"))),
    Column("swapped", lambda row: f"{count(row['swapped'])}/{count(row['attentions'])}"),
    Column("layer/N", lambda row: ratio(row["worst_layer_err_ratio"])),
    Column("end/N", lambda row: ratio(row["end_err_ratio"])),
    Column("sparsity", lambda row: number(row["sparsity"], ".2f")),
    Column("layer L1", lambda row: number(row["worst_layer_rel_l1"], ".3f")),
    Column("end L1", lambda row: number(row["end_rel_l1"], ".3f")),
    Column("generate", _generated),
    Column("s", lambda row: f"{row['seconds']:.1f}"),
    Column("verdict", itemgetter("verdict"), left=True),
]


def print_swap(report: "SwapReport", found: "Equivalence", console: Console | None = None) -> None:
    """What a swap replaced, and whether the swapped model is equal."""
    console = Console() if console is None else console
    table = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("module", "became"):
        table.add_column(title, overflow="fold")
    for title in ("params", "calls"):
        table.add_column(title, justify="right")
    for row in report.swapped:
        table.add_row(Text(row.name or "(the model)"), Text(row.became), f"{row.params_after:,}", f"{row.calls}")
    console.print(table)
    word = Text("EQUAL", "bold green") if found.passed else Text("NOT EQUAL", "bold red")
    worst = found.worst.err_ratio
    error = "" if worst is None else f", worst error {worst:.2f} N (ok up to {OK_FACTOR:g} N)"
    console.print(Text.assemble(word, f"  {len(found.verdicts)} outputs and gradients", error), "\n")


def print_layer(layer: "LayerTuned", console: Console, *, every_head: bool) -> None:
    """A line for each layer that was tuned, and with `every_head` one for each of its heads."""
    line = f"{layer.place}/{layer.layers}  {plain(layer.name)}: {_heads(layer.heads)}, {layer.seconds:.1f} s"
    say(console, line, whole=True)
    for index, head in enumerate(layer.heads if every_head else ()):
        thresholds = " ".join(f"{name} {value:g}" for name, value in head.options.items())
        odd = "" if head.monotone else ", not monotone"
        left_out = f"sparsity {head.sparsity:.3f}, {head.pv_skipped:.3f} without values, L1 {head.rel_l1:.3f}{odd}"
        say(console, f"     head {index}: {thresholds}  {left_out}", style="dim", whole=True)


def print_tuned(tuned: "Tuned", path: Path, console: Console) -> None:
    """All layers together, and what to do with the file."""
    heads = [head for layer in tuned.layers.values() for head in layer]
    layers = plural(len(tuned.layers), "layer", "layers")
    console.print()
    say(console, f"{plain(tuned.family)}, {layers}: {_heads(heads)}", style="bold", whole=True)
    if odd := sum(not head.monotone for head in heads):
        several = plural(odd, "head has", "heads have")
        why = "an error that does not only grow with sparsity: a sparser setting may have been missed"
        say(console, f"{several} {why}", whole=True)
    if not any(head.sparsity or head.pv_skipped for head in heads):
        advice = "a larger budget, longer inputs or smaller blocks (block_q, block_k) may help"
        say(console, f"nothing can be left out: {advice}", whole=True)
    say(console, f"{path}  (harness verify {plain(tuned.family)} --tuned {path})", whole=True)


def _heads(heads: "Sequence[Head]") -> str:
    sparsity = sum(head.sparsity for head in heads) / len(heads)
    pv = sum(head.pv_skipped for head in heads) / len(heads)
    worst = max(head.rel_l1 for head in heads)
    heads_of = plural(len(heads), "head", "heads")
    return f"{heads_of}, mean sparsity {sparsity:.3f}, {pv:.3f} more without values, worst relative L1 {worst:.3f}"
