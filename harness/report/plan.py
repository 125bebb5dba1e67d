"""What would run, and what there is to choose from."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.case import DTYPES, PHASES, Case
from harness.config import Suite
from harness.document import REGIMES, STRUCTURES
from harness.families.names import family_titles
from harness.kernels.names import kernel_names
from harness.kernels.options import OPTIONS
from harness.masks import MASKS
from harness.specs import VARIANTS

AXES = ("variant", "embed_dim", "heads", "kv_heads", "seq_len", "mask", "phase", "dtype", "batch", "kernel")
SHOWN = 10


def print_plan(suite: Suite, cases: Sequence[Case], console: Console, *, every: bool) -> None:
    """How many cells each axis value has, and the cells themselves (all with `every`)."""
    console.print(f"{suite.name}: {len(cases):,} cells would run", markup=False, highlight=False)
    table = Table("axis", "values (cells)", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for axis in AXES:
        counts = Counter(getattr(case, axis) for case in cases)
        values = ", ".join(f"{'-' if value is None else value} ({number:,})" for value, number in counts.items())
        table.add_row(axis, Text(values))  # names of kernels are foreign text, not markup
    console.print(table)
    for case in cases if every else cases[:SHOWN]:
        console.print(f"  {case.case_id}", markup=False, highlight=False, soft_wrap=True)
    if not every and len(cases) > SHOWN:
        console.print(f"  ... and {len(cases) - SHOWN:,} more (--verbose lists all)", highlight=False)


def print_names(console: Console) -> None:
    _print_section(console, "variants", {name: VARIANTS[name].title for name in VARIANTS})
    _print_section(console, "masks", {name: MASKS[name].title for name in MASKS})
    kernels = {name: _options_of(name) for name in kernel_names()}
    kernels["FILE.py:FUNCTION"] = "your own, with SDPA's signature"
    _print_section(console, "kernels", kernels)
    _print_section(console, "model families", family_titles())
    inputs = (("regimes", REGIMES), ("structured inputs, named as regimes", STRUCTURES))
    for title, names in (("phases", PHASES), ("dtypes", DTYPES), *inputs):
        console.print(f"[bold]{title}[/]  {', '.join(names)}", highlight=False)


def _options_of(kernel: str) -> str:
    declared = OPTIONS.get(kernel, {})
    return "approximate; options: " + ", ".join(f"?{name}=" for name in declared) if declared else ""


def _print_section(console: Console, title: str, entries: Mapping[str, str]) -> None:
    console.print(f"[bold]{title}[/]", highlight=False)
    table = Table.grid(padding=(0, 2))
    for name, text in entries.items():
        table.add_row(f"  {name}", text)
    console.print(table)
