"""Drop-in replacements for nn.MultiheadAttention, by how they hold its in-projections.

`EagerMultiheadAttention` has separate q/k/v `Linear`s, `EagerMultiheadAttentionWithInProj` torch's packed projection.
Both read and write torch's state_dict keys.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._jit_internal import is_scripting

from harness.kernels.transforms import is_transformed
from harness.variants.in_projection import Packed, bare_linear, held, pack
from harness.variants.multihead import DropInAttention


class EagerMultiheadAttention(DropInAttention):
    """nn.MultiheadAttention with a `Linear` each for queries, keys and values.

    Its state_dict has torch's keys (the packed `in_proj_weight`, or `q_proj_weight` and so on); it loads those, and its
    own (`q_proj.weight`) too. Under torch's names the weights can be read, written and assigned as torch's.
    """

    TORCHS = frozenset(("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"))
    PARTS = ("q_proj", "k_proj", "v_proj")
    if TYPE_CHECKING:
        q_proj: nn.Linear
        k_proj: nn.Linear
        v_proj: nn.Linear

    def _make_projections(self, bias: bool, place: dict[str, Any]) -> None:
        self._biases: dict[bool, Packed] = {}  # as last packed
        for part, width in zip(self.PARTS, (self.embed_dim, self.kdim, self.vdim), strict=True):
            setattr(self, part, bare_linear(width, self.embed_dim, bias=bias, **place))  # torch draws no numbers here

    def _in_weights(self) -> list[Tensor]:
        return [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_proj, k_proj, v_proj = self._linears()
        by_head = self._by_head
        return by_head(q_proj(query)), by_head(k_proj(key)), by_head(v_proj(value))

    @property
    def in_proj_weight(self) -> Tensor:
        """As torch's, None with kdim or vdim; no parameter, but in the memory of the three: writes reach them.

        Scripted, this and in_proj_bias are empty: torch's layers only ask for tensors there.
        """
        return torch.empty(0) if is_scripting() else self._packed("weight")

    @property
    def in_proj_bias(self) -> Tensor:
        """As in_proj_weight; None without biases."""
        return torch.empty(0) if is_scripting() else self._packed("bias")

    def _packed(self, kind: str) -> Any:
        parts = [part for linear in self._linears() if (part := held(linear, kind)) is not None]
        if not parts or (kind == "weight" and not self.packs):
            return None
        if kind == "weight" or torch.is_grad_enabled() or is_transformed():
            return pack(parts)
        # torch's encoder layers ask for the bias at each call, which small ones would feel.
        inference = torch.is_inference_mode_enabled()  # which makes tensors that are good for nothing else
        before = self._biases.get(inference)
        if before is not None and before.is_still_of(parts):
            return before
        bias = pack(parts)
        self._biases = {inference: bias} if isinstance(bias, Packed) else {}
        return bias

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_biases": {}}

    @property
    def q_proj_weight(self) -> Tensor:
        """The parameter itself; in torch, where it packs, None."""
        return self.q_proj.weight

    @property
    def k_proj_weight(self) -> Tensor:
        return self.k_proj.weight

    @property
    def v_proj_weight(self) -> Tensor:
        return self.v_proj.weight

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module would not ask a property before it registers a parameter.
        if name in self.TORCHS:
            self._assign(name, value)
        else:
            super().__setattr__(name, value)

    def _assign(self, name: str, value: Tensor | None) -> None:
        """A packed tensor becomes three parameters in its memory; one of three weights is taken as it is.

        Biases take the dtype of the weights, in memory of their own if they must: a Linear adds no other.
        """
        part, _, kind = name.rpartition("_")
        linears = self._linears() if part == "in_proj" else [getattr(self, part)]
        if value is None and kind == "bias":
            for linear in linears:
                linear.bias = None
            return
        expected = None if name == "in_proj_weight" and not self.packs else self._shape(linears, kind)
        if value is None and self.packs != (part == "in_proj"):
            return  # what torch has there
        if value is None or expected is None or value.shape != expected:
            found = None if value is None else tuple(value.shape)
            raise ValueError(f"{name} = {found}: must be {expected and tuple(expected)} here")
        if len(linears) == 1:
            linears[0].weight = value
            return
        for linear, rows in zip(linears, value.detach().chunk(3), strict=True):
            setattr(linear, kind, nn.Parameter(rows, requires_grad=value.requires_grad))
            if linear.bias is not None and linear.bias.dtype != linear.weight.dtype:
                bias = linear.bias.detach().to(linear.weight.dtype)
                linear.bias = nn.Parameter(bias, requires_grad=linear.bias.requires_grad)

    def _shape(self, linears: list[nn.Linear], kind: str) -> tuple[int, ...]:
        rows, *rest = linears[0].weight.shape
        return (rows * len(linears), *(rest if kind == "weight" else ()))

    def _scripted_bias(self) -> Tensor | None:
        q, k, v = self.q_proj.bias, self.k_proj.bias, self.v_proj.bias
        return None if q is None or k is None or v is None else torch.cat([q, k, v])

    def _some_in_bias(self) -> Tensor | None:
        bias: Tensor | None = held(self._linears()[0], "bias")  # without packing the three
        return bias

    def _linears(self) -> list[Any]:
        return [self._modules[part] for part in self.PARTS]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        keep_vars = kwargs.get("keep_vars", args[2] if len(args) > 2 else False)
        weights = {f"{part}_weight": state.pop(f"{prefix}{part}.weight") for part in self.PARTS}
        for part in self.PARTS:
            state.pop(f"{prefix}{part}.bias", None)
        packed = {"in_proj_weight": self.in_proj_weight, "in_proj_bias": self.in_proj_bias}
        # In the memory of the parameters, as torch's: averaging of weights writes into it.
        held = {key: value if keep_vars else value.detach() for key, value in packed.items() if value is not None}
        ours = held if self.packs else weights | held
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


class Third:
    """`q_proj_weight` and so on of the packed form: rows of the packed weight; with kdim or vdim, a parameter.

    It has no `__set__`, so what pruning or weight norm puts in the parameter's place stands before it.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.index = name, "qkv".index(name[0])

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        packed = module.in_proj_weight
        return module._parameters[self.name] if packed is None else packed.chunk(3)[self.index]


class EagerMultiheadAttentionWithInProj(DropInAttention):
    """nn.MultiheadAttention with torch's own parameters: one packed in-projection; three weights with kdim or vdim."""

    if TYPE_CHECKING:
        in_proj_weight: Tensor | None
        in_proj_bias: Tensor | None
    q_proj_weight = Third()
    k_proj_weight = Third()
    v_proj_weight = Third()

    def _make_projections(self, bias: bool, place: dict[str, Any]) -> None:
        E = self.embed_dim
        shapes: dict[str, tuple[int, ...] | None] = {"in_proj_weight": (3 * E, E) if self.packs else None}
        if not self.packs:
            shapes |= {"q_proj_weight": (E, E), "k_proj_weight": (E, self.kdim), "v_proj_weight": (E, self.vdim)}
        shapes["in_proj_bias"] = (3 * E,) if bias else None
        for name, shape in shapes.items():  # not by register_parameter, which stops at Third
            self._parameters[name] = None if shape is None else nn.Parameter(torch.empty(shape, **place))

    def _in_weights(self) -> list[Tensor]:
        packed = self.in_proj_weight
        thirds: list[Tensor] = (
            [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight] if packed is None else list(packed.chunk(3))
        )
        return thirds

    def _scripted_bias(self) -> Tensor | None:
        return self.in_proj_bias

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = held(self, "in_proj_weight"), held(self, "in_proj_bias")
        if weight is not None and bias is not None and bias.dtype != weight.dtype:
            bias = bias.to(weight.dtype)  # torch adds it, whatever it is
        if query is key and key is value and weight is not None:
            B, L, _ = query.shape
            packed = F.linear(query, weight, bias).view(B, L, 3, self.num_heads, self.head_dim)
            q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
            return q, k, v
        w_q, w_k, w_v = self._in_weights()
        b_q, b_k, b_v = (None, None, None) if bias is None else bias.chunk(3)
        by_head = self._by_head
        return by_head(F.linear(query, w_q, b_q)), by_head(F.linear(key, w_k, b_k)), by_head(F.linear(value, w_v, b_v))
