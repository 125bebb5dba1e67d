"""Which kernel `auto` takes, by a rule learnt from measurements (docs/kernels.md). No torch here.

Weights asked for, or few queries and keys: eager. One or a few queries over a long cache: grouped. Long prefills:
tiled; in training later, because it computes every tile twice, unless a causal mask or a window lets it skip most of
them. Where nothing is skipped and all scores fit a server's cache, tiles gain nothing, and their threads have to
take turns with torch's own, which wait actively after each projection: eager.
"""

FEW = 128  # rows of one product: beyond that it is bound by arithmetic, not by reading the keys
LONG_CACHE = 2048  # keys from which grouped wins
LONG = 512  # queries from which tiled wins
LONG_TRAINING = 2048  # the same in training, where nothing is skipped: there it wins by its memory
MANY = 1 << 22  # scores of all heads and batch rows, 16 MiB in float32: half of a server's cache
TOO_MANY = 1 << 26  # 256 MiB: not to be held at once, however few the queries


def pick(rows: int, queries: int, keys: int, *, products: int, slanted: bool, trains: bool, need_weights: bool) -> str:
    """`rows`: the queries of all heads that share a key, of which there are `products` (batch rows times key heads);
    `slanted`: causal or with a window."""
    if need_weights:
        return "eager"
    if rows <= FEW:
        return "grouped" if keys >= LONG_CACHE else "eager"
    scores = products * rows * keys
    if scores >= TOO_MANY:
        return "tiled"
    long_enough = queries >= (LONG_TRAINING if trains and not slanted else LONG)
    return "tiled" if long_enough and (slanted or scores >= MANY) else "eager"
