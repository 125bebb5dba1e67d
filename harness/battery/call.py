"""A point of the design -> the request: its numbers, mask and strides, drawn from the point's own seed."""

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.battery.axes import NONE, Point
from harness.battery.masks import make_mask
from harness.battery.sampling import sampled_rows
from harness.battery.views import arranged, arranged_mask
from harness.candidate.request import Request
from harness.cell.golden import lost_rows

INCOMING = ("heads last", "steps", "columns")  # strides that the gradient of a result may have, too
GARBAGE_KEY, GARBAGE_VALUE = 300.0, 1000.0  # behind a mask, where no number may matter


@dataclass(frozen=True, eq=False)
class Call:
    """A request, and what the judge knows of it."""

    words: str
    request: Request
    rows: Tensor | None = None  # (n,): the queries that have a golden; None: all
    is_documented: bool = True


def generator_of(*parts: object) -> torch.Generator:
    """Of its own for whatever is named."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def make_call(point: Point, seed: int) -> Call:
    generator = generator_of(seed, point)
    dtype = getattr(torch, point["dtype"])
    q, k, v = _values(point, generator)
    mask = make_mask(point, torch.float32 if point["mask_dtype"] == "float32" else dtype, generator)
    allowed = allowed_of(mask, point.is_causal, point.L, point.S)
    if point["layout"] in ("expanded", "shared heads"):
        k, v = (arranged(t, point["layout"]) for t in (k, v))
    if point["values"] == "garbage":
        k, v = _with_garbage(k, v, allowed)
    tensors = {name: t.to(dtype) for name, t in (("q", q), ("k", k), ("v", v))}
    alike = ("k", "v") if point["layout"] in ("expanded", "shared heads") else ("q", "k", "v")
    placed = {name: arranged(t, point["layout"]) if name in alike else t for name, t in tensors.items()}
    if mask is not None:
        mask = arranged_mask(mask, point["mask_strides"], (point.B, point.H, point.L, point.S))
    drawn = float(torch.rand((), generator=generator))
    scales = {"1": 1.0, "above 1": 1.1 + drawn, "0": 0.0, "negative": -(drawn + 0.3) * point.D**-0.5}
    scale = (2 * drawn + 0.3) * point.D**-0.5 if point["scale"] == "given" else scales.get(point["scale"])
    request = Request(
        q=placed["q"],
        k=placed["k"],
        v=placed["v"],
        mask=mask,
        is_causal=point.is_causal,
        scale=scale,
        mode=point["mode"],
        threads=int(point["threads"]),
        gradients=() if point["gradients"] == NONE else point.gradients,
    )
    rows = sampled_rows(request, allowed, generator)
    if request.gradients:
        cotangent = _cotangent(request, rows, generator)
        if point["layout"] in INCOMING:  # as a model hands it back: a view of what follows attention
            cotangent = arranged(cotangent, point["layout"])
        request = replace(request, cotangent=cotangent)
    return Call(point.words, request, rows, point.is_documented)


def _values(point: Point, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in float32."""
    q = torch.randn(point.B, point.H, point.L, point.D, generator=generator)
    k = torch.randn(point.B, point.H_kv, point.S, point.D, generator=generator)
    v = torch.randn(point.B, point.H_kv, point.S, point.D_v, generator=generator)
    match point["values"]:
        case "peaked":
            q = 6 * q
        case "offset":
            q, k = q + 1, k + 8
        case "tiny":
            q, k, v = 1e-3 * q, 1e-3 * k, 1e-3 * v
        case "wide":
            spread = 10 ** (3 * torch.rand(point.B, point.H_kv, point.S, 1, generator=generator) - 2)
            k, v = k * spread, v * spread
        case "zero q":
            q = torch.zeros_like(q)
        case "zero k":
            k = torch.zeros_like(k)
        case "ties":
            k = k[:, :, :1].expand(k.shape).clone()
        case "large":
            q, k = 8 * q, 4 * k
    return q, k, v


def allowed_of(mask: Tensor | None, is_causal: bool, L: int, S: int) -> Tensor | None:
    """Which keys a query may see, bool, broadcastable to (B, H, L, S); None: all. -inf hides as False does."""
    allowed = None
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else mask != float("-inf")
        allowed = allowed.view((1,) * (4 - allowed.ndim) + allowed.shape)
    if is_causal:
        below = torch.ones(L, S, dtype=torch.bool).tril()[None, None]
        allowed = below if allowed is None else allowed & below
    return allowed


def _with_garbage(k: Tensor, v: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys that no query of their batch entry sees become large."""
    if allowed is None:
        return k, v
    hidden = ~allowed.any(dim=1).any(dim=1)  # (B or 1, S)
    hidden = hidden.expand(k.shape[0], k.shape[2])[:, None, :, None]
    return torch.where(hidden, GARBAGE_KEY, k), torch.where(hidden, GARBAGE_VALUE, v)


def _cotangent(request: Request, rows: Tensor | None, generator: torch.Generator) -> Tensor:
    """Of the output; where rows are sampled it lives on those alone, so that gradients are theirs."""
    shape = (*request.q.shape[:3], request.v.shape[3])
    drawn = torch.randn(shape, generator=generator)
    if rows is not None:
        kept = torch.zeros(shape[2], 1)
        kept[rows] = 1
        drawn = drawn * kept
    if (lost := lost_rows(request)) is not None:
        drawn = drawn.masked_fill(lost[..., None], 0.0)
    return drawn.to(request.q.dtype)
