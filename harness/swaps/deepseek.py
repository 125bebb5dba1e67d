"""DeepSeek's latent attention, as transformers has it, with the absorbed decode that transformers lacks.

transformers caches latents, but decompresses all of them into per-head keys and values at every step. Ours has the same
parts, cache and signature, and where that is cheaper (specs/latent.py) it brings the queries into latent space
instead: there all heads share one key (the latent and the rotated k_pe, D = r + R) and one value (the latent, D_v = r).
"""

from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.cache_utils import Cache
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from harness.kernels.call import Kernel, Unsupported, one_dtype
from harness.kernels.front import attention
from harness.swaps.converters import Request, SwapError
from harness.variants.mla import LatentSpace, Mode
from harness.variants.specs.latent import LatentSizes, choose

OPTIONS = ("mode",)
UNHEEDED = ("cache", "position_bias", "s_aux", "softcap")  # would change transformers' numbers, and ours not


class LatentAttention(LatentSpace):
    """What both generations share; r, R, N and V are kv_lora_rank and the rope, nope and value head dims.

    mode: "naive" always decompresses, "absorbed" never does, "auto" takes what is cheaper for this call.
    With dropout under way all three decompress: dropped weights do not sum to 1, and the value bias would be lost.
    """

    kernel: Kernel
    mode: Mode
    # Found in the module that it replaces:
    config: Any
    layer_idx: int
    is_causal: bool
    scaling: float  # (N + R)^-0.5, and yarn's factor on top; never of r
    attention_dropout: float
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    q_proj: nn.Module
    q_a_proj: nn.Module
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    kv_a_proj_with_mqa: nn.Module
    kv_a_layernorm: nn.Module
    o_proj: nn.Module

    def rotate(self, x: Tensor, position_embeddings: Any) -> Tensor:
        """x (B, heads, L, R), in the layout that transformers' own puts into the cache."""
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        position_embeddings: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        N, R, r = self.qk_nope_head_dim, self.qk_rope_head_dim, self.kv_lora_rank
        if self.q_lora_rank is None:
            q = self.q_proj(hidden_states)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q_nope, q_pe = q.unflatten(-1, (-1, N + R)).transpose(1, 2).split((N, R), dim=-1)  # (B, H, L, N), (B, H, L, R)
        q_pe = self.rotate(q_pe, position_embeddings)

        c, k_pe = self.kv_a_proj_with_mqa(hidden_states).unsqueeze(1).split((r, R), dim=-1)
        c, k_pe = self.kv_a_layernorm(c), self.rotate(k_pe, position_embeddings)  # (B, 1, L, r), (B, 1, L, R)
        if past_key_values is not None:
            c, k_pe = past_key_values.update(c, k_pe, self.layer_idx)  # (B, 1, S, r), (B, 1, S, R)

        rules = self._rules(attention_mask, q.shape[1], kwargs)
        if self._absorbs(q_nope, c):
            attended = self._attend_latents(q_nope, q_pe, torch.cat((c, k_pe), dim=-1), rules)
        else:
            attended = self._attend_expanded(q_nope, q_pe, c, k_pe, rules)
        heads, weights = attended if isinstance(attended, tuple) else (attended, None)  # (B, H, L, V), (B, H, L, S)
        return self.o_proj(heads.transpose(1, 2).flatten(2)), weights  # (B, L, E)

    def _rules(self, mask: Tensor | None, queries: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 4):
            found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"attention_mask {found}: must be a tensor of shape (B, 1 or H, L, S)")
        if unheeded := [name for name in UNHEEDED if kwargs.get(name) is not None]:
            raise Unsupported(f"{type(self).__name__} cannot heed {', '.join(unheeded)}")
        # Without a mask transformers' eager hides nothing; all its other implementations then mean a causal prefill,
        # from position 0 on even when a static cache holds more keys than there are queries.
        is_causal = kwargs.get("is_causal")
        causal = self.is_causal if is_causal is None else bool(is_causal)
        return {
            "mask": mask,
            "causal": causal and mask is None and queries > 1 and self.config._attn_implementation != "eager",
            "q_start": 0 if mask is None and queries > 1 else None,
            "scale": self.scaling,
            "dropout_p": self.attention_dropout if self.training else 0.0,
            "return_weights": bool(kwargs.get("output_attentions", self.config.output_attentions)),
            "kernel": self.kernel,
        }

    def _absorbs(self, q_nope: Tensor, c: Tensor) -> bool:
        if self.mode == "naive" or (self.training and self.attention_dropout > 0):
            return False
        if problem := _why_not_absorbed(self.kv_b_proj):
            if self.mode == "absorbed":
                raise SwapError(f"mode = 'absorbed': {problem}")
            return False
        if self.mode == "absorbed":
            return True
        (H, L), S = q_nope.shape[1:3], c.shape[2]
        dims = (self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim, self.kv_lora_rank)
        return choose(LatentSizes(H, *dims), L, S, itemsize=c.itemsize).absorbs

    def _attend_expanded(self, q_nope: Tensor, q_pe: Tensor, c: Tensor, k_pe: Tensor, rules: dict[str, Any]) -> Any:
        N, V, H = self.qk_nope_head_dim, self.v_head_dim, q_nope.shape[1]
        kv = self.kv_b_proj(c.squeeze(1)).unflatten(-1, (H, N + V)).transpose(1, 2)  # (B, H, S, N + V)
        k_nope, v = kv.split((N, V), dim=-1)
        k = torch.cat((k_nope, k_pe.expand(-1, H, -1, -1)), dim=-1)  # (B, H, S, N + R)
        return attention(*one_dtype(torch.cat((q_nope, q_pe), dim=-1), k, v), **rules)

    def _attend_shared(self, q: Tensor, k: Tensor, v: Tensor, rules: dict[str, Any]) -> Any:
        """All heads see the same key, so the heads of a lone query are handed over as rows of one matrix.

        SDPA would repeat the keys for each head instead: 100 times slower at 16 heads and 2,048 keys on a CPU.
        """
        if q.shape[2] != 1:
            return attention(q, k, v, **rules)
        mask = rules["mask"]
        rules = rules | {"mask": None if mask is None else mask.transpose(1, 2)}
        attended = attention(q.transpose(1, 2), k, v, **rules)
        return tuple(t.transpose(1, 2) for t in attended) if isinstance(attended, tuple) else attended.transpose(1, 2)

    def extra_repr(self) -> str:
        return f"mode={self.mode}, kernel={self.kernel.name}"


class AbsorbingDeepseekV2Attention(LatentAttention, DeepseekV2Attention):
    """A DeepseekV2Attention still, so that the model goes on recording its attentions."""

    def rotate(self, x: Tensor, position_embeddings: Tensor) -> Tensor:
        """Neighbouring channels are one complex number, turned by (B, L, R / 2) others; the layout stays.

        In float32 whatever the dtype, as transformers does it: in float64 the two would differ by float32's rounding.
        """
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # (B, heads, L, R / 2)
        turned = pairs * position_embeddings.to(x.device).unsqueeze(1)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)


class AbsorbingDeepseekV3Attention(LatentAttention, DeepseekV3Attention):
    """A DeepseekV3Attention still, so that the model goes on recording its attentions."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return super().forward(hidden_states, attention_mask, past_key_values, position_embeddings, **kwargs)

    def rotate(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Pairs are neighbours or half a head apart; either way all first members come out before all second ones."""
        half = x.shape[-1] // 2
        cos, sin = (t[..., :half].unsqueeze(1) for t in position_embeddings)  # (B, 1, L, R / 2): both halves are equal
        a, b = (x[..., 0::2], x[..., 1::2]) if self.config.rope_interleave else x.split(half, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


# Our own are known too: a swapped model may be swapped again, to another kernel or mode.
REPLACEMENTS: dict[type[nn.Module], type[LatentAttention]] = {
    DeepseekV2Attention: AbsorbingDeepseekV2Attention,
    DeepseekV3Attention: AbsorbingDeepseekV3Attention,
    AbsorbingDeepseekV2Attention: AbsorbingDeepseekV2Attention,
    AbsorbingDeepseekV3Attention: AbsorbingDeepseekV3Attention,
}


def convert(module: nn.Module, kernel: Kernel, request: Request) -> nn.Module | None:
    """Ours in place of a DeepSeek attention; None for any other module.

    Children, parameters, buffers and hooks are the old module's own objects, under the same names.
    """
    kind = type(module)
    if not isinstance(module, (DeepseekV2Attention, DeepseekV3Attention)):
        return None
    if kind not in REPLACEMENTS:
        # A subclass may compute something else: replacing it by its parent's counterpart would be a silent change.
        raise SwapError(f"{kind.__name__} is an unknown subclass of a DeepSeek attention")
    if "forward" in vars(module):
        raise SwapError(f"{kind.__name__}: its forward was replaced on the instance, and a swap would lose that")
    mode = request.options.get("mode", "auto")
    if mode not in get_args(Mode):
        raise SwapError(f"mode = {mode!r}: must be {', '.join(get_args(Mode))}")
    problem = _why_not_absorbed(module.kv_b_proj)
    if mode == "absorbed" and problem:
        raise SwapError(f"mode = 'absorbed': {problem}")
    new = REPLACEMENTS[kind].__new__(REPLACEMENTS[kind])
    vars(new).update(vars(module))
    new.kernel, new.mode = kernel, mode
    return new


def _why_not_absorbed(up: nn.Module) -> str | None:
    """Absorbing reads the weight and never calls kv_b_proj: whatever else a call does (LoRA, hooks) would be lost."""
    kind = type(up).__bases__[0] if parametrize.is_parametrized(up) else type(up)
    if kind is not nn.Linear or "forward" in vars(up):
        return f"kv_b_proj is {type(up).__name__}: its weight can be absorbed only if it is a plain nn.Linear"
    if up._forward_hooks or up._forward_pre_hooks or up._backward_hooks or up._backward_pre_hooks:
        return "kv_b_proj has hooks, and absorbed it is never called"
    return None
