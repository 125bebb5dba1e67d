"""What `harness advise --config` shows: a row for each kind of layer, and what the whole cache comes to."""

from collections import Counter
from dataclasses import dataclass

from rich.console import Console

from harness.advise.model_cache import LayerCache, ModelCache
from harness.report.advice import size
from harness.report.table import Column, Table
from harness.report.terminal import say
from harness.text import count, plural

LENGTHS = (1024, 8192, 32768, 131072)


@dataclass(frozen=True)
class _Row:
    layer: LayerCache
    number: int
    at: dict[int, int]  # tokens -> bytes of all these layers


def _at(tokens: int) -> Column:
    return Column(f"{tokens:,}", lambda row: size(row.at[tokens]))


def print_model_cache(
    cache: ModelCache, console: Console, *, context: int, batch: int, dtype: str, memory: int
) -> None:
    title = f"{cache.model_type}: {plural(len(cache.layers), 'layer', 'layers')}, {batch:,} x {dtype}"
    say(console, title, style="bold")
    console.print()
    lengths = sorted({*LENGTHS, context})
    rows = [
        _Row(layer, number, {n: number * layer.bytes(n, batch=batch, dtype=dtype) for n in lengths})
        for layer, number in Counter(cache.layers).items()
    ]
    columns = [
        Column("layers", lambda row: row.layer.kind.replace("_", " "), left=True),
        Column("number", lambda row: row.number),
        Column("elements/token", lambda row: count(row.layer.per_token)),
        Column("state", lambda row: count(row.layer.wide_state + row.layer.state)),
        *(_at(tokens) for tokens in lengths),
    ]
    console.print(Table(columns, rows).fitted(console, [f"{n:,}" for n in lengths if n != context]))
    console.print()
    say(console, "Elements of one layer and sequence; bytes of all layers of a kind at so many tokens.", style="dim")
    console.print()
    total, longest = cache.bytes(context, batch=batch, dtype=dtype), cache.longest(memory, batch=batch, dtype=dtype)
    reach = "any length fits" if longest is None else f"up to {longest:,} tokens fit"
    words = f"Cache at {context:,} tokens: {total:,} bytes ({size(total)}). Into {size(memory)} {reach}."
    say(console, words, style="bold green" if total <= memory else "bold red")
