"""What quantised caches cost in error and save in bytes, over bits and groups, each held to its step bound.

    python -m bench.cache_study [--problems 1000] [--length 32] [--head-dim 16]

`--loud`: keys have outlier channels, as those of language models do, where groups of one channel pay; by default all
channels are alike. `error` is max |out - exact| over max |exact|; `bound` the
largest bound over the largest error of the worst problem; `closest` how near the nearest output came to its own bound.
A bound holds for every sign of every error, and signs seldom agree: the more numbers add up, the further it is away.
Exit code 1 if a bound is broken in any problem.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from harness.cell.quantised import judge_cache
from harness.kernels.front import attention
from harness.variants.quantised import QuantisedKVCache
from harness.variants.specs.quantised import BITS, Quantisation

HEADS, KV_HEADS, BATCH, QUERIES = 4, 2, 2, 8
GROUPS = (("token", None), ("token", 8), ("channel", 16), ("channel", 8))


def ways() -> list[Quantisation]:
    return [Quantisation(format, per, group) for format in BITS for per, group in GROUPS]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=1000, help="in all, over bits and groups")
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--loud", action="store_true", help="keys with outlier channels")
    options = parser.parse_args(arguments)
    table = Table("format", "per", "group", "bytes/token", "x bf16", "error", "bound", "closest", "kept")
    generator, every = torch.Generator().manual_seed(0), ways()
    each = max(1, -(-options.problems // len(every)))
    S, D, wrong, done = options.length, options.head_dim, 0, 0
    for how in every:
        errors, gaps, nearest, kept, size = [], [], [], 0, 0
        for _ in range(each):
            loud = (1 + 7 * options.loud * (torch.rand(D, generator=generator) < 0.05)).bfloat16()
            q, k, v = (
                torch.randn(BATCH, heads, length, D, generator=generator).bfloat16()
                for heads, length in ((HEADS, QUERIES), (KV_HEADS, S), (KV_HEADS, S))
            )
            cache = QuantisedKVCache(S, how)
            with torch.no_grad():
                found = judge_cache(cache, q, k * loud, v, causal=True)
                exact = attention(q.double(), (k * loud).double(), v.double(), causal=True, kernel="eager")
            errors.append(found.output_err / float(exact.abs().max()))
            gaps.append(found.output_bound / found.output_err)
            nearest.append(1 / found.output_ratio)
            kept += found.passed
            size = cache.allocated_bytes
        done += each
        wrong += each - kept
        plain = BATCH * KV_HEADS * S * 2 * D * 2
        row = (how.format, how.per, str(how.group or D), f"{size / S / BATCH:.0f}", f"{size / plain:.3f}")
        table.add_row(*row, f"{max(errors):.4f}", f"{max(gaps):.1f}", f"{max(nearest):.1f}", f"{kept}/{each}")
    Console().print(table)
    verdict = f"{wrong} wrong" if wrong else "every bound kept"
    print(f"{done} problems, {verdict}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
