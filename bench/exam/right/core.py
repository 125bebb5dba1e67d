"""The registry, the normalised call that the kernels compute, and the care all of them share.

A kernel is written as a function of one ``Call`` and registered with ``@right(...)``, which turns it into a function
with the signature of ``scaled_dot_product_attention``.  The shared part does what is no matter of rounding: autocast,
validation, ranks, empty sizes, and non-finite inputs (a row that attends nothing non-finite never sees any of it).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

INF = math.inf
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Kernel:
    """A registered kernel with the facts about what it supports."""

    name: str
    function: Callable[..., Tensor]
    gradients: bool
    double_backward: bool
    dropout: bool
    compile: bool
    note: str = ""
    mask_gradients: bool = True


KERNELS: list[Kernel] = []


def cut(t: Tensor, dim: int, span: tuple[int, int]) -> Tensor:
    """The slice ``span`` of ``t`` along ``dim``, or ``t`` itself where that dimension is broadcast."""
    return t if t.shape[dim] == 1 else t.narrow(dim, span[0], span[1] - span[0])


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: finite 4-D tensors, masks of rank 4 (broadcast dimensions left at 1, the float one wide)."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    keep: Tensor | None
    causal: bool
    scale: float
    dropout_p: float

    @property
    def rows(self) -> int:
        """The number of queries, L."""
        return self.q.shape[-2]

    @property
    def keys(self) -> int:
        """The number of keys, S."""
        return self.k.shape[-2]

    @property
    def reach(self) -> int:
        """The number of leading keys that some row may attend (min(L, S) where causal)."""
        return min(self.rows, self.keys) if self.causal else self.keys

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1] if self.k.shape[1] else 1

    @property
    def wide(self) -> torch.dtype:
        """The dtype of scores and sums: float64 for float64 inputs, float32 for all others."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def heads(self) -> tuple[Tensor, Tensor]:
        """Keys and values with every key head repeated for its group."""
        if self.groups == 1:
            return self.k, self.v
        return self.k.repeat_interleave(self.groups, 1), self.v.repeat_interleave(self.groups, 1)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values with all heads, in the wide dtype."""
        q, k, v = self.q.to(self.wide), self.k.to(self.wide), self.v.to(self.wide)
        if self.groups > 1:
            k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        return q, k, v

    def widened(self) -> Call:
        """The call with wide inputs, so that gradients of parts of it are summed before they are rounded."""
        return replace(self, q=self.q.to(self.wide), k=self.k.to(self.wide), v=self.v.to(self.wide))

    def allowed(self, rows: tuple[int, int] | None = None, cols: tuple[int, int] | None = None) -> Tensor | None:
        """The boolean mask and causality of a block, True where a row attends a key; None if all do."""
        rows, cols = rows or (0, self.rows), cols or (0, self.keys)
        ok = None if self.keep is None else cut(cut(self.keep, -2, rows), -1, cols)
        if self.causal:
            i = torch.arange(rows[0], rows[1], device=self.q.device)
            j = torch.arange(cols[0], cols[1], device=self.q.device)
            past = j <= i[:, None]
            ok = past[None, None] if ok is None else ok & past
        return ok

    def added(self, rows: tuple[int, int] | None = None, cols: tuple[int, int] | None = None) -> Tensor | None:
        """The float mask of a block in the wide dtype; None if there is none."""
        if self.bias is None:
            return None
        return cut(cut(self.bias, -2, rows or (0, self.rows)), -1, cols or (0, self.keys)).to(self.wide)

    def masked(self, s: Tensor, rows: tuple[int, int] | None = None, cols: tuple[int, int] | None = None) -> Tensor:
        """Scaled scores of a block with all masks applied: -inf exactly where a row does not attend."""
        bias, ok = self.added(rows, cols), self.allowed(rows, cols)
        if bias is not None:
            s = (s + bias.to(s.dtype)).masked_fill(bias == -INF, -INF)
        return s if ok is None else s.masked_fill(~ok, -INF)

    def attended(self) -> Tensor | None:
        """Where rows attend, by all masks together (broadcastable to B, H, L, S); None if all do."""
        ok = self.allowed()
        if self.bias is None:
            return ok
        open_ = self.bias.detach() != -INF
        return open_ if ok is None else ok & open_

    def merged(self) -> Tensor | None:
        """All masks as one added float mask of shape (B, H, L, S); None if there are none."""
        if self.bias is None and self.keep is None and not self.causal:
            return None
        shape = (self.q.shape[0], self.q.shape[1], self.rows, self.keys)
        return self.masked(torch.zeros(shape, dtype=self.wide, device=self.q.device))

    def drop(self, p: Tensor) -> Tensor:
        """Weights after dropout (kept ones times 1 / (1 - p))."""
        return F.dropout(p, self.dropout_p) if self.dropout_p > 0 else p

    def kept(self) -> Tensor | None:
        """A freshly drawn dropout factor for every weight (0 or 1 / (1 - p)); None without dropout."""
        if self.dropout_p == 0:
            return None
        shape = (self.q.shape[0], self.q.shape[1], self.rows, self.keys)
        return F.dropout(torch.ones(shape, dtype=self.wide, device=self.q.device), self.dropout_p)

    def part(self, batch: tuple[int, int], head: tuple[int, int]) -> Call:
        """The call of some batch entries and query heads (within one group, or whole groups)."""
        group = (head[0] // self.groups, (head[1] - 1) // self.groups + 1)

        def query(t: Tensor) -> Tensor:
            return cut(cut(t, 0, batch), 1, head)

        def key(t: Tensor) -> Tensor:
            return cut(cut(t, 0, batch), 1, group)

        bias = None if self.bias is None else query(self.bias)
        keep = None if self.keep is None else query(self.keep)
        return replace(self, q=query(self.q), k=key(self.k), v=key(self.v), bias=bias, keep=keep)

    def out(self, o: Tensor) -> Tensor:
        """The output in the dtype of the inputs."""
        return o.to(self.q.dtype)


def peak(s: Tensor) -> Tensor:
    """The maximum of every row, 0 for dead rows (a constant: softmax does not depend on it)."""
    m = s.detach().amax(-1, keepdim=True)
    return torch.where(m == -INF, torch.zeros_like(m), m)


def alive(total: Tensor) -> Tensor:
    """A row sum made safe to divide by or take the logarithm of: 1 for dead rows."""
    return torch.where(total == 0, torch.ones_like(total), total)


def softmax(s: Tensor) -> Tensor:
    """Softmax over the keys with dead rows all 0."""
    e = torch.exp(s - peak(s))
    return e / alive(e.sum(-1, keepdim=True))


def tiles(size: int, tile: int) -> list[tuple[int, int]]:
    """The spans that cover ``range(size)`` in steps of ``tile``."""
    return [(i, min(i + tile, size)) for i in range(0, size, tile)]


def _empty(call: Call) -> Tensor:
    """The result for a call with an empty size, connected to its inputs."""
    q, k, v = call.inputs()
    return call.out(call.masked(q @ k.mT) @ v)


def _zeroed(t: Tensor) -> Tensor:
    """A tensor with its non-finite elements replaced by 0."""
    return torch.where(torch.isfinite(t), t, torch.zeros_like(t))


def _dense(call: Call, rows: Tensor | None) -> Tensor:
    """The definition with care for non-finite values: only what a row attends counts, forward and backward.

    ``rows`` selects the rows to compute; the others give 0.  Non-finite scores and products are added as constants to
    those of the finite elements, so that they reach the results and gradients of the rows that attend them, no others.
    """
    q, k, v = call.inputs()
    raw = (q.detach() @ k.detach().mT) * call.scale
    odd = torch.where(torch.isfinite(raw), torch.zeros_like(raw), raw)
    attended = call.attended()
    attended = torch.ones_like(raw, dtype=torch.bool) if attended is None else attended.expand_as(raw)
    if rows is not None:
        attended = attended & rows
    s = call.masked(_zeroed(q) @ _zeroed(k).mT * call.scale + odd)
    p = call.drop(softmax(torch.where(attended, s, torch.full_like(s, -INF))))
    weight = p.detach()
    positive, void = (weight > 0).to(v.dtype), (attended & (weight == 0)).to(v.dtype)
    nan = attended.to(v.dtype) @ torch.isnan(v).to(v.dtype) + void @ torch.isinf(v).to(v.dtype) > 0
    above, below = positive @ (v == INF).to(v.dtype) > 0, positive @ (v == -INF).to(v.dtype) > 0
    out = p @ _zeroed(v)
    factor = torch.where(above, INF, 0.0) + torch.where(below, -INF, 0.0) + torch.where(nan, math.nan, 0.0)
    return out + p.sum(-1, keepdim=True) * factor.to(out.dtype)


def _guarded(core: Callable[[Call], Tensor], call: Call) -> Tensor:
    """The kernel's result, with the rows that attend non-finite inputs computed by the definition."""
    fine_q, fine_k, fine_v = torch.isfinite(call.q), torch.isfinite(call.k), torch.isfinite(call.v)
    bias = call.bias
    odd_bias = None if bias is None else torch.isnan(bias) | (bias == INF)
    if not torch.compiler.is_compiling() and call.q.device.type != "meta":
        fine = fine_q.all() & fine_k.all() & fine_v.all()
        if odd_bias is not None:
            fine = fine & ~odd_bias.any()
        if bool(fine):
            return core(call)
    if bias is not None and odd_bias is not None:
        bias = torch.where(odd_bias, torch.zeros_like(bias), bias)
    clean = replace(call, q=_zeroed(call.q), k=_zeroed(call.k), v=_zeroed(call.v), bias=bias)
    odd = ~(fine_k.all(-1) & fine_v.all(-1)).repeat_interleave(call.groups, 1)[:, :, None, :]
    odd = odd | ~fine_q.all(-1, keepdim=True)
    if odd_bias is not None:
        odd = odd | odd_bias
    attended = call.attended()
    if attended is not None:
        odd = odd & attended
    dirty = odd.any(-1, keepdim=True)
    return torch.where(dirty, _dense(call, dirty).to(call.q.dtype), core(clean))


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """What autocast does with an argument of the operation."""
    return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t


def _four(t: Tensor) -> Tensor:
    """A tensor with leading dimensions of size 1 up to rank 4."""
    return t[(None,) * (4 - t.dim())]


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Call:
    """The validated and normalised call."""
    if not (q.dtype == k.dtype == v.dtype) or not q.is_floating_point():
        raise RuntimeError(f"q, k and v need one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if min(q.dim(), k.dim(), v.dim()) < 2:
        raise RuntimeError("q, k and v need at least 2 dimensions")
    if max(q.dim(), k.dim(), v.dim()) > 4:
        raise NotImplementedError("more than 4 dimensions")
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    q, k, v = _four(q), _four(k), _four(v)
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise RuntimeError(f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    batch = torch.broadcast_shapes(q.shape[:1], k.shape[:1], v.shape[:1])
    if enable_gqa:
        if k.shape[1] != v.shape[1] or (q.shape[1] and (not k.shape[1] or q.shape[1] % k.shape[1])):
            raise RuntimeError(f"query heads {q.shape[1]} are no multiple of key and value heads {k.shape[1]}")
        q, k, v = (t.expand(*batch, *t.shape[1:]) for t in (q, k, v))
    else:
        lead = batch + torch.broadcast_shapes(q.shape[1:2], k.shape[1:2], v.shape[1:2])
        q, k, v = (t.expand(*lead, *t.shape[2:]) for t in (q, k, v))
    bias = keep = None
    if attn_mask is not None:
        if attn_mask.dtype not in (torch.bool, torch.float32, q.dtype):
            raise RuntimeError(f"attn_mask must be bool, float32 or {q.dtype}, got {attn_mask.dtype}")
        if attn_mask.dim() > 4:
            raise NotImplementedError("a mask of more than 4 dimensions")
        mask = _four(attn_mask)
        full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        mask.expand(full)  # raises where it does not broadcast
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        keep, bias = (mask, None) if mask.dtype == torch.bool else (None, mask.to(wide))
    factor = (1.0 / math.sqrt(q.shape[-1]) if q.shape[-1] else 1.0) if scale is None else float(scale)
    return Call(q, k, v, bias, keep, bool(is_causal), factor, float(dropout_p))


def right(
    *,
    gradients: bool = True,
    double_backward: bool = True,
    dropout: bool = True,
    compile: bool = True,
    note: str = "",
    mask_gradients: bool = True,
) -> Callable[[Callable[[Call], Tensor]], Callable[..., Tensor]]:
    """Register a kernel with its facts, and give it the signature of ``scaled_dot_product_attention``."""

    def register(core: Callable[[Call], Tensor]) -> Callable[..., Tensor]:
        def kernel(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            if dropout_p > 0 and not dropout:
                raise NotImplementedError(f"{core.__name__} has no dropout")
            if torch.is_grad_enabled():
                if not gradients and any(t is not None and t.requires_grad for t in (q, k, v, attn_mask)):
                    raise NotImplementedError(f"{core.__name__} has no gradients")
                if not mask_gradients and attn_mask is not None and attn_mask.requires_grad:
                    raise NotImplementedError(f"{core.__name__} has no gradient of the mask")
            device = q.device.type
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
                q, k, v = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
                attn_mask = None if attn_mask is None else _cast(attn_mask, dtype)
            with torch.autocast(device, enabled=False):
                rank = max(q.dim(), k.dim(), v.dim())
                call = _call(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
                sizes = (*call.q.shape[:3], call.k.shape[2])
                if 0 in sizes:
                    out = _empty(call)
                elif call.q.shape[-1] == 0 or call.v.shape[-1] == 0:
                    out = call.out(_dense(call, None))
                else:
                    out = _guarded(core, call)
                return out if rank == 4 else out.reshape(out.shape[4 - rank :])

        function = kernel if compile else torch.compiler.disable(kernel)
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(kernel, name, getattr(core, name))
            setattr(function, name, getattr(core, name))
        facts = {"gradients": gradients, "double_backward": double_backward, "dropout": dropout, "compile": compile}
        KERNELS.append(Kernel(core.__name__, function, note=note, mask_gradients=mask_gradients, **facts))
        return function

    return register
