"""What `harness tune-sparse` shows: a line for each layer as it ends, and what to do with the file."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from harness.report.format import plain, plural

if TYPE_CHECKING:  # these know torch
    from harness.tuning.file import Head, Tuned
    from harness.tuning.search import LayerTuned


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
