"""The calls that a machine is measured with: the products that a decode step is made of, at sizes that take no time."""

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.advise.work import Figure, StepPart, figure
from harness.kernels.front import attention
from harness.variants.gqa import GroupedQueryAttention
from harness.variants.mla import MultiHeadLatentAttention

KERNEL = "grouped"  # reads keys and values once, where they lie
PIECE_BYTES = 32 * 2**20  # a call's data at most; larger parts take as much longer
LEAST_BYTES = 2**20
FEW_ROWS = 16  # more take time in proportion, and the less data then
COLUMNS = 1024  # of the matrix that is read between calls
LEAST_KEYS = 16  # of a head: fewer would make another product of it
SMALLEST: dict[str, Any] = dict.fromkeys(("batch", "heads", "rows", "width", "value", "keys"), 1)
BUDGET_S, LEAST, MOST = 0.1, 7, 60  # for each probe: seconds, and samples

Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)
Layer = GroupedQueryAttention | MultiHeadLatentAttention


@dataclass(frozen=True, slots=True)
class TimedCall:
    """Seconds of `call` right after `before`, less those of `empty`, times `scale`."""

    before: Call
    call: Call
    empty: Call | None = None
    scale: float = 1.0


def take(probes: Mapping[Name, TimedCall]) -> dict[Name, Figure]:
    """One sample of each in turn, again and again: a machine's speed drifts within seconds, and so for all alike."""
    calls: dict[Name, list[float]] = {name: [] for name in probes}
    empties: dict[Name, list[float]] = {name: [] for name in probes}
    deadline = time.perf_counter() + len(probes) * BUDGET_S
    for turn in range(MOST + 1):
        if turn > LEAST and time.perf_counter() >= deadline:
            break
        for name, probe in probes.items():
            probe.before()
            calls[name].append(_seconds(probe.call))
            empties[name].append(_seconds(probe.empty) if probe.empty else 0.0)
    # The first turn warms up.
    return {name: _figure(calls[name][1:], empties[name][1:]).times(probe.scale) for name, probe in probes.items()}


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _figure(calls: list[float], empties: list[float]) -> Figure:
    # Noise could make nothing seem to last as long as something: a tenth is left in any case.
    overhead = min(figure(empties).value, 0.9 * min(calls))
    return figure([one - overhead for one in calls])


def reading(size: int) -> TimedCall:
    """Seconds per byte of a product with one row, which does as good as nothing but read its matrix."""
    read = _reader(size)
    return TimedCall(read, read, scale=1 / size)


def probe_of(part: StepPart, span: int) -> TimedCall:
    """Where just as much else was read since its own data was as makes `span` bytes together.

    So each sample begins with a call that is not timed: since the last sample other probes have had their turns.
    """
    if part.kind == "overhead":
        step, read = _idle_step(part.dtype, latent=part.latent), _reader(span)
        return TimedCall(lambda: (step(), read()), step)
    piece = cut(part)
    call, others, nothing = call_of(piece), _reader(span - piece.bytes), call_of(replace(piece, **SMALLEST))
    # Code that has left the processor's cache counts in the overhead of a step, so here it is fetched before.
    return TimedCall(lambda: (call(), others(), nothing()), call, nothing, part.bytes / piece.bytes)


def _idle_step(dtype: str, *, latent: bool) -> Call:
    kind = getattr(torch, dtype)
    layer: Layer = GroupedQueryAttention(8, 2, 1, kernel=KERNEL, dtype=kind)
    if latent:
        layer = MultiHeadLatentAttention(
            8, 2, kv_lora_rank=4, nope_head_dim=4, rope_head_dim=2, v_head_dim=4, mode="absorbed", kernel=KERNEL,
            dtype=kind,
        )  # fmt: skip
    return decode_step(layer, batch=1, keys=2)


def cut(part: StepPart) -> StepPart:
    """The same with less data, if it has more than a probe has time for."""
    rows = part.batch if part.kind != "attention" else part.rows
    room = max(LEAST_BYTES, PIECE_BYTES * FEW_ROWS // max(rows, FEW_ROWS))
    if part.kind == "linear":
        return _shrunk(part, "value", room)
    if part.kind != "attention":
        return _shrunk(part, "heads", room)
    return _shrunk(_shrunk(_shrunk(part, "keys", room, least=LEAST_KEYS), "batch", room), "heads", room)


def _shrunk(part: StepPart, axis: str, room: int, *, least: int = 1) -> StepPart:
    count: int = getattr(part, axis)
    fitting = room * count // part.bytes
    fewer: dict[str, Any] = {axis: min(count, max(least, fitting))}
    return part if fitting >= count else replace(part, **fewer)


def call_of(part: StepPart) -> Call:
    """The product as a layer calls it, on data of its own."""
    B, H, N, V = part.batch, part.heads, part.width, part.value

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=getattr(torch, part.dtype))

    if part.kind == "linear":
        tokens, weight = ones(B, 1, N), ones(V, N)
        return lambda: F.linear(tokens, weight)
    if part.kind == "attention":
        q, k = ones(B, H * part.rows, 1, N), ones(B, H, part.keys, N)
        v = k[..., :V] if part.latent else ones(B, H, part.keys, V)
        return lambda: attention(q, k, v, kernel=KERNEL)
    heads = ones(B, H, 1, N)
    if part.kind == "to_latent":
        up = ones(H, N, V)
        return lambda: torch.einsum("bhln,hnr->bhlr", heads, up)
    down = ones(H, V, N)
    return lambda: torch.einsum("bhlr,hvr->bhlv", heads, down)


def _reader(size: int) -> Call:
    matrix, row = torch.ones(max(1, size // 4 // COLUMNS), COLUMNS), torch.ones(1, COLUMNS)
    return lambda: F.linear(row, matrix)


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
