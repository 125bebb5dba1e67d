"""Encoder layers around any variant: attention and feed-forward, each with a residual and a LayerNorm."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class EncoderLayer(nn.Module):
    """norm_first=False: LayerNorm after each residual sum (post-LN); True: before each sub-layer (pre-LN)."""

    def __init__(
        self,
        attention: nn.Module,
        embed_dim: int,
        feedforward_dim: int,
        *,
        norm_first: bool = False,
        activation: str = "relu",
        dropout: float = 0.0,
        norm_eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("relu", "gelu"):
            raise ValueError(f"activation = {activation!r}: must be relu or gelu")
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.norm_first, self.activation = norm_first, activation
        self.attention = attention
        self.linear1 = nn.Linear(embed_dim, feedforward_dim, **options)
        self.linear2 = nn.Linear(feedforward_dim, embed_dim, **options)
        self.norm1 = nn.LayerNorm(embed_dim, eps=norm_eps, **options)
        self.norm2 = nn.LayerNorm(embed_dim, eps=norm_eps, **options)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, **rules: Any) -> Tensor:
        """x (B, L, E) -> (B, L, E); `rules` (mask, causal, window, cache) go to the attention."""
        if self.norm_first:
            x = x + self.dropout(self.attention(self.norm1(x), **rules))
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x + self.dropout(self.attention(x, **rules)))
        out: Tensor = self.norm2(x + self._feed_forward(x))
        return out

    def _feed_forward(self, x: Tensor) -> Tensor:
        activate = F.relu if self.activation == "relu" else F.gelu
        out: Tensor = self.dropout(self.linear2(self.dropout(activate(self.linear1(x)))))
        return out
