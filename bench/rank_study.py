"""What a latent of rank 1/4 to 1/32 costs, keeps and loses beside the full-rank layer, on weights with structure.

    python -m bench.rank_study [--embed-dim 1024] [--heads 16] [--length 1024] [--decay 1.0]

The layer is MHA whose [Wk; Wv] has singular values that fall as rank ** -decay, as those of trained layers do: on
random weights nothing can be left out. Each rank is a share of the embedding; `lora` is the same rank for the
decompressor of the latent layer at full rank. Errors: of the weights (Frobenius) and of the output (relative L1), both
against the full-rank layer; FLOPs are those of one decoded token at that length.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import harness
from harness.variants.mla import MultiHeadLatentAttention
from harness.variants.specs.latent import LatentSizes, absorbed_flops

SHARES = (4, 8, 16, 32)


def structured(layer: harness.MultiHeadAttention, decay: float) -> None:
    """Singular values of the stacked key and value weights that fall by a power law."""
    k, v = layer.k_proj, layer.v_proj
    U, S, Vh = torch.linalg.svd(torch.cat([k.weight, v.weight]).double(), full_matrices=False)
    fallen = S[0] * torch.arange(1, len(S) + 1).double() ** -decay
    stack = (U * fallen) @ Vh
    with torch.no_grad():
        for linear, part in zip((k, v), stack.chunk(2), strict=True):
            linear.weight.copy_(part)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).abs().sum() / exact.abs().sum())


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embed-dim", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--decay", type=float, default=1.0)
    options = parser.parse_args(arguments)
    E, H, S = options.embed_dim, options.heads, options.length
    torch.manual_seed(0)
    layer = harness.MultiHeadAttention(E, H).eval()
    structured(layer, options.decay)
    x = torch.randn(1, S, E)
    exact = layer(x, causal=True)
    full, _ = harness.swap(layer, to="mla")
    table = Table("rank", "params", "KV B/token", "x MHA", "MFLOP/token", "weights", "output", "lora: params", "output")
    heads_dim, mha_bytes = E // H, 4 * layer.kv_elements_per_token()
    for share in (1, *SHARES):
        rank = E // share
        latent, report = harness.swap(layer, to=f"mla-{rank}")
        low, _ = harness.swap(full, to=f"lora-{rank}")
        assert isinstance(latent, MultiHeadLatentAttention)
        cache = latent.new_cache(S)
        found = latent(x, causal=True, cache=cache)
        per_token = cache.allocated_bytes // S
        sizes = LatentSizes(H, heads_dim, 0, heads_dim, rank)
        projections = 2 * (2 * E * E + E * rank)
        error = report.swapped[0].error
        table.add_row(
            f"{rank} (1/{share})",
            f"{sum(p.numel() for p in latent.parameters()):,}",
            f"{per_token:,}",
            f"{per_token / mha_bytes:.3f}",
            f"{(projections + absorbed_flops(sizes, 1, S)) / 1e6:.1f}",
            "exact" if error is None else f"{error:.3f}",
            f"{relative(found, exact):.3f}",
            f"{sum(p.numel() for p in low.parameters()):,}",
            f"{relative(low(x, causal=True), exact):.3f}",
        )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
