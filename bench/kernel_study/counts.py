"""FLOPs and bytes of each kind of call: two operations for each multiply-add, matrix products alone."""

from bench.kernel_study.cell import Cell, Work
from harness.variants.specs import MATMUL
from harness.variants.specs.grouped import grouped_params
from harness.variants.specs.latent import LatentSizes, absorbed_flops, expanded_flops, latent_params

ITEM = {"float32": 4, "bfloat16": 2}


def core(cell: Cell) -> Work:
    """softmax(q k^T) v: half of a causal square is hidden and not counted, though some kernels compute it."""
    B, H, L, S, D = cell.batch, cell.heads, cell.queries, cell.keys, cell.head_dim
    pairs = L * (S - L) + L * (L + 1) // 2 if cell.causal else L * S
    moved = 2 * B * H * L * D + 2 * B * cell.kv_heads * S * D  # q and the output; k and v
    return Work(MATMUL * 2 * B * H * pairs * D, moved * ITEM[cell.dtype])


def full_scores_bytes(cell: Cell) -> int:
    """What a kernel holds that writes all scores down: three of them at once, in float32."""
    return 3 * 4 * cell.batch * cell.heads * cell.queries * cell.keys


def multihead(cell: Cell) -> Work:
    """A whole nn.MultiheadAttention call: four projections of width E, and the core."""
    E, tokens = cell.heads * cell.head_dim, cell.batch * cell.queries
    inside = core(cell)
    weights = 4 * E * E + 4 * E
    return Work(inside.flops + MATMUL * tokens * 4 * E * E, (weights + 2 * tokens * E) * ITEM[cell.dtype])


def grouped_step(cell: Cell) -> Work:
    """One decoded token of a GroupedQueryAttention: its projections, and the core over its cache."""
    E = cell.heads * cell.head_dim
    weights = grouped_params(E, cell.heads, cell.kv_heads, cell.head_dim, bias=False)
    inside = core(cell)
    return Work(inside.flops + MATMUL * cell.batch * weights, inside.bytes + weights * ITEM[cell.dtype])


def latent_step(
    cell: Cell, *, embed_dim: int, rank: int, rope: int, value: int, absorbed: bool, fresh: int, cached: int
) -> Work:
    """One decoded token of an MLA layer; `fresh` latents are decompressed, `cached` elements a token are read."""
    H, N, S = cell.heads, cell.head_dim, cell.keys
    sizes = LatentSizes(H, N, rope, value, rank)
    projections = embed_dim * H * (N + rope) + embed_dim * (rank + rope) + H * value * embed_dim
    inside = absorbed_flops(sizes, 1, S) if absorbed else expanded_flops(sizes, 1, S, fresh)
    weights = latent_params(embed_dim, sizes, None)
    moved = weights + cell.batch * S * cached
    return Work(cell.batch * (MATMUL * projections + inside), moved * ITEM[cell.dtype])
