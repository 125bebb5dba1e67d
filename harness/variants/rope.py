"""Rotary positions on interleaved pairs (channels 2i and 2i+1), as DeepSeek's weights expect."""

import torch
from torch import Tensor


class Rope:
    """Angles are made in float64: at position 10,000 a float32 angle is already off by 6e-4."""

    def __init__(self, dim: int, theta: float = 10_000.0) -> None:
        if dim % 2:
            raise ValueError(f"dim = {dim}: must be even: RoPE turns pairs of channels")
        self.dim, self.theta = dim, theta
        self._table: tuple[Tensor, Tensor] | None = None  # cos and sin of (positions, dim / 2)

    def __call__(self, x: Tensor, start: int) -> Tensor:
        """x (B, heads, L, dim), whose first token stands at position `start`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = self._angles(start, start + x.shape[2], wide, x.device)  # (L, dim / 2)
        even, odd = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return turned.flatten(-2).to(x.dtype)

    def _angles(self, start: int, end: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        table = self._table
        if table is None or table[0].shape[0] < end or table[0].dtype != dtype or table[0].device != device:
            held = 0 if table is None else table[0].shape[0]
            length = max(end, held if held >= end else 2 * held)
            with torch.inference_mode(False):  # a table made in inference mode could not be used in training later
                pairs = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
                positions = torch.arange(length, dtype=torch.float64, device=device)
                angles = positions[:, None] * self.theta ** (-pairs / self.dim)
                table = self._table = (angles.cos().to(dtype), angles.sin().to(dtype))
        return table[0][start:end], table[1][start:end]
