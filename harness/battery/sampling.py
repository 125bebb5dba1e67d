"""Which queries of a large call have a golden: all others are held to the reference in its own dtype."""

import torch
from torch import Tensor

from harness.candidate.request import Request

WORK = 1 << 20  # multiplications of one golden
LEAST = 6
BORDERS = (16, 32, 64, 128, 256, 512, 1024)


def sampled_rows(request: Request, allowed: Tensor | None, generator: torch.Generator) -> Tensor | None:
    """Sorted: first, last, beside the borders of tiles, some that see nothing, some at random. None: all of them."""
    B, H, L, _ = request.q.shape
    S, width = request.k.shape[2], request.q.shape[3] + request.v.shape[3]
    of_one = B * H * S * width
    if L * of_one <= WORK or L <= LEAST:
        return None
    count = min(L, max(LEAST, WORK // max(of_one, 1)))
    wanted = [0, L - 1]
    if allowed is not None and allowed.shape[2] == L:
        dead = (~allowed.any(-1)).flatten(0, 1).any(0).nonzero().flatten()
        wanted += dead[:1].tolist()
    near = [place for border in BORDERS for place in (border, border - 1) if place < L]
    wanted += [near[place] for place in torch.randperm(len(near), generator=generator).tolist()[: count // 2]]
    wanted += torch.randperm(L, generator=generator).tolist()
    return torch.tensor(sorted(dict.fromkeys(wanted[: max(count, 3)])))
