"""What a decode step of one layer does, as products that each read something once. No torch, no machine."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.advise.candidates import Candidate
from harness.case import ITEM_BYTES, Case


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number of seconds and what its samples spread over."""

    value: float
    lo: float
    hi: float

    def __add__(self, other: "Figure") -> "Figure":
        """Errors add up instead of averaging out: what slows one part of a call slows the others too."""
        return Figure(self.value + other.value, self.lo + other.lo, self.hi + other.hi)

    def times(self, factor: float) -> "Figure":
        return Figure(self.value * factor, self.lo * factor, self.hi * factor)

    def wider(self, share: float) -> "Figure":
        """By so much of the value on either side."""
        return Figure(self.value, max(0.0, self.lo - share * self.value), self.hi + share * self.value)

    @property
    def error(self) -> float:
        """The longer side of the bar, as a share of the value."""
        return max(self.hi - self.value, self.value - self.lo) / self.value


def figure(seconds: Sequence[float]) -> Figure:
    """The lower quartile, between the fastest sample and the median: others on the machine only ever add time."""
    quartile, median, _ = statistics.quantiles(seconds, n=4, method="inclusive")
    return Figure(quartile, min(seconds), median)


@dataclass(frozen=True, slots=True)
class StepPart:
    """A few rows times much data, or the code around it.

    overhead    a whole step that has next to nothing to do
    linear      `batch` tokens times a weight matrix, from `width` to `value` channels
    to_latent   the same with a small matrix for each of `heads`
    from_latent and back
    attention   `rows` queries for each of `heads` key/value heads of each sequence, over `keys` cached tokens, keys of
                `width` and values of `value` channels
    """

    kind: str
    batch: int
    width: int
    value: int
    dtype: str
    heads: int = 1
    rows: int = 1
    keys: int = 0
    latent: bool = False  # values are the first channels of the keys

    @property
    def bytes(self) -> int:
        """Held: what is read, each byte counted once."""
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def elements(self) -> int:
        if self.kind == "overhead":
            return 0
        if self.kind != "attention":
            return self.heads * self.width * self.value
        return self.batch * self.heads * self.keys * (self.width + (0 if self.latent else self.value))


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """`working_set`: all bytes that are read between two uses of the same one."""

    parts: tuple[StepPart, ...]
    working_set: int


def decode_step(candidate: Candidate, *, batch: int, keys: int, layers: int = 1) -> DecodeStep:
    """`batch` sequences, one new token each, over `keys` cached tokens; each of the layers has data of its own."""
    case = replace(candidate.case, batch=batch, seq_len=keys)
    parts = _latent(case) if case.kv_lora_rank is not None else _grouped(case)
    overhead = StepPart("overhead", 1, 1, 1, case.dtype, latent=case.kv_lora_rank is not None)
    return DecodeStep((overhead, *parts), layers * sum(part.bytes for part in parts))


def _grouped(case: Case) -> tuple[StepPart, ...]:
    E, H, H_kv, D = case.embed_dim, case.heads, case.kv_heads, case.head_dim
    assert H_kv is not None
    cached = StepPart("attention", case.batch, D, D, case.dtype, heads=H_kv, rows=H // H_kv, keys=case.kv_len)
    to_keys = _linear(case, E, H_kv * D)
    return (_linear(case, E, H * D), to_keys, to_keys, cached, _linear(case, H * D, E))


def _latent(case: Case) -> tuple[StepPart, ...]:
    B, E, H, N = case.batch, case.embed_dim, case.heads, case.head_dim
    r, R, V, rank = case.kv_lora_rank, case.rope_head_dim, case.v_head_dim, case.q_lora_rank
    assert r is not None and R is not None and V is not None
    queries = H * (N + R)
    to_queries = [(E, queries)] if rank is None else [(E, rank), (rank, queries)]
    return (
        *(_linear(case, width, value) for width, value in to_queries),
        _linear(case, E, r + R),
        StepPart("to_latent", B, N, r, case.dtype, heads=H),
        StepPart("attention", B, r + R, r, case.dtype, rows=H, keys=case.kv_len, latent=True),
        StepPart("from_latent", B, r, V, case.dtype, heads=H),
        _linear(case, H * V, E),
    )


def _linear(case: Case, width: int, value: int) -> StepPart:
    return StepPart("linear", case.batch, width, value, case.dtype)
