"""Before a run: what would run, what there is to choose from, and what `--explain` says of each case.

Explained are the form of latent attention and the kernel that a case takes, with the counts that decide it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.case import DTYPES, PHASES, Case
from harness.kernels.names import OPTIONS, kernel_names, pick
from harness.models.families.names import family_titles
from harness.report.terminal import say
from harness.suite.config import Suite, shipped_configs
from harness.suite.schema import REGIMES, STRUCTURES
from harness.text import ABSENT, count, ratio
from harness.variants.masks import MASKS
from harness.variants.specs import VARIANTS
from harness.variants.specs.latent import FLOPS_PER_BYTE, Cost, FormChoice, LatentSizes, absorbs, choose

AXES = ("variant", "embed_dim", "heads", "kv_heads", "seq_len", "mask", "phase", "dtype", "batch", "kernel")
SHOWN = 10
RULE = f"auto takes the lower price = FLOPs + {FLOPS_PER_BYTE} x bytes, counted per batch row"


def print_plan(suite: Suite, cases: Sequence[Case], console: Console, *, every: bool) -> None:
    """How many cells each axis value has, and the cells themselves (all with `every`)."""
    say(console, f"{suite.name}: {len(cases):,} cells would run")
    table = Table("axis", "values (cells)", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for axis in AXES:
        counts = Counter(getattr(case, axis) for case in cases)
        values = ", ".join(f"{ABSENT if value is None else value} ({number:,})" for value, number in counts.items())
        table.add_row(axis, Text(values))  # names of kernels are foreign text, not markup
    console.print(table)
    say(console, *(f"  {case.case_id}" for case in (cases if every else cases[:SHOWN])), whole=True)
    if not every and len(cases) > SHOWN:
        say(console, f"  ... and {len(cases) - SHOWN:,} more (--verbose lists all)")


def print_names(console: Console) -> None:
    _print_section(console, "variants", {name: VARIANTS[name].title for name in VARIANTS})
    _print_section(console, "masks", {name: MASKS[name].title for name in MASKS})
    kernels = {name: _options_of(name) for name in kernel_names()}
    kernels["FILE.py:FUNCTION"] = "your own, with SDPA's signature"
    _print_section(console, "kernels", kernels)
    _print_section(console, "model families", family_titles())
    _print_section(console, "configs, for `harness run NAME`", shipped_configs())
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


def print_explanations(cases: Sequence[Case], console: Console) -> None:
    """A paragraph per case: the form of latent attention, and what the kernel named "auto" comes to."""
    if any(case.kv_lora_rank is not None for case in cases):
        say(console, f"latent attention: {RULE}", whole=True)
    for case in cases:
        say(console, case.case_id, *(f"  {reason}" for reason in (why(case), why_kernel(case)) if reason), whole=True)


def why(case: Case) -> str | None:
    """The form that a case of latent attention takes, and why; None for other variants."""
    choice = choice_of(case)
    if choice is None:
        return None
    mode = VARIANTS[case.variant].swap_options.get("mode", "auto")
    if mode == "naive":
        return "expanded: its cache holds decompressed keys and values, so only new tokens are decompressed"
    counts = f"absorbed {_cost(choice.absorbed)}; expanded {_cost(choice.expanded)}"
    if mode == "absorbed":
        return f"absorbed: the variant says so; {counts}"
    form, prices = "absorbed" if choice.absorbs else "expanded", choice.absorbed.price / choice.expanded.price
    return f"{form}: {counts}; price of absorbing / expanding = {ratio(prices)}"


def why_kernel(case: Case) -> str:
    """Which kernel the last call of this case comes to, and why."""
    if case.kernel != "auto":
        return f"kernel {case.kernel}, as the config says"
    queries = 1 if case.phase == "decode" else case.seq_len
    is_latent = case.kv_lora_rank is not None
    kv_heads = case.kv_heads or (1 if is_latent and absorbs(case, queries, case.kv_len) else case.heads)
    rule = MASKS[case.mask]
    rows, slanted = case.heads // kv_heads * queries, rule.causal or rule.window is not None
    products = case.batch * kv_heads
    trains = case.phase == "train"
    name = pick(rows, queries, case.kv_len, products=products, slanted=slanted, trains=trains, need_weights=False)
    kind = "causal or windowed" if slanted else "dense"
    sizes = f"{rows} rows over {case.kv_len} keys, {queries} queries, {kind}, {case.phase}"
    return f"kernel {name}: {sizes}; {count(products * rows * case.kv_len)} scores"


def choice_of(case: Case) -> FormChoice | None:
    """Both forms' costs for the last call of this case; None without latents."""
    if case.kv_lora_rank is None or case.rope_head_dim is None or case.v_head_dim is None:
        return None
    sizes = LatentSizes(case.heads, case.head_dim, case.rope_head_dim, case.v_head_dim, case.kv_lora_rank)
    queries = 1 if case.phase == "decode" else case.seq_len
    return choose(sizes, queries, case.kv_len, itemsize=case.item_bytes)


def _cost(cost: Cost) -> str:
    return f"{count(cost.flops)} FLOPs and {count(cost.bytes)} bytes"
