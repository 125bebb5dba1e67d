"""GQA with something around its softmax; specs/composed.py lists what."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.kernels.front import AnyKernel, attention, find_kernel
from harness.variants.attention import CachedSelfAttention
from harness.variants.cache import KVCache, SlidingKVCache
from harness.variants.mla import Rope
from harness.variants.specs.quantised import Quantisation


class RotaryAttention(CachedSelfAttention):
    """Projections of GQA and rotary positions; a subclass says what is around the softmax."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int,
        query_dim: int | None = None,
        rope_theta: float = 10_000.0,
        bias: bool = False,
        dropout: float = 0.0,
        kernel: AnyKernel = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads ({num_kv_heads}) must divide num_heads ({num_heads})")
        self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim = embed_dim, num_heads, num_kv_heads, head_dim
        self.dropout, self.kernel = dropout, find_kernel(kernel)
        self.rope = Rope(head_dim, rope_theta, halves=True)
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim if query_dim is None else query_dim, **options)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, **options)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, **options)
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, **options)

    def _heads(self, projected: Tensor) -> Tensor:
        """(B, L, heads * D) -> (B, heads, L, D)"""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def kv_elements_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, {self.kernel.name}"


class GatedAttention(RotaryAttention):
    """Each head's output times a sigmoid gate that the query projection gives beside the query; q and k are normed."""

    def __init__(self, embed_dim: int, num_heads: int, num_kv_heads: int, *, head_dim: int, **options: Any) -> None:
        wide = 2 * num_heads * head_dim
        super().__init__(embed_dim, num_heads, num_kv_heads, head_dim=head_dim, query_dim=wide, **options)
        place: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.q_norm, self.k_norm = (OffsetNorm(head_dim, **place) for _ in range(2))

    def _attend(self, x: Tensor, cache: KVCache | None, rules: dict[str, Any]) -> Any:
        start = 0 if cache is None else cache.length
        q, gate = self.q_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).chunk(2, dim=-1)  # (B, H, L, D)
        q = self.rope(self.q_norm(q), start)
        k, v = self.rope(self.k_norm(self._heads(self.k_proj(x))), start), self._heads(self.v_proj(x))
        if cache is not None:
            k, v = cache.append(k, v)
        attended = attention(q, k, v, **rules)
        if rules["return_weights"]:
            return attended[0] * gate.sigmoid(), attended[1]
        return attended * gate.sigmoid()


class OffsetNorm(nn.Module):
    """RMSNorm whose gain is 1 + weight."""

    def __init__(self, dim: int, eps: float = 1e-6, **place: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim, **place)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, eps=self.eps) * (1 + self.weight)


class DifferentialAttention(RotaryAttention):
    """Heads in two halves: the second's mixture of the values, times a learnt lambda, is taken from the first's."""

    def __init__(
        self, embed_dim: int, num_heads: int, num_kv_heads: int, *, head_dim: int, layer: int = 0, **options: Any
    ) -> None:
        """`layer`: later ones begin with a larger lambda."""
        super().__init__(embed_dim, num_heads, num_kv_heads, head_dim=head_dim, **options)
        if num_kv_heads % 2:
            raise ValueError(f"num_kv_heads = {num_kv_heads}: must be even, for it is cut into two halves")
        place: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.lambdas = nn.Parameter(torch.zeros(4, head_dim, **place))  # q1, k1, q2, k2

    def _attend(self, x: Tensor, cache: KVCache | None, rules: dict[str, Any]) -> Any:
        start = 0 if cache is None else cache.length
        q, k = (self.rope(self._heads(project(x)), start) for project in (self.q_proj, self.k_proj))
        v = self._heads(self.v_proj(x))
        if cache is not None:
            k, v = cache.append(k, v)
        # Each key/value head carries the values of a head of either half: one softmax, D_v = 2 D.
        both = torch.cat([half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1)], dim=-1)  # (B, H_kv, S, 2 D)
        attended = attention(q, k, both, **rules)
        out, weights = attended if rules["return_weights"] else (attended, None)
        first, second = out.chunk(2, dim=1)  # (B, H / 2, L, 2 D)
        mixed = first - self._lambda() * second
        mixed = (1 - self.lambda_init) * F.rms_norm(mixed, (2 * self.head_dim,), eps=1e-6)
        heads = mixed.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)  # (B, H, L, D): as CachedSelfAttention joins
        return heads if weights is None else (heads, weights)

    def _lambda(self) -> Tensor:
        wide = self.lambdas.to(torch.promote_types(self.lambdas.dtype, torch.float32))
        first, second = (wide[0] * wide[1]).sum(), (wide[2] * wide[3]).sum()
        return (first.exp() - second.exp() + self.lambda_init).to(self.lambdas.dtype)


class SinkAttention(RotaryAttention):
    """A logit for each head joins its softmax; with a `window` the cache keeps no more keys than that."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int,
        window: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, head_dim=head_dim, **options)
        place: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.window = window
        self.sinks = nn.Parameter(torch.zeros(num_heads, **place))

    def _attend(self, x: Tensor, cache: KVCache | None, rules: dict[str, Any]) -> Any:
        start = 0 if cache is None else cache.length
        q, k = (self.rope(self._heads(project(x)), start) for project in (self.q_proj, self.k_proj))
        v = self._heads(self.v_proj(x))
        if cache is not None:
            k, v = cache.append(k, v)
        rules = {**rules, "sinks": self.sinks}
        return attention(q, k, v, **(rules if self.window is None else {**rules, "window": self.window}))

    def new_cache(self, capacity: int = 0, *, quantised: Quantisation | None = None) -> KVCache:
        if self.window is None:
            return super().new_cache(capacity, quantised=quantised)
        if quantised is not None:
            raise ValueError("quantised: a sliding cache has no quantised form")
        return SlidingKVCache(capacity, window=self.window)


class QueryAttention(nn.Module):
    """A layer without keys and values of its own: those of another come with each call."""

    def __init__(self, embed_dim: int, num_heads: int, head_dim: int, *, bias: bool, place: dict[str, Any]) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias=bias, **place)
        self.q_norm = nn.RMSNorm(head_dim, eps=1e-6, **place)
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, bias=bias, **place)

    def queries(self, x: Tensor, rope: Rope, start: int) -> Tensor:
        return rope(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)), start)


class SharedKVAttention(RotaryAttention):
    """Two layers with a residual between them. The second attends the first's keys and values: one cache for both."""

    def __init__(self, embed_dim: int, num_heads: int, num_kv_heads: int, *, head_dim: int, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, num_kv_heads, head_dim=head_dim, **options)
        place: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.q_norm, self.k_norm = (nn.RMSNorm(head_dim, eps=1e-6, **place) for _ in range(2))
        self.upper = QueryAttention(embed_dim, num_heads, head_dim, bias=options.get("bias", False), place=place)

    def _attend(self, x: Tensor, cache: KVCache | None, rules: dict[str, Any]) -> Any:
        """The upper layer's heads: `out_proj` is the lower one's."""
        start = 0 if cache is None else cache.length
        q = self.rope(self.q_norm(self._heads(self.q_proj(x))), start)
        k = self.rope(self.k_norm(self._heads(self.k_proj(x))), start)
        v = F.rms_norm(self._heads(self.v_proj(x)), (self.head_dim,), eps=1e-6)
        if cache is not None:
            k, v = cache.append(k, v)
        rules = {**rules, "scale": 1.0}  # q and k are normed
        lower = attention(q, k, v, **{**rules, "return_weights": False})
        x = x + self.out_proj(lower.transpose(1, 2).flatten(2))
        return attention(self.upper.queries(x, self.rope, start), k, v, **rules)

    def _out(self, heads: Tensor) -> Tensor:
        out: Tensor = self.upper.out_proj(heads)
        return out
