"""Multi-head latent attention (DeepSeek-V2): keys and values live in one low-rank latent per token.

The naive way decompresses the latent into per-head keys and values. The absorbed way moves the queries into latent
space instead, where all heads share one key (the latent and the rotated k_pe) and one value (the latent): then
MLA *is* multi-query attention over the latent cache, with D = r + R and D_v = r.

With rope_head_dim = 0 and latent_norm = False nothing but two matrices stands between a token and its keys and values:
that is what attention without positions becomes when its key and value projections are factored (swaps/conversions.py).
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from harness.kernels.call import one_dtype
from harness.kernels.front import AnyKernel, attention, find_kernel, make_call
from harness.kernels.transforms import is_recorded
from harness.variants.attention import CachedSelfAttention
from harness.variants.cache import KVCache
from harness.variants.specs.latent import LatentSizes, choose

Mode = Literal["auto", "naive", "absorbed"]


class Rope:
    """Rotary positions on interleaved pairs (channels 2i and 2i+1), as DeepSeek's weights expect, or on `halves`
    (channels i and i + dim / 2), as those of most other models do.

    Angles are made in float64: at position 10,000 a float32 angle is already off by 6e-4.
    """

    def __init__(self, dim: int, theta: float = 10_000.0, *, halves: bool = False) -> None:
        if dim % 2:
            raise ValueError(f"dim = {dim}: must be even: RoPE turns pairs of channels")
        self.dim, self.theta, self.halves = dim, theta, halves
        self._table: tuple[Tensor, Tensor] | None = None  # cos and sin of (positions, dim / 2)

    def __call__(self, x: Tensor, start: int) -> Tensor:
        """x (B, heads, L, dim), whose first token stands at position `start`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        cos, sin = self._angles(start, start + x.shape[2], wide, x.device)  # (L, dim / 2)
        pairs, across = ((2, -1), -2) if self.halves else ((-1, 2), -1)
        even, odd = x.to(wide).unflatten(-1, pairs).unbind(across)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=across)
        return turned.flatten(-2).to(x.dtype)

    def _angles(self, start: int, end: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        if is_recorded():  # what a graph was made with is no number to keep
            cos, sin = self._make_table(end, dtype, device)
            return cos[start:], sin[start:]
        table = self._table
        if table is None or table[0].shape[0] < end or table[0].dtype != dtype or table[0].device != device:
            held = 0 if table is None else table[0].shape[0]
            length = max(end, held if held >= end else 2 * held)
            with torch.inference_mode(False):  # a table made in inference mode could not be used in training later
                table = self._table = self._make_table(length, dtype, device)
        return table[0][start:end], table[1][start:end]

    def _make_table(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        pairs = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
        positions = torch.arange(length, dtype=torch.float64, device=device)
        angles = positions[:, None] * self.theta ** (-pairs / self.dim)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class LowRankLinear(nn.Module):
    """A Linear whose weight is a product through `rank` channels: up(down(x))."""

    def __init__(self, inputs: int, outputs: int, rank: int, *, bias: bool, **place: Any) -> None:
        super().__init__()
        self.down = nn.Linear(inputs, rank, bias=False, **place)
        self.up = nn.Linear(rank, outputs, bias=bias, **place)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.down(x))
        return out

    @property
    def weight(self) -> Tensor:
        return self.up.weight @ self.down.weight

    @property
    def bias(self) -> Tensor | None:
        return self.up.bias


class LatentSpace(nn.Module):
    """The absorbed way, for any module that holds its decompressor in `kv_b_proj`."""

    kv_lora_rank: int
    v_head_dim: int
    kv_b_proj: nn.Linear | LowRankLinear

    def _attend_latents(self, q_nope: Tensor, q_pe: Tensor, latent: Tensor, rules: dict[str, Any]) -> Any:
        """latent (B, 1, S, r + R): what all heads share, the normed latents and the rotated k_pe."""
        H, N = q_nope.shape[1], q_nope.shape[3]
        low = self.kv_b_proj if isinstance(self.kv_b_proj, LowRankLinear) else None
        up = self.kv_b_proj.weight if low is None else low.up.weight
        up_k, up_v = up.unflatten(0, (H, -1)).split((N, self.v_head_dim), dim=1)  # (H, N, r or low rank), (H, V, ...)
        moved = torch.einsum("bhln,hnr->bhlr", q_nope, up_k)
        moved = moved if low is None else moved @ low.down.weight  # (B, H, L, r)
        q = torch.cat((moved, q_pe), dim=-1)  # (B, H, L, r + R)
        q, latent = one_dtype(q, latent)
        attended = self._attend_shared(q, latent, latent[..., : self.kv_lora_rank], rules)
        mixed, weights = attended if rules["return_weights"] else (attended, None)  # (B, H, L, r)
        mixed = mixed if low is None else low.down(mixed)
        heads = torch.einsum("bhlr,hvr->bhlv", mixed, up_v)  # (B, H, L, V)
        if self.kv_b_proj.bias is not None:
            heads = heads + self._value_bias(q, latent, rules)
        return heads if weights is None else (heads, weights)

    def _attend_shared(self, q: Tensor, k: Tensor, v: Tensor, rules: dict[str, Any]) -> Any:
        return attention(q, k, v, **rules)

    def _value_bias(self, q: Tensor, latent: Tensor, rules: dict[str, Any]) -> Tensor:
        """The decompressor's bias, which latent space never saw.

        Its key part shifts all scores of a query alike and drops out of the softmax. Its value part comes back whole,
        because the weights sum to 1, except in a row that attends nothing.
        """
        assert self.kv_b_proj.bias is not None
        bias = self.kv_b_proj.bias.unflatten(0, (q.shape[1], 1, -1))[..., -self.v_head_dim :]  # (H, 1, V)
        hiding = {name: rules[name] for name in ("mask", "causal", "window", "q_start") if name in rules}
        allowed = make_call(q, latent, latent, **hiding).allowed(q, latent)
        return bias if allowed is None else bias * allowed.any(-1, keepdim=True).to(bias.dtype)


class MultiHeadLatentAttention(LatentSpace, CachedSelfAttention):
    """mode: "naive" caches decompressed k and v; "absorbed" caches latents and attends in latent space;
    "auto" caches latents and takes whichever way is cheaper for this call, by the counts of specs/latent.py.

    decompress_rank: the decompressor is a product of that rank (LoRA) instead of a whole matrix.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        nope_head_dim: int,
        rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        decompress_rank: int | None = None,
        bias: bool = False,
        latent_norm: bool = True,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-6,
        dropout: float = 0.0,
        mode: Mode = "auto",
        kernel: AnyKernel = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if mode not in ("auto", "naive", "absorbed"):
            raise ValueError(f"mode = {mode!r}: must be auto, naive or absorbed")
        sizes = {"num_heads": num_heads, "kv_lora_rank": kv_lora_rank, "q_lora_rank": q_lora_rank}
        sizes |= {"nope_head_dim": nope_head_dim, "v_head_dim": v_head_dim, "decompress_rank": decompress_rank}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name} = {size}: must be at least 1")
        if rope_head_dim < 0:
            raise ValueError(f"rope_head_dim = {rope_head_dim}: must be at least 0 (no positions)")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.kv_lora_rank, self.q_lora_rank = kv_lora_rank, q_lora_rank
        self.nope_head_dim, self.rope_head_dim, self.v_head_dim = nope_head_dim, rope_head_dim, v_head_dim
        self.sizes = LatentSizes(num_heads, nope_head_dim, rope_head_dim, v_head_dim, kv_lora_rank)
        self.mode, self.dropout = mode, dropout
        self.kernel = find_kernel(kernel)
        self.rope = Rope(rope_head_dim, rope_theta) if rope_head_dim else None
        self.scale = (nope_head_dim + rope_head_dim) ** -0.5
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        options = {"bias": bias, **place}
        query_dim = num_heads * (nope_head_dim + rope_head_dim)
        if q_lora_rank is None:
            self.q_proj = nn.Linear(embed_dim, query_dim, **options)
        else:
            self.q_a_proj = nn.Linear(embed_dim, q_lora_rank, **options)
            self.q_a_norm = nn.RMSNorm(q_lora_rank, eps=norm_eps, **place)
            self.q_b_proj = nn.Linear(q_lora_rank, query_dim, **options)
        self.kv_a_proj = nn.Linear(embed_dim, kv_lora_rank + rope_head_dim, **options)
        self.kv_a_norm = nn.RMSNorm(kv_lora_rank, eps=norm_eps, **place) if latent_norm else nn.Identity()
        self.decompress_rank, keys_and_values = decompress_rank, num_heads * (nope_head_dim + v_head_dim)
        self.kv_b_proj = (
            nn.Linear(kv_lora_rank, keys_and_values, **options)
            if decompress_rank is None
            else LowRankLinear(kv_lora_rank, keys_and_values, decompress_rank, **options)
        )
        self.out_proj = nn.Linear(num_heads * v_head_dim, embed_dim, **options)

    def _attend(self, x: Tensor, cache: KVCache | None, rules: dict[str, Any]) -> Any:
        start = 0 if cache is None else cache.length
        q_nope, q_pe = self._queries(x, start)  # (B, H, L, N), (B, H, L, R)
        latent = self._latents(x, start)  # (B, 1, L, r + R)
        rules = {**rules, "scale": self.scale}
        if self.mode == "naive":
            k, v = self._expand(latent)
            if cache is not None:
                k, v = cache.append(k, v)
            return attention(torch.cat((q_nope, q_pe), dim=-1), k, v, **rules)
        if cache is not None:
            (latent,) = cache.append(latent)  # (B, 1, S, r + R)
        if self._absorbs(x.shape[1], latent):
            return self._attend_latents(q_nope, q_pe, latent, rules)
        return attention(torch.cat((q_nope, q_pe), dim=-1), *self._expand(latent), **rules)

    def _queries(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, L, N + R)
        q_nope, q_pe = q.split((self.nope_head_dim, self.rope_head_dim), dim=-1)
        return q_nope, self._rotate(q_pe, start)

    def _latents(self, x: Tensor, start: int) -> Tensor:
        """What a token leaves in the cache: its normed latent and its rotated k_pe, shared by all heads."""
        latent, k_pe = self.kv_a_proj(x).split((self.kv_lora_rank, self.rope_head_dim), dim=-1)
        k_pe = self._rotate(k_pe.unsqueeze(1), start)  # (B, 1, L, R)
        return torch.cat((self.kv_a_norm(latent).unsqueeze(1), k_pe), dim=-1)  # (B, 1, L, r + R)

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        return x if self.rope is None else self.rope(x, start)

    def _expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Latents (B, 1, S, r + R) -> keys (B, H, S, N + R) and values (B, H, S, V)."""
        c, k_pe = latent.split((self.kv_lora_rank, self.rope_head_dim), dim=-1)
        kv = self.kv_b_proj(c.squeeze(1)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, S, N + V)
        k_nope, v = kv.split((self.nope_head_dim, self.v_head_dim), dim=-1)
        return torch.cat((k_nope, k_pe.expand(-1, self.num_heads, -1, -1)), dim=-1), v

    def _absorbs(self, queries: int, latent: Tensor) -> bool:
        if self.training and self.dropout > 0:
            return False  # dropped weights do not sum to 1, so the value bias could not be restored
        if self.mode == "absorbed":
            return True
        return choose(self.sizes, queries, latent.shape[2], itemsize=latent.itemsize).absorbs

    def hold(self, cache: KVCache, *streams: Tensor) -> None:
        cache.append(*(self._expand(*streams) if self.mode == "naive" else streams))

    def kv_elements_per_token(self) -> int:
        return self.sizes.expanded_kv_elements if self.mode == "naive" else self.sizes.latent_kv_elements

    def extra_repr(self) -> str:
        dims = f"nope={self.nope_head_dim}, rope={self.rope_head_dim}, value={self.v_head_dim}"
        return f"heads={self.num_heads}, rank={self.kv_lora_rank}, {dims}, {self.mode}, {self.kernel.name}"
