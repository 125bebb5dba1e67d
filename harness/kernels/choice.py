"""Which kernel `auto` takes, by a rule learnt from measurements (docs/kernels.md). No torch here.

Weights asked for, or few queries and keys: eager. One or a few queries over a long cache: grouped. Long prefills:
tiled; in training later, because it computes every tile twice, unless a causal mask or a window lets it skip most of
them.
"""

FEW = 128  # rows of one product: beyond that it is bound by arithmetic, not by reading the keys
LONG_CACHE = 2048  # keys from which grouped wins
LONG = 512  # queries from which tiled wins
LONG_TRAINING = 2048  # the same in training, where nothing is skipped: there it wins by its memory


def pick(rows: int, queries: int, keys: int, *, slanted: bool, trains: bool, need_weights: bool) -> str:
    """`rows`: the queries of all heads that share a key; `slanted`: causal or with a window."""
    if need_weights:
        return "eager"
    if rows <= FEW:
        return "grouped" if keys >= LONG_CACHE else "eager"
    return "tiled" if queries >= (LONG_TRAINING if trains and not slanted else LONG) else "eager"
