"""A decode step of a whole GQA layer over a cache allocated in advance, and the cache's own share of it."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.kernel_study import counts
from bench.kernel_study.cell import Cell, Golden, Point, Sides, Work
from harness.cell.build import randomise
from harness.kernels.front import find_kernel
from harness.kernels.names import kernel_names
from harness.variants.cache import KVCache
from harness.variants.gqa import GroupedQueryAttention

LENGTHS = (2048, 4096, 8192, 16384, 32768)
KERNELS, CACHE = ("sdpa", "eager", "grouped"), "cache append"


def step_points() -> Iterator[Point]:
    for S in LENGTHS:
        yield Point(Cell("step", 1, S, 32, 8, 64, required=True), build_step, counts.grouped_step, (*KERNELS, CACHE))


def build_step(cell: Cell) -> Sides:
    generator = cell.generator()
    E, before = cell.heads * cell.head_dim, cell.keys - 1
    module = GroupedQueryAttention(E, cell.heads, cell.kv_heads, dtype=cell.torch_dtype).eval()
    randomise(module, generator)
    shape = (cell.batch, cell.kv_heads, before, cell.head_dim)
    held = tuple(torch.randn(shape, generator=generator).to(cell.torch_dtype) for _ in range(2))
    x = torch.randn(cell.batch, 1, E, generator=generator).to(cell.torch_dtype)
    calls: dict[str, Callable[[], Tensor]] = {}
    absent: dict[str, str] = {}
    for name in KERNELS:
        if name in kernel_names():
            calls[name] = _step(module, x, held, name)
        else:
            absent[name] = f"there is no kernel {name!r}"
    calls[CACHE] = _append(held)
    work = counts.grouped_step(cell)
    moved = 4 * cell.batch * cell.kv_heads * cell.head_dim * counts.ITEM[cell.dtype]  # k and v, read and written
    works = {name: Work(0, moved) if name == CACHE else work for name in calls}

    def golden() -> Golden:
        exact = copy.deepcopy(module).double()
        return Golden(_step(exact, x.double(), tuple(t.double() for t in held), "eager")())

    return Sides(calls, "sdpa", golden, works, absent, frozenset({CACHE}))


def _step(module: GroupedQueryAttention, x: Tensor, held: tuple[Tensor, ...], kernel: str) -> Callable[[], Tensor]:
    own = copy.copy(module)  # shares the weights
    own.kernel = find_kernel(kernel)
    cache = _filled(held)

    def step() -> Tensor:
        cache.crop(held[0].shape[2])
        out: Tensor = own(x, causal=True, cache=cache)
        return out

    return step


def _append(held: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    """One token into the cache and nothing else: if this grew with S, the cache would be copied."""
    cache, token = _filled(held), tuple(t[:, :, :1].clone() for t in held)

    def append() -> Tensor:
        cache.crop(held[0].shape[2])
        return cache.append(*token)[0]

    return append


def _filled(held: tuple[Tensor, ...]) -> KVCache:
    cache = KVCache(held[0].shape[2] + 1)
    cache.append(*held)
    return cache
