"""The calls that a machine is measured with: the products that a decode step is made of, at sizes that take no time."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.advise.figure import Figure, figure
from harness.advise.work import Shape
from harness.kernels.front import attention
from harness.timing import interleave
from harness.variants.gqa import GroupedQueryAttention
from harness.variants.mla import MultiHeadLatentAttention

KERNEL = "grouped"  # reads keys and values once, where they lie
PIECE_BYTES = 16 * 2**20  # a call's data at most; larger amounts are several of it in turn
MANY = 256  # calls in turn at most
COLUMNS = 1024  # of a weight matrix
LEAST_KEYS, MOST_KEYS = 16, 2**16  # of a head: few rows, or many, would make other products of it
BUDGET_S, BLOCKS, MAX_BLOCKS = 0.06, 7, 40

Call = Callable[[], object]
Layer = GroupedQueryAttention | MultiHeadLatentAttention


def reading(size: int) -> Figure:
    """Seconds per byte of a product with one row, which does as good as nothing but read its matrix."""
    matrix, row = torch.ones(size // 4 // COLUMNS, COLUMNS), torch.ones(1, COLUMNS)
    return _timed(lambda: F.linear(row, matrix)).times(1 / size)


def pace(shape: Shape, dtype: str, size: int) -> Figure:
    """Seconds per byte of this shape without the overhead of the call, over `size` bytes again and again."""
    make, kind = MAKERS[shape.kind], getattr(torch, dtype)
    made = [make(shape, kind, min(size, PIECE_BYTES))]
    # A shape may have less data than that: as many as it takes.
    made += [make(shape, kind, min(size, PIECE_BYTES)) for _ in range(min(MANY, size // made[0][1]) - 1)]
    empty, _ = make(shape, kind, 0)
    turns = itertools.cycle([call for call, _ in made])
    samples = interleave(
        {"call": lambda: next(turns)(), "empty": empty}, budget_s=BUDGET_S, min_blocks=BLOCKS, max_blocks=MAX_BLOCKS,
        seed=0,
    )  # fmt: skip
    # Noise could make nothing seem to last as long as something: a tenth is left in any case.
    overhead = min(figure(samples["empty"]).value, 0.9 * min(samples["call"]))
    return figure([one - overhead for one in samples["call"]]).times(1 / made[0][1])


def _linear(shape: Shape, dtype: torch.dtype, size: int) -> tuple[Call, int]:
    rows = torch.ones(shape.rows, COLUMNS, dtype=dtype)
    matrix = torch.ones(max(1, size // dtype.itemsize // COLUMNS), COLUMNS, dtype=dtype)
    return lambda: F.linear(rows, matrix), matrix.nbytes


def _per_head(shape: Shape, dtype: torch.dtype, size: int) -> tuple[Call, int]:
    heads = max(1, min(shape.heads, size // (shape.width * shape.value * dtype.itemsize)))
    width, value = (shape.width, shape.value) if size else (1, 1)
    rows = torch.ones(shape.rows, heads, 1, width, dtype=dtype)
    matrices = torch.ones(heads, width, value, dtype=dtype)
    return lambda: torch.einsum("bhln,hnr->bhlr", rows, matrices), matrices.nbytes


def _attention(shape: Shape, dtype: torch.dtype, size: int) -> tuple[Call, int]:
    channels = shape.width if shape.latent else shape.width + shape.value
    heads = max(1, min(shape.heads, PIECE_BYTES // (LEAST_KEYS * channels * dtype.itemsize)))
    keys = max(1, min(MOST_KEYS, size // (heads * channels * dtype.itemsize)))
    # The heads of all sequences stand in one: a product does not care whose they are.
    q = torch.ones(1, heads * shape.rows, 1, shape.width, dtype=dtype)
    k = torch.ones(1, heads, keys, shape.width, dtype=dtype)
    v = k[..., : shape.value] if shape.latent else torch.ones(1, heads, keys, shape.value, dtype=dtype)
    return lambda: attention(q, k, v, kernel=KERNEL), heads * keys * channels * dtype.itemsize


MAKERS = {"linear": _linear, "per_head": _per_head, "attention": _attention}


def overhead(dtype: str, *, latent: bool) -> Figure:
    """Seconds of a decode step that has next to nothing to do."""
    kind = getattr(torch, dtype)
    layer: Layer = GroupedQueryAttention(8, 2, 1, kernel=KERNEL, dtype=kind)
    if latent:
        layer = MultiHeadLatentAttention(
            8, 2, kv_lora_rank=4, nope_head_dim=4, rope_head_dim=2, v_head_dim=4, mode="absorbed", kernel=KERNEL,
            dtype=kind,
        )  # fmt: skip
    # In every prediction: it gets more time than the others.
    return _timed(decode_step(layer, batch=1, keys=2), patience=4)


def decode_step(layer: Layer, *, batch: int, keys: int) -> Callable[[], Tensor]:
    """One token over a cache that holds `keys` with it; every call does the same."""
    layer = layer.eval()
    weight = layer.out_proj.weight
    token = torch.randn(batch, 1, weight.shape[0]).to(weight.dtype)
    cache = layer.new_cache(keys)
    layer(token, cache=cache)
    held = [stream.expand(-1, -1, keys - 1, -1) for stream in cache.streams()]
    cache.crop(0)
    cache.append(*(stream.clone() for stream in held))

    def step() -> Tensor:
        cache.crop(keys - 1)
        out: Tensor = layer(token, causal=True, cache=cache)
        return out

    return step


def _timed(call: Call, *, patience: int = 1) -> Figure:
    budget, most = patience * BUDGET_S, patience * MAX_BLOCKS
    samples = interleave({"call": call}, budget_s=budget, min_blocks=BLOCKS, max_blocks=most, seed=0)
    return figure(samples["call"])
