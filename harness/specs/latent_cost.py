"""Which form of latent attention is cheaper for a call, from counts alone.

With latents in the cache there are two ways to attend. *Expanded*: decompress every latent into per-head keys and
values, then attend with D = N + R. *Absorbed*: move the queries into latent space, where all heads share one key and
one value, and attend with D = r + R. Expanding costs the same for one query as for a thousand; absorbing makes every
query dearer. So few queries are absorbed and many are not, and where the two meet depends on all sizes.

The rule: price = FLOPs + FLOPS_PER_BYTE * bytes, and the lower price wins. Scores and softmax are the same in both and
left out; so is the decompressor, which both read once.
"""

from dataclasses import dataclass

from harness.specs import MATMUL

# A round figure for how many FLOPs a byte from memory is worth. Crossovers of the two forms, seen at two sizes on one
# loaded machine, ask for about 3 and about 25: it decides only calls whose two prices are near each other.
FLOPS_PER_BYTE = 8
WIDE = 4  # bytes of the narrowest dtype that is scored as it is; narrower ones are widened first


@dataclass(frozen=True)
class LatentSizes:
    """H, N, R, V and r."""

    heads: int
    nope: int
    rope: int
    value: int
    rank: int


@dataclass(frozen=True)
class Cost:
    """Of one batch row."""

    flops: int
    bytes: int

    @property
    def price(self) -> int:
        return self.flops + FLOPS_PER_BYTE * self.bytes


@dataclass(frozen=True)
class Choice:
    absorbed: Cost
    expanded: Cost

    @property
    def absorbs(self) -> bool:
        return self.absorbed.price < self.expanded.price


def choose(sizes: LatentSizes, queries: int, keys: int, *, itemsize: int = WIDE) -> Choice:
    """What both forms cost for `queries` new tokens over `keys` cached latents of `itemsize` bytes an element."""
    return Choice(absorbed_cost(sizes, queries, keys, itemsize), expanded_cost(sizes, queries, keys, itemsize))


def expanded_flops(heads: int, nope: int, rope: int, value: int, rank: int, queries: int, keys: int, fresh: int) -> int:
    """Decompress `fresh` latents, then attend per head."""
    return MATMUL * (fresh * rank * heads * (nope + value) + queries * keys * heads * (nope + rope + value))


def absorbed_flops(heads: int, nope: int, rope: int, value: int, rank: int, queries: int, keys: int) -> int:
    """Move the queries into latent space, attend there, and bring the result back."""
    return MATMUL * queries * heads * (nope * rank + keys * (2 * rank + rope) + rank * value)


def expanded_cost(sizes: LatentSizes, queries: int, keys: int, itemsize: int) -> Cost:
    H, N, R, V, r = sizes.heads, sizes.nope, sizes.rope, sizes.value, sizes.rank
    made = r + R + H * (N + V)  # per key: the latent read, its decompressed parts written
    joined = H * N + R + H * (N + R)  # nope parts and k_pe read, whole keys written
    attended = H * (N + R) + H * V
    per_query = H * (N + R + V)
    return Cost(
        expanded_flops(H, N, R, V, r, queries, keys, keys),
        itemsize * (keys * (made + joined) + queries * per_query) + _read_bytes(keys * attended, itemsize),
    )


def absorbed_cost(sizes: LatentSizes, queries: int, keys: int, itemsize: int) -> Cost:
    H, N, R, V, r = sizes.heads, sizes.nope, sizes.rope, sizes.value, sizes.rank
    attended = (r + R) + r  # per key, shared by all heads: the latent once as key, once as value
    per_query = H * (r + (r + R) + r + V)  # moved, joined with q_pe, mixed, brought back
    return Cost(
        absorbed_flops(H, N, R, V, r, queries, keys),
        itemsize * queries * per_query + _read_bytes(keys * attended, itemsize),
    )


def _read_bytes(elements: int, itemsize: int) -> int:
    """By the attention kernel; half precision is read, written widened, and read again."""
    return elements * (itemsize if itemsize >= WIDE else itemsize + 2 * WIDE)
