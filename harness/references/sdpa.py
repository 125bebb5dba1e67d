"""MHA, MQA and GQA around F.scaled_dot_product_attention, with a preallocated KV cache."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from harness.case import Case
from harness.references import Reference


class StaticKV:
    """Keys and values written into one allocation; the views given back cover what was written."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.k is None or self.v is None:
            self.k = k.new_zeros(k.shape[0], k.shape[1], self.capacity, k.shape[3])
            self.v = v.new_zeros(v.shape[0], v.shape[1], self.capacity, v.shape[3])
        end = self.length + k.shape[2]
        if end > self.capacity:  # a slice beyond the end is empty, and one token would vanish into it silently
            raise ValueError(f"{end} tokens: the capacity is {self.capacity}")
        self.k[:, :, self.length : end] = k
        self.v[:, :, self.length : end] = v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]

    def crop(self, length: int) -> None:
        self.length = length


class SdpaAttention(nn.Module):
    def __init__(self, embed_dim: int, heads: int, kv_heads: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.wq = nn.Linear(embed_dim, heads * head_dim, bias=bias)
        self.wk = nn.Linear(embed_dim, kv_heads * head_dim, bias=bias)
        self.wv = nn.Linear(embed_dim, kv_heads * head_dim, bias=bias)
        self.wo = nn.Linear(heads * head_dim, embed_dim, bias=bias)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, past: StaticKV | None = None
    ) -> Tensor:
        q = self.queries(x)
        k, v = self.keys_and_values(x)
        if past is not None:
            k, v = past.update(k, v)
        return self.attend(q, k, v, attn_mask, is_causal)

    def queries(self, x: Tensor) -> Tensor:
        """(B, H, L, D)"""
        B, L, _ = x.shape
        return self.wq(x).view(B, L, self.heads, self.head_dim).transpose(1, 2)

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, H_kv, L, D) each"""
        B, L, _ = x.shape
        k = self.wk(x).view(B, L, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, L, self.kv_heads, self.head_dim).transpose(1, 2)
        return k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool = False) -> Tensor:
        grouped = self.heads != self.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=grouped)
        projected: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return projected


def build(case: Case) -> nn.Module:
    assert case.kv_heads is not None
    return SdpaAttention(case.embed_dim, case.heads, case.kv_heads, case.head_dim, case.bias)


def view(case: Case, dense: Tensor | None, plain_causal: bool) -> Mapping[str, Any]:
    if plain_causal:
        return {"attn_mask": None, "is_causal": True}
    return {"attn_mask": dense, "is_causal": False}


def run(
    module: nn.Module, x: Tensor, view: Mapping[str, Any], cache: Any, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    return module(x, past=cache, **view), None


def run_rows(module: nn.Module, x: Tensor, rows: Tensor, view: Mapping[str, Any]) -> Tensor:
    assert isinstance(module, SdpaAttention)
    return module.attend(module.queries(x[:, rows]), *module.keys_and_values(x), view["attn_mask"])


def streams(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    assert isinstance(module, SdpaAttention)
    return module.keys_and_values(x)


def cache_of(module: nn.Module, streams: tuple[Tensor, ...]) -> StaticKV:
    """These tensors themselves: a step writes into them."""
    cache = StaticKV(streams[0].shape[2])
    (cache.k, cache.v), cache.length = streams, cache.capacity
    return cache


REFERENCE = Reference(
    "sdpa",
    build,
    view,
    run,
    new_cache=StaticKV,
    run_rows=run_rows,
    streams=streams,
    cache_of=cache_of,
)
