"""Which queries of a large call have a golden: all others are held to the reference in its own dtype."""

import torch
from torch import Tensor

from harness.candidate.request import Request
from harness.cell.sampling import choose_rows

WORK = 1 << 20  # multiplications of one golden
LEAST = 6


def sampled_rows(request: Request, allowed: Tensor | None, generator: torch.Generator) -> Tensor | None:
    """Sorted: first, last, beside the borders of tiles, some that see nothing, some at random. None: all of them."""
    B, H, L, _ = request.q.shape
    S, width = request.k.shape[2], request.q.shape[3] + request.v.shape[3]
    of_one = B * H * S * width
    if L * of_one <= WORK or L <= LEAST:
        return None
    count = min(L, max(LEAST, WORK // max(of_one, 1)))
    dead = []
    if allowed is not None and allowed.shape[2] == L:
        dead = (~allowed.any(-1)).flatten(0, 1).any(0).nonzero().flatten()[:1].tolist()
    return choose_rows(L, count, generator, special=dead)
