"""What stands around attention: an encoder layer for any variant, the MLA block, and the bare core as a module."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.kernels.front import AnyKernel, attention, find_kernel
from harness.registry import nearest
from harness.variants.mla import MultiHeadLatentAttention
from harness.variants.specs.blocks import FEEDFORWARD_FACTOR
from harness.variants.specs.latent import resolve_latent

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,  # 0.01 below zero
}


class ScaledDotProductAttention(nn.Module):
    """softmax(q k^T / temperature + mask) v, without projections; dropout on the weights while training."""

    def __init__(self, temperature: float | None = None, dropout: float = 0.0, *, kernel: AnyKernel = "eager") -> None:
        """`temperature`: by default sqrt(D)."""
        super().__init__()
        if temperature is not None and not temperature > 0:
            raise ValueError(f"temperature = {temperature}: must be positive")
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout = {dropout}: must be within [0, 1]")
        self.temperature, self.dropout = temperature, dropout
        self.kernel = find_kernel(kernel)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **rules: Any) -> Any:
        """q (B, H, L, D), k (B, H_kv, S, D), v (B, H_kv, S, D_v) -> (B, H, L, D_v) and the weights (B, H, L, S).

        `mask` and `rules` (causal, window, sinks ...) as in `harness.attention`.
        """
        scale = None if self.temperature is None else 1 / self.temperature
        dropout_p = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p, "return_weights": True, **rules}
        return attention(q, k, v, mask=mask, kernel=self.kernel, **options)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, dropout={self.dropout}, {self.kernel.name}"


class EncoderLayer(nn.Module):
    """Around any attention module, grouped or latent: attention and feed-forward, each with a residual and a LayerNorm.

    norm_first=False: LayerNorm after each residual sum (post-LN); True: before each sub-layer (pre-LN)."""

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
        if activation not in ACTIVATIONS:
            rule = f"must be one of {', '.join(ACTIVATIONS)}{nearest(str(activation), ACTIVATIONS)}"
            raise ValueError(f"activation = {activation!r}: {rule}")
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
        out: Tensor = self.dropout(self.linear2(self.dropout(ACTIVATIONS[self.activation](self.linear1(x)))))
        return out


class MLABlock(EncoderLayer):
    """A pre-LN encoder layer around latent attention; ranks that are not given follow DeepSeek's proportions.

    `mla` (q_lora_rank, kv_lora_rank, rope_head_dim, v_head_dim, head_dim, mode, kernel ...) go to the attention.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feedforward_dim: int | None = None,
        *,
        activation: str = "gelu",
        dropout: float = 0.0,
        norm_eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **mla: Any,
    ) -> None:
        named = ("head_dim", "q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim")
        sizes = resolve_latent({"embed_dim": embed_dim, "heads": num_heads, **{n: mla.pop(n, None) for n in named}})
        place: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        ranks = {name: sizes[name] for name in named[1:]}
        inner = MultiHeadLatentAttention(
            embed_dim, num_heads, nope_head_dim=sizes["head_dim"], dropout=dropout, **ranks, **place, **mla
        )
        wide = FEEDFORWARD_FACTOR * embed_dim if feedforward_dim is None else feedforward_dim
        rest: dict[str, Any] = {"activation": activation, "dropout": dropout, "norm_eps": norm_eps, **place}
        super().__init__(inner, embed_dim, wide, norm_first=True, **rest)
