"""What people write: three lines over the whole score matrix. Measured as the starting point; see kernels/eager.py."""

import torch
from torch import Tensor


def textbook(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """mask is bool, True = attends; kv heads are repeated, as most models do it."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # (B, H, L, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v
