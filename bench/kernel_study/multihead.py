"""Whole modules: nn.MultiheadAttention as users run it (eval, no_grad, fast path on) beside our drop-ins."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from bench.kernel_study import counts
from bench.kernel_study.cell import Cell, Golden, Point, Sides
from harness.cell.build import randomise
from harness.variants.dropin import EagerMultiheadAttention, EagerMultiheadAttentionWithInProj

WEIGHTS, NO_WEIGHTS = "weights", "no weights"
KINDS = {"split": EagerMultiheadAttention, "packed": EagerMultiheadAttentionWithInProj}
TARGET_SIZES = ((1, 64, 512), (1, 512, 512), (8, 128, 512), (1, 32, 128), (1, 128, 1024))  # B, L, E
SIZES = tuple(product((1, 8), (32, 128, 512, 1024), (128, 512, 1024)))


def multihead_points(*, quick: bool) -> Iterator[Point]:
    sizes = dict.fromkeys([*TARGET_SIZES, *([] if quick else SIZES)])
    for (batch, length, width), note in product(sizes, (WEIGHTS, NO_WEIGHTS)):
        heads = max(1, width // 64)
        required = (batch, length, width) in TARGET_SIZES
        cell = Cell("mha", length, length, heads, heads, width // heads, batch, note=note, required=required)
        yield Point(cell, build_multihead, counts.multihead, ("torch_mha", *KINDS))


def build_multihead(cell: Cell) -> Sides:
    generator = cell.generator()
    E = cell.heads * cell.head_dim
    theirs = nn.MultiheadAttention(E, cell.heads, batch_first=True, dtype=cell.torch_dtype).eval()
    randomise(theirs, generator)
    x = torch.randn(cell.batch, cell.queries, E, generator=generator).to(cell.torch_dtype)
    modules: dict[str, nn.Module] = {"torch_mha": theirs}
    for name, kind in KINDS.items():
        modules[name] = kind(E, cell.heads, batch_first=True, dtype=cell.torch_dtype).eval()
        modules[name].load_state_dict(theirs.state_dict())
    need_weights = cell.note == WEIGHTS
    calls = {name: _call(module, x, need_weights) for name, module in modules.items()}
    return Sides(calls, "torch_mha", partial(_golden, theirs, x), dict.fromkeys(calls, counts.multihead(cell)))


def _call(module: nn.Module, x: Tensor, need_weights: bool) -> Callable[[], Tensor]:
    def call() -> Tensor:
        out: Tensor = module(x, x, x, need_weights=need_weights)[0]
        return out

    return call


def _golden(module: nn.Module, x: Tensor) -> Golden:
    return Golden(_call(copy.deepcopy(module).double(), x.double(), False)())
