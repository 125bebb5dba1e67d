"""Gated, differential, sink and shared-KV attention around F.scaled_dot_product_attention.

Parameters have the names of transformers' classes, but for the four lambdas, which are one tensor here.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.case import Case
from harness.references import Reference, sdpa
from harness.references.sdpa import StaticKV
from harness.variants.specs.composed import WINDOW


def turned(x: Tensor, start: int, theta: float = 10_000.0) -> Tensor:
    """RoPE by complex numbers whose real parts are the first half of the channels."""
    half = x.shape[-1] // 2
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    positions = torch.arange(start, start + x.shape[-2], dtype=torch.float64)
    angles = torch.outer(positions, theta ** (-torch.arange(half, dtype=torch.float64) / half))
    numbers = torch.complex(wide[..., :half], wide[..., half:])
    moved = numbers * torch.polar(torch.ones_like(angles), angles).to(numbers.dtype)
    return torch.cat([moved.real, moved.imag], dim=-1).to(x.dtype)


class Composed(nn.Module):
    def __init__(self, case: Case, query_dim: int = 1) -> None:
        super().__init__()
        assert case.kv_heads is not None
        self.embed_dim, self.heads, self.kv_heads, self.head_dim = (
            case.embed_dim,
            case.heads,
            case.kv_heads,
            case.head_dim,
        )
        wide, narrow = case.heads * case.head_dim, case.kv_heads * case.head_dim
        self.q_proj = nn.Linear(case.embed_dim, query_dim * wide, bias=case.bias)
        self.k_proj = nn.Linear(case.embed_dim, narrow, bias=case.bias)
        self.v_proj = nn.Linear(case.embed_dim, narrow, bias=case.bias)
        self.o_proj = nn.Linear(wide, case.embed_dim, bias=case.bias)

    def split(self, projected: Tensor) -> Tensor:
        B, L, width = projected.shape
        return projected.view(B, L, width // self.head_dim, self.head_dim).transpose(1, 2)

    def joined(self, heads: Tensor) -> Tensor:
        B, _, L, _ = heads.shape
        return heads.transpose(1, 2).reshape(B, L, -1)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, past: StaticKV | None = None
    ) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            given = {"attn_mask": attn_mask, "is_causal": is_causal, "enable_gqa": True, **options}
            return F.scaled_dot_product_attention(q, k, v, **given)

        return self.attended(x, 0 if past is None else past.length, past, attend)

    def attended(self, x: Tensor, start: int, past: StaticKV | None, attend: Any) -> Tensor:
        raise NotImplementedError


class Gain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


def unit(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


class Gated(Composed):
    def __init__(self, case: Case) -> None:
        super().__init__(case, query_dim=2)
        self.q_norm, self.k_norm = Gain(case.head_dim), Gain(case.head_dim)

    def attended(self, x: Tensor, start: int, past: StaticKV | None, attend: Any) -> Tensor:
        B, L, _ = x.shape
        both = self.q_proj(x).view(B, L, self.heads, 2 * self.head_dim)
        q, gate = both[..., : self.head_dim].transpose(1, 2), both[..., self.head_dim :].reshape(B, L, -1)
        q = turned(unit(q) * (1 + self.q_norm.weight), start)
        k = turned(unit(self.split(self.k_proj(x))) * (1 + self.k_norm.weight), start)
        v = self.split(self.v_proj(x))
        if past is not None:
            k, v = past.update(k, v)
        out: Tensor = self.o_proj(self.joined(attend(q, k, v)) * torch.sigmoid(gate))
        return out


class Differential(Composed):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.lambdas = nn.Parameter(torch.empty(4, case.head_dim))

    def attended(self, x: Tensor, start: int, past: StaticKV | None, attend: Any) -> Tensor:
        q, k = turned(self.split(self.q_proj(x)), start), turned(self.split(self.k_proj(x)), start)
        v = self.split(self.v_proj(x))
        if past is not None:
            k, v = past.update(k, v)
        first, second = (torch.cat([half, half], dim=1) for half in v.chunk(2, dim=1))
        mixed = torch.cat([attend(q, k, first), attend(q, k, second)], dim=-1)  # (B, H, L, 2 D)
        half = self.heads // 2
        four = self.lambdas.to(torch.promote_types(x.dtype, torch.float32))
        factor = (torch.dot(four[0], four[1]).exp() - torch.dot(four[2], four[3]).exp() + 0.2).to(x.dtype)
        out = 0.8 * unit(mixed[:, :half] - factor * mixed[:, half:])
        projected: Tensor = self.o_proj(self.joined(out))
        return projected


class Sinks(Composed):
    """A key and value of zeros, whose score is the head's sink, stands before all others."""

    window: int | None = None

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.sinks = nn.Parameter(torch.empty(case.heads))
        self.window = WINDOW if case.variant == "sinks_sliding" else None

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, past: StaticKV | None = None
    ) -> Tensor:
        start, L = 0 if past is None else past.length, x.shape[1]
        q, k = turned(self.split(self.q_proj(x)), start), turned(self.split(self.k_proj(x)), start)
        v = self.split(self.v_proj(x))
        if past is not None:
            k, v = past.update(k, v)
        (B, _, S, _), wide = k.shape, torch.promote_types(x.dtype, torch.float32)
        i, j = torch.arange(S - L, S)[:, None], torch.arange(S)
        seen = (j <= i) if attn_mask is None else attn_mask & (j <= i)
        if self.window is not None:
            seen = seen & (i - j < self.window)
        bias = torch.zeros(B, self.heads, L, S, dtype=wide).masked_fill(~seen, float("-inf"))
        sink = self.sinks.to(wide)[None, :, None, None].expand(B, -1, L, 1)
        groups = self.heads // self.kv_heads
        k, v = (F.pad(t, (0, 0, 1, 0)).repeat_interleave(groups, dim=1) for t in (k, v))
        mask = torch.cat([sink, bias], dim=-1)
        mixed = F.scaled_dot_product_attention(q.to(wide), k.to(wide), v.to(wide), attn_mask=mask).to(x.dtype)
        out: Tensor = self.o_proj(self.joined(mixed))
        return out


class Upper(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.q_proj = nn.Linear(case.embed_dim, case.heads * case.head_dim, bias=case.bias)
        self.q_norm = Gain(case.head_dim)
        self.o_proj = nn.Linear(case.heads * case.head_dim, case.embed_dim, bias=case.bias)


class Shared(Composed):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.q_norm, self.k_norm, self.upper = Gain(case.head_dim), Gain(case.head_dim), Upper(case)

    def attended(self, x: Tensor, start: int, past: StaticKV | None, attend: Any) -> Tensor:
        k = turned(unit(self.split(self.k_proj(x))) * self.k_norm.weight, start)
        v = unit(self.split(self.v_proj(x)))
        if past is not None:
            k, v = past.update(k, v)
        for layer in (self, self.upper):
            q = turned(unit(self.split(layer.q_proj(x))) * layer.q_norm.weight, start)
            out: Tensor = layer.o_proj(self.joined(attend(q, k, v, scale=1.0)))
            if layer is self:
                x = x + out
        return out


MODULES: Mapping[str, type[Composed]] = {
    "gated_gqa": Gated,
    "differential": Differential,
    "sinks": Sinks,
    "sinks_sliding": Sinks,
    "kv_shared": Shared,
}


def build(case: Case) -> nn.Module:
    module: Any = MODULES[case.variant]
    built: nn.Module = module(case)
    return built


REFERENCE = Reference("composed", build, sdpa.view, sdpa.run, new_cache=StaticKV)
