"""What a mask says, by its kind: bool (True = attends) or float (added to the scores)."""

import torch
from torch import Tensor

from harness.battery.axes import BOOL_MASKS, Point

INF = float("inf")


def mask_size(point: Point) -> tuple[int, ...]:
    """Of the mask before its strides: `(B,1,L,S)` in numbers."""
    sizes = {"B": point.B, "H": point.H, "L": point.L, "S": point.S, "1": 1}
    return tuple(sizes[letter] for letter in point["mask_shape"].strip("()").split(","))


def make_mask(point: Point, dtype: torch.dtype, generator: torch.Generator) -> Tensor | None:
    """Of the point's kind and shape, contiguous."""
    if not point.has_mask:
        return None
    size = mask_size(point)
    shape = (1,) * (4 - len(size)) + size
    kind = point["mask"]
    made = _bool(kind, shape, point, generator) if kind in BOOL_MASKS else _float(kind, shape, point, dtype, generator)
    return made.expand(shape).contiguous().view(size)


def _places(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The indices b, h, i, j of every element, ready to be broadcast."""
    b, h, i, j = (torch.arange(size) for size in shape)
    return b[:, None, None, None], h[:, None, None], i[:, None], j


def _bool(kind: str, shape: tuple[int, ...], point: Point, generator: torch.Generator) -> Tensor:
    b, h, i, j = _places(shape)
    L, S = point.L, point.S
    if kind in ("bool", "causal and bool"):
        seen = torch.rand(shape, generator=generator) < 0.6
        seen[..., 0] |= ~seen.any(-1)  # a query that sees nothing is a kind of its own
        return seen
    lengths = torch.randint(1, S + 1, (shape[0], 1, 1, 1), generator=generator)  # of each batch entry
    lengths[0] = S if shape[0] > 1 else lengths[0]
    if kind == "left padding":
        return (j >= S - lengths) & (h >= 0) & (i >= 0)
    if kind == "right padding":
        return (j < lengths) & (h >= 0) & (i >= 0)
    if kind == "band":  # a window around the diagonal, as long sequences are attended; aligned lower-right
        width = int(torch.randint(1, max(2, S // 2), (), generator=generator))
        distance = i + (S - L) - j
        seen = (distance >= 0) & (distance < width + b + h)
        return seen | (~seen.any(-1, keepdim=True) & (j == 0))
    if kind == "packed":  # several sequences in one: each sees itself alone
        parts = int(torch.randint(2, 5, (), generator=generator))
        return (i * parts // max(L, 1) == j * parts // S) | ((j == 0) & (h + b >= 0))
    if kind == "dead rows":
        seen = torch.rand(shape, generator=generator) < 0.6
        return seen & ((i + b + h) % 3 != 1 % max(L, 1))
    assert kind == "dead entries"
    seen = torch.rand(shape, generator=generator) < 0.7
    return seen & (b != shape[0] - 1)


def _float(kind: str, shape: tuple[int, ...], point: Point, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    b, h, i, j = _places(shape)
    if kind in ("float", "causal and float"):
        return noise.to(dtype)
    if kind == "alibi":
        return (-(2.0 ** -(1.0 + h % 8)) * (i + point.S - point.L - j).abs().double()).expand(shape).to(dtype)
    if kind == "+100":  # a constant beyond what exp can take
        return (noise + 100).to(dtype)
    chosen = torch.rand(shape, generator=generator) < 0.4
    chosen[..., 0] &= ~chosen.all(-1)
    if kind in ("-inf rows", "finfo.min rows"):
        chosen |= (i + b + h) % 3 == 1 % max(point.L, 1)
    low = {"-1e4": -1e4, "-65504": -65504.0, "-inf": -INF, "-inf rows": -INF}.get(kind, torch.finfo(dtype).min)
    return torch.where(chosen, low, noise).to(dtype)
