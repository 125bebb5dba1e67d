"""Grouped-query attention; multi-query is one key/value head, multi-head is as many as query heads."""

from typing import Any

import torch
from torch import Tensor, nn

from harness.kernels.front import AnyKernel, attention, find_kernel
from harness.variants.attention import CachedSelfAttention
from harness.variants.cache import KVCache


class GroupedQueryAttention(CachedSelfAttention):
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        kernel: AnyKernel = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"num_heads ({num_heads}) must be at least 1")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads ({num_kv_heads}) must divide num_heads ({num_heads})")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"num_heads ({num_heads}) must divide embed_dim ({embed_dim}) when head_dim is not given")
        D = embed_dim // num_heads if head_dim is None else head_dim
        self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim = embed_dim, num_heads, num_kv_heads, D
        self.dropout = dropout
        self.kernel = find_kernel(kernel)
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * D, **options)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * D, **options)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * D, **options)
        self.out_proj = nn.Linear(num_heads * D, embed_dim, **options)

    def _attend(self, x: Tensor, cache: KVCache | None, rules: dict[str, Any]) -> Any:
        D = self.head_dim
        q = self.q_proj(x).unflatten(-1, (-1, D)).transpose(1, 2)  # (B, H, L, D)
        k = self.k_proj(x).unflatten(-1, (-1, D)).transpose(1, 2)  # (B, H_kv, L, D)
        v = self.v_proj(x).unflatten(-1, (-1, D)).transpose(1, 2)  # (B, H_kv, L, D)
        if cache is not None:
            k, v = cache.append(k, v)  # (B, H_kv, S, D)
        return attention(q, k, v, **rules)

    def kv_elements_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, {self.kernel.name}"


class MultiHeadAttention(GroupedQueryAttention):
    """Every query head has its own key/value head."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, num_heads, **options)


class MultiQueryAttention(GroupedQueryAttention):
    """All query heads share one key/value head."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, 1, **options)
