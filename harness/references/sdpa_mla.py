"""MLA with keys and values expanded per head, around F.scaled_dot_product_attention."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.case import Case
from harness.references import Reference, sdpa
from harness.references.sdpa import StaticKV


def rotate_pairs(x: Tensor, at: Tensor, theta: float = 10_000.0) -> Tensor:
    """RoPE as a product of complex numbers: channels 2i and 2i+1 are the real and the imaginary part.

    `at`: the tokens' positions.
    """
    dim = x.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    angles = torch.outer(at.double(), 1.0 / theta**exponents)
    turn = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.to(wide).reshape(*x.shape[:-1], dim // 2, 2).contiguous())
    return torch.view_as_real(pairs * turn.to(pairs.dtype)).flatten(-2).to(x.dtype)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """SDPA on values as wide as keys: without that torch has no flash kernel, only the plain formula."""
    D, D_v = q.shape[-1], v.shape[-1]
    q, k, v = (F.pad(t, (0, max(D, D_v) - t.shape[-1])) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=D**-0.5)
    return out[..., :D_v]


class ExpandedMLA(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        assert case.kv_lora_rank and case.rope_head_dim and case.v_head_dim
        self.heads, self.nope, self.pe, self.value = case.heads, case.head_dim, case.rope_head_dim, case.v_head_dim
        self.rank, self.q_rank = case.kv_lora_rank, case.q_lora_rank
        self.pads_values = False
        query_dim = case.heads * (self.nope + self.pe)
        if self.q_rank is None:
            self.wq = nn.Linear(case.embed_dim, query_dim, bias=case.bias)
        else:
            self.wq_a = nn.Linear(case.embed_dim, self.q_rank, bias=case.bias)
            self.q_norm = nn.RMSNorm(self.q_rank, eps=1e-6)
            self.wq_b = nn.Linear(self.q_rank, query_dim, bias=case.bias)
        self.wkv_a = nn.Linear(case.embed_dim, self.rank + self.pe, bias=case.bias)
        self.kv_norm = nn.RMSNorm(self.rank, eps=1e-6)
        self.wkv_b = nn.Linear(self.rank, case.heads * (self.nope + self.value), bias=case.bias)
        self.wo = nn.Linear(case.heads * self.value, case.embed_dim, bias=case.bias)

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, past: StaticKV | None = None
    ) -> Tensor:
        start = 0 if past is None else past.length
        at = torch.arange(start, start + x.shape[1])
        q = self.queries(x, at)
        k, v = self.expand(*self.latents(x, at))
        if past is not None:
            k, v = past.update(k, v)
        return self.attend(q, k, v, attn_mask, is_causal)

    def queries(self, x: Tensor, at: Tensor) -> Tensor:
        """(B, H, L, N + R); the tokens stand at the positions `at`."""
        B, L, _ = x.shape
        q = self.wq(x) if self.q_rank is None else self.wq_b(self.q_norm(self.wq_a(x)))
        q = q.view(B, L, self.heads, self.nope + self.pe).transpose(1, 2)
        return torch.cat([q[..., : self.nope], rotate_pairs(q[..., self.nope :], at)], dim=-1)

    def latents(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """What a token leaves: its normed latent (B, L, r) and its rotated k_pe (B, 1, L, R)."""
        B, L, _ = x.shape
        compressed = self.wkv_a(x)
        k_pe = rotate_pairs(compressed[..., self.rank :].view(B, 1, L, self.pe), at)
        return self.kv_norm(compressed[..., : self.rank]), k_pe

    def expand(self, latent: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (B, H, S, N + R) and values (B, H, S, V)."""
        B, S, _ = latent.shape
        kv = self.wkv_b(latent).view(B, S, self.heads, self.nope + self.value).transpose(1, 2)
        k = torch.cat([kv[..., : self.nope], k_pe.expand(B, self.heads, S, self.pe)], dim=-1)
        return k, kv[..., self.nope :]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool = False) -> Tensor:
        attend = padded_attention if self.pads_values else F.scaled_dot_product_attention
        out = attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal)
        projected: Tensor = self.wo(out.transpose(1, 2).flatten(2))
        return projected


def with_padded_values(module: nn.Module) -> nn.Module:
    """A copy that takes torch's flash kernel: as right as the module, with other rounding."""
    other = copy.deepcopy(module)
    for part in other.modules():
        if isinstance(part, ExpandedMLA):
            part.pads_values = True
    return other


def run_rows(module: nn.Module, x: Tensor, rows: Tensor, view: Mapping[str, Any]) -> Tensor:
    assert isinstance(module, ExpandedMLA)
    k, v = module.expand(*module.latents(x, torch.arange(x.shape[1])))
    return module.attend(module.queries(x[:, rows], rows), k, v, view["attn_mask"])


def streams(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    assert isinstance(module, ExpandedMLA)
    latent, k_pe = module.latents(x, torch.arange(x.shape[1]))
    return (torch.cat([latent.unsqueeze(1), k_pe], dim=-1),)  # (B, 1, L, r + R)


def cache_of(module: nn.Module, streams: tuple[Tensor, ...]) -> StaticKV:
    assert isinstance(module, ExpandedMLA)
    latent, k_pe = streams[0].split([module.rank, module.pe], dim=-1)
    return sdpa.cache_of(module, module.expand(latent[:, 0].contiguous(), k_pe))


REFERENCE = Reference(
    "sdpa_mla",
    ExpandedMLA,
    sdpa.view,
    sdpa.run,
    run_rows=run_rows,
    new_cache=StaticKV,
    other_backend=with_padded_values,
    streams=streams,
    cache_of=cache_of,
)
