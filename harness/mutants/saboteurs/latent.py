"""Wrong MLA: its norms, its decompression into heads, and the absorbed way through latent space."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.case import Case
from harness.cell.build import Pair
from harness.kernels.front import attention
from harness.mutants.saboteurs.blocks import become_part, in_layer
from harness.mutants.saboteurs.reach import absorbed, both, chooses, expanded, is_latent, visible
from harness.mutants.saboteurs.saboteur import in_class, in_module
from harness.variants.mla import MultiHeadLatentAttention

in_norm = partial(in_class, partial(become_part, name="kv_a_norm"))


@in_norm("latent_norm_missing", applies=is_latent)
class _NoNorm(nn.RMSNorm):
    """kv_a_layernorm forgotten between the two projections."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@in_norm("latent_norm_without_gain", applies=is_latent)
class _NormWithoutGain(nn.RMSNorm):
    """The norm's learnt weights are lost when a checkpoint is converted: all 1."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, eps=self.eps)


@in_norm("latent_norm_over_tokens", applies=is_latent)
class _NormOverTokens(nn.RMSNorm):
    """The mean square over the wrong dim: of a channel over the tokens, not of a token over its channels."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return x * (x.square().mean(-2, keepdim=True) + self.eps).rsqrt() * self.weight


@in_layer("latent_norm_counts_rope_channels", applies=is_latent)
class _NormBeforeSplit(MultiHeadLatentAttention):
    """The mean square is taken before the split: over the latent and k_pe together."""

    def _latents(self, x: Tensor, start: int) -> Tensor:
        both = self.kv_a_proj(x)  # (B, L, r + R)
        size = (both.square().mean(-1, keepdim=True) + self.kv_a_norm.eps).sqrt()
        latent, k_pe = both.split((self.kv_lora_rank, self.rope_head_dim), dim=-1)
        k_pe = self._rotate(k_pe.unsqueeze(1), start)
        return torch.cat(((latent / size * self.kv_a_norm.weight).unsqueeze(1), k_pe), dim=-1)


@in_module(applies=both(is_latent, lambda case: case.q_lora_rank is not None, chooses))
def query_norm_missing(pair: Pair) -> None:
    """q_a_layernorm forgotten between the two query projections."""
    become_part(pair, _NoNorm, name="q_a_norm")


def _absorbs_with_bias(case: Case) -> bool:
    seen = visible(case).any(-1)  # (B, H, S): a dead row has no bias to lose
    return case.bias and bool((seen & absorbed(case)).any())


@in_layer("absorb_without_value_bias", applies=_absorbs_with_bias)
class _NoValueBias(MultiHeadLatentAttention):
    """Only the weight of kv_b is absorbed: the value part of its bias is lost."""

    def _value_bias(self, q: Tensor, latent: Tensor, rules: dict[str, Any]) -> Tensor:
        return torch.zeros_like(super()._value_bias(q, latent, rules))


def _absorbs_dead_rows(case: Case) -> bool:
    dead = ~visible(case).any(-1)
    return case.bias and bool((dead & absorbed(case)).any())


@in_layer("absorb_value_bias_in_dead_rows", applies=_absorbs_dead_rows)
class _ValueBiasEverywhere(MultiHeadLatentAttention):
    """The value bias is added to rows that attend nothing, whose weights do not sum to 1."""

    def _value_bias(self, q: Tensor, latent: Tensor, rules: dict[str, Any]) -> Tensor:
        right = super()._value_bias(q, latent, rules)
        whole = super()._value_bias(q, latent, rules | {"mask": None, "causal": False, "window": None})
        # Where no row is dead the right one stays: a product with 1 is rounded elsewhere in the backward pass.
        return right if bool((right == whole).all()) else whole


@in_layer(
    "absorb_scaled_by_rank", applies=lambda case: chooses(case, absorbed(case)) and case.kv_lora_rank != case.head_dim
)
class _ScaleOfLatent(MultiHeadLatentAttention):
    """SDPA's default scale in latent space: (r + R)^-1/2 where the heads' (N + R)^-1/2 is meant."""

    def _attend_latents(self, q_nope: Tensor, q_pe: Tensor, latent: Tensor, rules: dict[str, Any]) -> Any:
        return super()._attend_latents(q_nope, q_pe, latent, rules | {"scale": latent.shape[-1] ** -0.5})


@in_layer("absorb_values_by_key_projection", applies=lambda case: bool((visible(case).any(-1) & absorbed(case)).any()))
class _ValuesUpByKeys(MultiHeadLatentAttention):
    """W_UK in the place of W_UV: rows of kv_b taken from the top of each head."""

    def _attend_latents(self, q_nope: Tensor, q_pe: Tensor, latent: Tensor, rules: dict[str, Any]) -> Any:
        up = self.kv_b_proj.weight.view(self.num_heads, -1, self.kv_lora_rank)  # (H, N + V, r)
        up_k = up[:, : self.nope_head_dim]
        q = torch.cat((torch.einsum("bhln,hnr->bhlr", q_nope, up_k), q_pe), dim=-1)
        attended = attention(q, latent, latent[..., : self.kv_lora_rank], **rules)
        mixed, weights = attended if isinstance(attended, tuple) else (attended, None)
        heads = torch.einsum("bhlr,hvr->bhlv", mixed, up[:, : self.v_head_dim])  # V rows from the top, K's
        if self.kv_b_proj.bias is not None:
            heads = heads + self._value_bias(q, latent, rules)
        return heads if weights is None else (heads, weights)


def _expands_for_other_heads(case: Case) -> bool:
    several = visible(case).sum(-1)[:, 1:] >= 2  # (B, H - 1, S)
    return bool((several & expanded(case)).any())


@in_layer("rope_key_not_shared", applies=_expands_for_other_heads)
class _RopeKeyOfFirstHead(MultiHeadLatentAttention):
    """k_pe is written into head 0 alone; it is shared by all."""

    def _expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super()._expand(latent)
        of_first = torch.arange(self.num_heads, device=k.device).view(-1, 1, 1) == 0
        is_nope = torch.arange(k.shape[-1], device=k.device) < self.nope_head_dim
        return torch.where(of_first | is_nope, k, 0), v


@in_layer(
    "decompressed_heads_interleaved",
    applies=lambda case: case.heads > 1 and bool((visible(case).any(-1) & expanded(case)).any()),
)
class _HeadsInnermost(MultiHeadLatentAttention):
    """kv_b's rows read as (N + V, H) where (H, N + V) is meant."""

    def _expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super()._expand(latent)
        k_nope, k_pe = k.split((self.nope_head_dim, self.rope_head_dim), dim=-1)
        kv = torch.cat((k_nope, v), dim=-1).transpose(1, 2).flatten(2)  # what kv_b gave: (B, S, H * (N + V))
        kv = kv.unflatten(-1, (-1, self.num_heads)).permute(0, 3, 1, 2)  # (B, H, S, N + V)
        k_nope, v = kv.split((self.nope_head_dim, self.v_head_dim), dim=-1)
        return torch.cat((k_nope, k_pe), dim=-1), v
