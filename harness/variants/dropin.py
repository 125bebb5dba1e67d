"""Drop-in replacements for nn.MultiheadAttention: its whole contract, none of its code.

`EagerMultiheadAttention` has separate q/k/v `Linear`s, `EagerMultiheadAttentionWithInProj` torch's packed projection.
Both read and write torch's state_dict keys.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.kernels.front import AnyKernel, find_kernel, make_call, run
from harness.variants import torch_masks

DeadRows = Literal["zero", "torch"]


class DropInAttention(nn.Module):
    """What both classes share; a subclass holds the projections.

    dead_rows: a query that may attend nothing gives 0 before the output projection ("zero"), or, with
    need_weights=True, the NaN that torch gives ("torch").
    """

    # torch's encoder layers read this to decide on their fast path, which would never call our forward.
    _qkv_same_embed_dim = False

    out_proj: nn.Linear
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
        self.kernel, self.dead_rows = find_kernel(kernel), dead_rows
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
        if query.is_nested or key.is_nested or value.is_nested:
            masked = attn_mask is not None or key_padding_mask is not None
            return self._forward_nested(query, key, value, masked, need_weights, average_attn_weights)
        batched = torch_masks.check_dimensions(query, key, value, key_padding_mask, attn_mask, self.num_heads)
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask: attn_mask must be given with it")
        query, key, value = self._to_batch_first(query, key, value, batched)  # (B, L, E), (B, S, kdim), (B, S, vdim)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        torch_masks.check_sizes(
            query, key, value, key_padding_mask, attn_mask, embed_dim=self.embed_dim, heads=self.num_heads,
            packs=self.packs,
        )  # fmt: skip
        # torch takes the hint at its word, top-left aligned, only where it needs neither the weights nor padding.
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = torch_masks.merge_masks(
            None if causal else attn_mask, key_padding_mask, heads=self.num_heads, dtype=query.dtype
        )

        q, k, v = self._project(query, key, value)  # (B, H, L, D), (B, H, S, D), (B, H, S, D)
        if self.bias_k is not None or self.add_zero_attn:
            k, v, mask = self._append_tokens(k, v, mask)
        heads, weights = self._attend(q, k, v, mask, causal, need_weights)  # (B, H, L, D), (B, H, L, S)
        out = self.out_proj(heads.transpose(1, 2).flatten(2))  # (B, L, E)
        if not batched:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        if weights is not None:
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        return out, weights

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
        refused = {
            "query, key and value must be one tensor": query is not key or key is not value,
            "its layout must be strided": query.layout != torch.strided,
            "the module must be in eval mode": self.training,
            "batch_first must be True": not self.batch_first,
            "no mask may be given": masked,
            "gradients must be off": grad,
            "add_bias_kv and add_zero_attn must be False": self.bias_k is not None or self.add_zero_attn,
        }
        for rule, broken in refused.items():
            if broken:
                raise AssertionError(f"a nested tensor as input: {rule}")
        rows = query.unbind()
        padded = torch.nested.to_padded_tensor(query, 0.0)  # (B, L, E)
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


class EagerMultiheadAttention(DropInAttention):
    """nn.MultiheadAttention with a `Linear` each for queries, keys and values.

    Its state_dict has torch's keys (the packed `in_proj_weight`, or `q_proj_weight` and so on); it loads those, and its
    own (`q_proj.weight`) too.
    """

    PARTS = ("q_proj", "k_proj", "v_proj")
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def _make_projections(self, bias: bool, place: dict[str, Any]) -> None:
        for part, width in zip(self.PARTS, (self.embed_dim, self.kdim, self.vdim), strict=True):
            setattr(self, part, bare_linear(width, self.embed_dim, bias=bias, **place))  # torch draws no numbers here

    def _in_weights(self) -> list[Tensor]:
        return [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        by_head = self._by_head
        return by_head(self.q_proj(query)), by_head(self.k_proj(key)), by_head(self.v_proj(value))

    @property
    def in_proj_weight(self) -> Tensor | None:
        """As torch's, for code that reads it (its encoder layers do); a new tensor at each call."""
        return torch.cat(self._in_weights()) if self.packs else None

    @property
    def in_proj_bias(self) -> Tensor | None:
        if self.q_proj.bias is None:
            return None
        return torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias])

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        weights = [state.pop(f"{prefix}{part}.weight") for part in self.PARTS]
        ours = {f"{part}_weight": weight for part, weight in zip(self.PARTS, weights, strict=True)}
        if self.packs:
            ours = {"in_proj_weight": torch.cat(weights)}
        if f"{prefix}q_proj.bias" in state:
            ours["in_proj_bias"] = torch.cat([state.pop(f"{prefix}{part}.bias") for part in self.PARTS])
        # In torch's order: these first, then what the other modules of this prefix left.
        others = {key: state.pop(key) for key in [key for key in state if key.startswith(prefix)]}
        state.update({f"{prefix}{key}": value for key, value in ours.items()} | others)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # `load_state_dict` hands this dict on to the children afterwards.
        errors: list[str] = args[-1]
        for kind in ("weight", "bias"):
            packed = state_dict.pop(f"{prefix}in_proj_{kind}", None)
            if packed is not None and packed.shape[0] != 3 * self.embed_dim:
                found, rows = tuple(packed.shape), 3 * self.embed_dim
                errors.append(f"size mismatch for {prefix}in_proj_{kind}: {found} in the checkpoint, {rows} rows here")
            elif packed is not None:
                for part, rows in zip(self.PARTS, packed.chunk(3), strict=True):
                    state_dict[f"{prefix}{part}.{kind}"] = rows
        for part in self.PARTS:
            weight = state_dict.pop(f"{prefix}{part}_weight", None)
            if weight is not None:
                state_dict[f"{prefix}{part}.weight"] = weight
        super()._load_from_state_dict(state_dict, prefix, *args)


class EagerMultiheadAttentionWithInProj(DropInAttention):
    """nn.MultiheadAttention with torch's own parameters: one packed in-projection; three weights with kdim or vdim."""

    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    q_proj_weight: Tensor | None
    k_proj_weight: Tensor | None
    v_proj_weight: Tensor | None

    def _make_projections(self, bias: bool, place: dict[str, Any]) -> None:
        E = self.embed_dim
        shapes: dict[str, tuple[int, ...] | None] = {
            "in_proj_weight": (3 * E, E) if self.packs else None,
            "q_proj_weight": None if self.packs else (E, E),
            "k_proj_weight": None if self.packs else (E, self.kdim),
            "v_proj_weight": None if self.packs else (E, self.vdim),
            "in_proj_bias": (3 * E,) if bias else None,
        }
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape, **place)))

    def _in_weights(self) -> list[Tensor]:
        if self.in_proj_weight is not None:
            return list(self.in_proj_weight.chunk(3))
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        return [weight for weight in weights if weight is not None]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bias = self.in_proj_bias
        if query is key and key is value and (weight := self.in_proj_weight) is not None:
            packed = F.linear(query, weight, bias).view(*query.shape[:2], 3, self.num_heads, self.head_dim)
            q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
            return q, k, v
        w_q, w_k, w_v = self._in_weights()
        b_q, b_k, b_v = (None, None, None) if bias is None else bias.chunk(3)
        by_head = self._by_head
        return by_head(F.linear(query, w_q, b_q)), by_head(F.linear(key, w_k, b_k)), by_head(F.linear(value, w_v, b_v))


def bare_linear(in_features: int, out_features: int, *, bias: bool, **place: Any) -> nn.Linear:
    """An nn.Linear whose weights are still to come.

    Its constructor would draw random numbers, and torch.nn.utils.skip_init takes ten times as long: a swap makes
    thousands of these.
    """
    linear = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(linear)
    linear.in_features, linear.out_features = in_features, out_features
    linear.weight = nn.Parameter(torch.empty((out_features, in_features), **place))
    linear.register_parameter("bias", nn.Parameter(torch.empty(out_features, **place)) if bias else None)
    return linear
