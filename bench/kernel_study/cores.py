"""Prefill and decode of the bare core: our kernels, SDPA, the textbook lines and transformers' own functions."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernel_study import counts
from bench.kernel_study.cell import Cell, Golden, Point, Sides
from bench.kernel_study.textbook import textbook
from harness.kernels.front import attention
from harness.kernels.names import kernel_names

PREFILL_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
DECODE_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
HEADS = ((8, 8), (32, 8), (32, 1))
HEAD_DIMS, BATCHES, DTYPES = (64, 128), (1, 8), ("float32", "bfloat16")
OURS = {"prefill": ("eager", "tiled"), "decode": ("eager", "grouped")}
COMPILING = ("flex", "compiled")  # each shape costs a compilation: only where asked for, at a few points
COMPILED_AT = (512, 2048)
RIVALS = ("transformers", "transformers_sdpa")
GOLDEN_ROWS = 16
ALL_SCORES = frozenset({"textbook", "eager", "transformers"})  # these hold every score of the call at once


def prefill_points(*, quick: bool, memory_cap: int, all_kernels: bool) -> Iterator[Point]:
    """The targets' cells first; beside one base size, each other axis in turn."""
    targets = [
        *(Cell("prefill", L, L, causal=c, required=True) for L, c in product((512, 1024, 2048, 4096), (False, True))),
        *(Cell("prefill", 512, 512, 32, 8, causal=c, required=True) for c in (False, True)),
        Cell("prefill", 1024, 1024, head_dim=128, causal=True, required=True),
        Cell("prefill", 512, 512, batch=8, required=True),
    ]
    rest = [] if quick else [
        Cell("prefill", L, L, H, H_kv, D, B, dtype, causal)
        for L, (H, H_kv), D, B, dtype, causal in product(
            PREFILL_LENGTHS, HEADS, HEAD_DIMS, BATCHES, DTYPES, (False, True)
        )
    ]  # fmt: skip
    for cell in _once([*targets, *rest]):
        yield _point(cell, quick=quick, memory_cap=memory_cap, compiling=all_kernels and _is_compiled(cell))


def decode_points(*, quick: bool, memory_cap: int, all_kernels: bool) -> Iterator[Point]:
    targets = [
        Cell("decode", 1, S, H, H_kv, required=True)
        for S, (H, H_kv) in product((2048, 4096, 8192, 16384), ((32, 8), (32, 1)))
    ]
    rest = [] if quick else [
        Cell("decode", 1, S, H, H_kv, D, B, dtype)
        for S, (H, H_kv), D, B, dtype in product(DECODE_LENGTHS, HEADS, HEAD_DIMS, BATCHES, DTYPES)
    ]  # fmt: skip
    for cell in _once([*targets, *rest]):
        yield _point(
            cell, quick=quick, memory_cap=memory_cap, compiling=all_kernels and cell.required and cell.keys == 4096
        )


def _point(cell: Cell, *, quick: bool, memory_cap: int, compiling: bool) -> Point:
    names = (*OURS[cell.study][1 if quick else 0 :], *(COMPILING if compiling else ()))
    build = partial(build_core, names=names, rivals=not quick, memory_cap=memory_cap)
    return Point(cell, build, counts.core, ("sdpa", "textbook", *names, *(() if quick else RIVALS)))


def build_core(cell: Cell, *, names: Sequence[str], rivals: bool, memory_cap: int) -> Sides:
    """`names` are our kernels; with `rivals` also transformers' eager and SDPA functions."""
    generator = cell.generator()
    q, k, v = (
        torch.randn(cell.batch, heads, length, cell.head_dim, generator=generator).to(cell.torch_dtype)
        for heads, length in ((cell.heads, cell.queries), (cell.kv_heads, cell.keys), (cell.kv_heads, cell.keys))
    )
    visible = _causal_mask(cell)
    calls: dict[str, Callable[[], Tensor]] = {
        "sdpa": lambda: F.scaled_dot_product_attention(
            q, k, v, is_causal=cell.causal, enable_gqa=cell.heads != cell.kv_heads
        ),
        "textbook": lambda: textbook(q, k, v, visible),
    }
    absent: dict[str, str] = {}
    for name in names:
        if name in kernel_names():
            calls[name] = partial(attention, q, k, v, causal=cell.causal, kernel=name)
        else:
            absent[name] = f"there is no kernel {name!r}"
    if rivals:
        calls |= _of_transformers(cell, q, k, v, visible)
    needed = counts.full_scores_bytes(cell)
    if needed > memory_cap:
        for name in ALL_SCORES & set(calls):
            absent[name] = f"would need {needed / 2**30:.1f} GiB"
            del calls[name]
    work = counts.core(cell)
    golden = partial(golden_core, cell, q, k, v)
    return Sides(calls, "sdpa", golden, dict.fromkeys(calls, work), absent)


def golden_core(cell: Cell, q: Tensor, k: Tensor, v: Tensor) -> Golden:
    """The plain formula in float64 for some rows of the first and the last batch: all of it would not fit."""
    L, S = cell.queries, cell.keys
    rows = torch.unique(torch.linspace(0, L - 1, min(L, GOLDEN_ROWS)).round().long())
    batches = sorted({0, cell.batch - 1})
    allowed = torch.arange(S) <= rows[:, None] + (S - L) if cell.causal else None
    parts = []
    for b in batches:
        for h in range(cell.heads):  # one kv head at a time, so that float64 copies stay small
            key, value = (t[b, h // (cell.heads // cell.kv_heads)].double() for t in (k, v))
            scores = q[b, h, rows].double() @ key.mT * cell.head_dim**-0.5  # (rows, S)
            if allowed is not None:
                scores = scores.masked_fill(~allowed, float("-inf"))
            parts.append(scores.softmax(-1) @ value)
    value = torch.stack(parts).unflatten(0, (len(batches), cell.heads))
    return Golden(value, lambda out: out[batches][:, :, rows])


def _of_transformers(
    cell: Cell, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None
) -> dict[str, Callable[[], Tensor]]:
    """As its models call them: eager with a float mask, SDPA with the flag. Both give (B, L, H, D)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.llama.modeling_llama import eager_attention_forward

    groups = cell.heads // cell.kv_heads
    module = SimpleNamespace(num_key_value_groups=groups, training=False, is_causal=cell.causal)
    added = None
    if visible is not None:
        added = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)[None, None]
    scale = cell.head_dim**-0.5
    return {
        "transformers": lambda: eager_attention_forward(module, q, k, v, added, scale)[0].transpose(1, 2),
        "transformers_sdpa": lambda: sdpa_attention_forward(module, q, k, v, None, scaling=scale)[0].transpose(1, 2),
    }


def _causal_mask(cell: Cell) -> Tensor | None:
    """Made outside of the timed call, as models make it once for all layers."""
    if not cell.causal:
        return None
    return torch.ones(cell.queries, cell.keys, dtype=torch.bool).tril(cell.keys - cell.queries)


def _once(cells: Sequence[Cell]) -> list[Cell]:
    """By sizes, the first of each: a target's cell is also one of the grid."""
    return list({cell.label: cell for cell in reversed(cells)}.values())[::-1]


def _is_compiled(cell: Cell) -> bool:
    return cell.required and cell.queries in COMPILED_AT and (cell.heads, cell.head_dim, cell.batch) == (8, 64, 1)
