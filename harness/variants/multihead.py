"""nn.MultiheadAttention's whole contract, none of its code: what both drop-ins share."""

import warnings
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.backends import mha
from torch.fx import Proxy
from torch.overrides import has_torch_function

from harness.kernels.front import AnyKernel, find_kernel, make_call, run
from harness.kernels.transforms import record_module
from harness.variants import torch_masks
from harness.variants.in_projection import bare_linear, held

DeadRows = Literal["zero", "torch"]


class DropInAttention(nn.Module):
    """A subclass holds the in-projections.

    dead_rows: a query that may attend nothing gives 0 before the output projection ("zero"), or, with
    need_weights=True, the NaN that torch gives ("torch").
    fast_path: torch's encoder layers may take theirs in inference: fused operators that read the weights and never call
    the attention they hold, nor its kernel. A call of the module itself is always its kernel's.
    """

    if TYPE_CHECKING:  # torch.jit.script reads annotations, and knows no Linear
        out_proj: nn.Linear
        in_proj_bias: Any  # a parameter or a property, by subclass; so are the weights
        q_proj_weight: Any
        k_proj_weight: Any
        v_proj_weight: Any
        bias_k: Tensor | None
        bias_v: Tensor | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kernel: AnyKernel = "auto",
        dead_rows: DeadRows = "zero",
        fast_path: bool = False,
    ) -> None:
        super().__init__()
        if embed_dim <= 0 or num_heads <= 0:
            raise ValueError(f"embed_dim = {embed_dim}, num_heads = {num_heads}: both must be greater than 0")
        if embed_dim % num_heads:
            raise AssertionError(f"embed_dim ({embed_dim}) must be divisible by num_heads ({num_heads})")
        if dead_rows not in ("zero", "torch"):
            raise ValueError(f"dead_rows = {dead_rows!r}: must be 'zero' or 'torch'")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.kernel, self.dead_rows, self.fast_path = find_kernel(kernel), dead_rows, fast_path
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self._make_projections(bias, place)
        on_meta = torch.device(device or torch.get_default_device()).type == "meta"
        self.out_proj = (bare_linear if on_meta else nn.Linear)(embed_dim, embed_dim, bias=bias, **place)
        for name in ("bias_k", "bias_v"):
            token = nn.Parameter(torch.empty((1, 1, embed_dim), **place)) if add_bias_kv else None
            self.register_parameter(name, token)
        if not on_meta:
            self._reset_parameters()

    @property
    def packs(self) -> bool:
        """Whether torch keeps these projections in one in_proj_weight."""
        return self.kdim == self.embed_dim and self.vdim == self.embed_dim

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """As torch's, but False wherever its encoder layers would take their fast path, unless they may.

        Who reads it next reads q_proj_weight and so on: those are always there.
        """
        return False if is_scripting() else (self.fast_path or self._some_in_bias() is None) and self.packs

    def _some_in_bias(self) -> Tensor | None:
        """That of the in-projection, or of a part of it."""
        bias: Tensor | None = held(self, "in_proj_bias")
        return bias

    def __prepare_scriptable__(self) -> "DropInAttention":
        """What torch.jit.script asks every module before it compiles it."""
        text = f"torch.jit.script: {type(self).__name__} runs torch's own function there, for its kernels are Python"
        warnings.warn(f"{text}; torch.jit.trace, torch.export and torch.compile keep the kernel", stacklevel=2)
        return self

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As nn.MultiheadAttention.forward."""
        # torch.jit.script compiles the branch that is its own, here and below, and nothing of the other.
        return (
            self._scripted(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
            if is_scripting()
            else self._run(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        )

    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(query, Proxy):
            masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "is_causal": is_causal}
            shown = {"need_weights": need_weights, "average_attn_weights": average_attn_weights}
            return record_module(query, self, query, key, value, **masks, **shown)
        if query.is_nested or key.is_nested or value.is_nested:
            masked = attn_mask is not None or key_padding_mask is not None
            return self._forward_nested(query, key, value, masked, need_weights, average_attn_weights)
        batched = torch_masks.check_dimensions(query, key, value, key_padding_mask, attn_mask, self.num_heads)
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask: attn_mask must be given with it")
        # In memory as torch's: a dropout that follows draws its numbers in the order of the strides.
        lies_batch_first = (
            query is key is value and batched and self._is_fused_in_torch(query, attn_mask, key_padding_mask)
        )
        query, key, value = self._to_batch_first(query, key, value, batched)  # (B, L, E), (B, S, kdim), (B, S, vdim)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        # torch takes the hint at its word, top-left aligned, only where it needs neither the weights nor padding: there
        # it never looks at the mask.
        causal = is_causal and key_padding_mask is None and not need_weights
        attn_mask = None if causal else attn_mask
        torch_masks.check_sizes(
            query, key, value, key_padding_mask, attn_mask, embed_dim=self.embed_dim, heads=self.num_heads,
            packs=self.packs,
        )  # fmt: skip
        mask = torch_masks.merge_masks(attn_mask, key_padding_mask, heads=self.num_heads, dtype=query.dtype)

        q, k, v = self._project(query, key, value)  # (B, H, L, D), (B, H, S, D), (B, H, S, D)
        if held(self, "bias_k") is not None or self.add_zero_attn:
            k, v, mask = self._append_tokens(k, v, mask)
        heads, weights = self._attend(q, k, v, mask, causal, need_weights)  # (B, H, L, D), (B, H, L, S)
        if lies_batch_first:
            out = self.out_proj(heads.transpose(1, 2).flatten(2))  # (B, L, E)
        else:
            out = self.out_proj(heads.permute(2, 0, 1, 3).flatten(2))  # (L, B, E)
            if not batched:
                out = out.squeeze(1)
            elif self.batch_first:
                out = out.transpose(0, 1)
        if weights is not None:
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        return out, weights

    def _scripted(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """For torch.jit.script, which compiles no kernel of ours: torch's function of the same weights."""
        turned = self.batch_first and query.dim() == 3
        if turned:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        w_q, w_k, w_v = self._in_weights()
        out, weights = F.multi_head_attention_forward(
            query, key, value, self.embed_dim, self.num_heads, None, self._scripted_bias(), self.bias_k, self.bias_v,
            self.add_zero_attn, self.dropout, self.out_proj.weight, self.out_proj.bias, training=self.training,
            key_padding_mask=key_padding_mask, need_weights=need_weights, attn_mask=attn_mask,
            use_separate_proj_weight=True, q_proj_weight=w_q, k_proj_weight=w_k, v_proj_weight=w_v,
            average_attn_weights=average_attn_weights, is_causal=is_causal,
        )  # fmt: skip
        return (out.transpose(0, 1) if turned else out), weights

    def _scripted_bias(self) -> Tensor | None:
        raise NotImplementedError

    def merge_masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor
    ) -> tuple[Tensor | None, int | None]:
        """As nn.MultiheadAttention.merge_masks, for who calls torch's operators with its result: True = blocked."""
        if attn_mask is None:
            return key_padding_mask, None if key_padding_mask is None else 1
        B, L, _ = query.shape
        by_head = attn_mask.view(B if attn_mask.dim() == 3 else 1, -1, L, L).expand(B, self.num_heads, L, L)
        return (by_head if key_padding_mask is None else by_head + key_padding_mask[:, None, None]), 2

    def _is_fused_in_torch(self, query: Tensor, *masks: Tensor | None) -> bool:
        """Whether torch's class gives batched self-attention to its fused operator, whose output lies batch first."""
        if self.training or not self.batch_first or self.num_heads % 2 or not self.packs:
            return False
        if self.add_zero_attn or held(self, "bias_k") is not None:
            return False
        bias = self._some_in_bias()
        if bias is None or bias.dtype != query.dtype or has_torch_function((query,)) or torch.is_autocast_enabled():
            return False
        if any(mask is not None and mask.is_floating_point() for mask in masks) or not mha.get_fastpath_enabled():
            return False
        learns = torch.is_grad_enabled() and (query.requires_grad or any(p.requires_grad for p in self.parameters()))
        return not learns

    def _to_batch_first(
        self, query: Tensor, key: Tensor, value: Tensor, batched: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keeps which of the three are one tensor: the packed projection of self-attention is one product."""
        if batched and self.batch_first:
            return query, key, value

        def turn(t: Tensor) -> Tensor:
            return t.transpose(0, 1) if batched else t.unsqueeze(0)

        q = turn(query)
        k = q if key is query else turn(key)
        v = k if value is key else turn(value)
        return q, k, v

    def _by_head(self, t: Tensor) -> Tensor:
        B, length, _ = t.shape
        return t.view(B, length, self.num_heads, self.head_dim).transpose(1, 2)

    def _append_tokens(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """add_bias_kv's learnt token, then add_zero_attn's zero token: after all keys, and visible to all."""
        B, _, S, _ = k.shape
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self._by_head(self.bias_k).expand(B, -1, 1, -1).to(k.dtype)], dim=2)
            v = torch.cat([v, self._by_head(self.bias_v).expand(B, -1, 1, -1).to(v.dtype)], dim=2)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        if mask is not None:
            mask = F.pad(mask, (0, k.shape[2] - S), value=True if mask.dtype == torch.bool else 0.0)
        return k, v, mask

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        call = make_call(
            q, k, v, mask=mask, causal=causal, q_start=0, dropout_p=self.dropout if self.training else 0.0,
            need_weights=need_weights,
        )  # fmt: skip
        heads, weights = run(self.kernel, q, k, v, call)
        if not need_weights:
            return heads, None
        assert weights is not None
        if self.dead_rows == "torch" and mask is not None:
            dead = torch_masks.dead_rows(mask)
            heads, weights = (t.masked_fill(dead, float("nan")) for t in (heads, weights))
        return heads, weights

    def _forward_nested(
        self, query: Tensor, key: Tensor, value: Tensor, masked: bool, need_weights: bool, average_attn_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Where torch takes nested tensors, in its fast path: unmasked self-attention in inference."""
        grad = torch.is_grad_enabled() and (query.requires_grad or any(p.requires_grad for p in self.parameters()))
        weights_or = "at least one of query or the input/output projection weights or biases"
        refused = {  # torch's words, and in its order
            f"input not batched; expected query.dim() of 3 but got {query.dim()}": query.dim() != 3,
            "non-self attention was used (query, key, and value are not the same Tensor)": not query is key is value,
            "training is enabled": self.training,
            "batch_first was not True": not self.batch_first,
            "self.bias_k was not None": self.bias_k is not None,
            "add_zero_attn was enabled": self.add_zero_attn,
            "key_padding_mask and attn_mask are not supported with NestedTensor input": masked,
            f"its layout is {query.layout}": query.layout != torch.strided,
            f"grad is enabled and {weights_or} requires_grad": grad,
        }
        for reason, holds in refused.items():
            if holds:
                text = "MultiheadAttention does not support NestedTensor outside of its fast path. "
                raise AssertionError(f"{text}The fast path was not hit because {reason}")
        rows = query.unbind()
        padded = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)  # (B, L, E); nested's own takes no empty rows
        lengths = torch.tensor([row.shape[0] for row in rows], device=padded.device)
        padding = torch.arange(padded.shape[1], device=padded.device) >= lengths[:, None]  # (B, L)
        out, weights = self.forward(
            padded, padded, padded, padding, need_weights, average_attn_weights=average_attn_weights
        )
        if weights is not None:
            absent = padding[:, :, None] if average_attn_weights else padding[:, None, :, None]
            weights = weights.masked_fill(absent, 0.0)
        return torch.nested.nested_tensor([o[: row.shape[0]] for o, row in zip(out, rows, strict=True)]), weights

    def _make_projections(self, bias: bool, place: dict[str, Any]) -> None:
        raise NotImplementedError

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """By head: (B, H, L, D), (B, H, S, D), (B, H, S, D)."""
        raise NotImplementedError

    def _in_weights(self) -> list[Tensor]:
        """Those of q, k and v."""
        raise NotImplementedError

    def _reset_parameters(self) -> None:
        """torch's initialisation, in its order: the same seed gives the same weights."""
        weights = self._in_weights()
        with torch.no_grad():
            if self.packs:  # one matrix there, and its bounds follow from its shape
                packed = nn.init.xavier_uniform_(torch.cat(weights))
                for weight, rows in zip(weights, packed.chunk(3), strict=True):
                    weight.copy_(rows)
            else:
                for weight in weights:
                    nn.init.xavier_uniform_(weight)
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
            for token in (self.bias_k, self.bias_v):
                if token is not None:
                    nn.init.xavier_normal_(token)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, heads={self.num_heads}, batch_first={self.batch_first}, {self.kernel.name}"
