"""What a swap replaced, and whether the swapped model is equal, on a terminal."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from harness.equivalence import Equivalence
    from harness.swaps.report import SwapReport


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
