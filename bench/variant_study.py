"""From which length on do caches of constant size pay? One decode step of each variant, in one contest at each length.

    python -m bench.variant_study [--embed-dim 512] [--heads 8] [--lengths 256 1024 4096 16384] [--budget 4]

All variants of a length are timed interleaved, so that a neighbour's work falls on all of them alike; `x MHA` is the
paired ratio to MHA's step with its 95 % interval, MHA = 1.00. Caches are filled with random numbers; states are as they
are after 64 tokens, for no length changes them. The crossover is the shortest length from which on, as far as was
timed, the whole interval is below 1.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import harness
from harness.cell.build import randomise
from harness.cell.timing import interleave, paired_ratio
from harness.text import ratio
from harness.variants.composed import DifferentialAttention, GatedAttention, SinkAttention
from harness.variants.recurrence import StateCache
from harness.variants.recurrent import GatedDeltaNet, KimiDeltaAttention, LightningAttention, Mamba2
from harness.variants.specs.composed import WINDOW

FILL = 64  # tokens after which a state is taken


def layers(E: int, H: int) -> dict[str, nn.Module]:
    D = E // H
    made: dict[str, nn.Module] = {
        "mha": harness.MultiHeadAttention(E, H),
        "gqa": harness.GroupedQueryAttention(E, H, max(1, H // 4)),
        "mqa": harness.MultiQueryAttention(E, H),
        "mla": harness.UnifiedAttention(E, H, attention_type="mla"),
        "gated_gqa": GatedAttention(E, H, max(1, H // 4), head_dim=D),
        "differential": DifferentialAttention(E, H, max(2, H // 4), head_dim=D),
        "sinks_sliding": SinkAttention(E, H, max(1, H // 4), head_dim=D, window=WINDOW),
        "lightning": LightningAttention(E, H, head_dim=D),
        "gated_deltanet": GatedDeltaNet(E, H, num_key_heads=max(1, H // 2), head_dim=D, v_head_dim=D),
        "kda": KimiDeltaAttention(E, H, head_dim=D),
        "mamba2": Mamba2(E, H, num_groups=1, head_dim=D, state=2 * D),
    }
    for layer in made.values():
        randomise(layer.eval(), torch.Generator().manual_seed(0))
    return made


def filled(layer: Any, length: int, E: int) -> Any:
    """A cache that holds `length` tokens."""
    cache = layer.new_cache(length + 1)
    layer(torch.randn(1, FILL, E), causal=True, cache=cache)
    if isinstance(cache, StateCache):
        return cache
    streams = [t[:, :, :1].expand(-1, -1, length - FILL, -1) for t in cache.streams()]
    if length > FILL:
        cache.append(*(torch.randn(t.shape) for t in streams))
    return cache


def step(layer: Any, cache: Any, length: int, x: torch.Tensor) -> Callable[[], object]:
    def call() -> object:
        out = layer(x, causal=True, cache=cache)
        if not isinstance(cache, StateCache):
            cache.crop(length)
        return out

    return call


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--budget", type=float, default=4.0, help="seconds of timing at each length")
    options = parser.parse_args(arguments)
    E, made = options.embed_dim, layers(options.embed_dim, options.heads)
    x = torch.randn(1, 1, E)
    ratios: dict[str, dict[int, Any]] = {name: {} for name in made}
    sizes: dict[str, dict[int, int]] = {name: {} for name in made}
    for length in options.lengths:
        caches = {name: filled(layer, length, E) for name, layer in made.items()}
        sizes = {name: sizes[name] | {length: caches[name].allocated_bytes} for name in made}
        calls = {name: step(layer, caches[name], length, x) for name, layer in made.items()}
        for call in calls.values():
            call()
        samples = interleave(calls, budget_s=options.budget, min_blocks=10, max_blocks=200, seed=0)
        for name, own in samples.items():
            ratios[name][length] = paired_ratio(own, samples["mha"], seed=0)
    table = Table(
        "variant", *(f"{n:,}: bytes" for n in options.lengths), *(f"{n:,}: x MHA" for n in options.lengths), "crossover"
    )
    for name in made:
        lost = [n for n in options.lengths if not ratios[name][n].hi < 1]
        won = [n for n in options.lengths if n > max(lost, default=0)]
        times = [f"{ratio(r.value)} ({ratio(r.lo)}…{ratio(r.hi)})" for r in ratios[name].values()]
        table.add_row(name, *(f"{b:,}" for b in sizes[name].values()), *times, f"{min(won):,}" if won else "-")
    Console(width=200).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
