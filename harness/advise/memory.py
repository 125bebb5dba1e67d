"""What fits: bytes of the KV cache and of the weights against a budget. Exact integers throughout."""

from dataclasses import dataclass

from harness.advise.candidates import Candidate, candidates
from harness.advise.models import Model
from harness.case import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a model."""

    model: Model
    context: int
    batch: int
    dtype: str
    memory: int

    def kept(self, tokens: int) -> int:
        """Tokens that the cache holds after so many: a sliding window forgets the older ones."""
        return tokens if self.model.window is None else min(tokens, self.model.window)


@dataclass(frozen=True, slots=True)
class Footprint:
    """`weight_bytes` is None where the model's parameter count is not known; what fits then counts the cache alone.

    `largest_context` is None where any length fits, because a window caps the cache.
    """

    bytes_per_token: int
    cache_bytes: int
    weight_bytes: int | None
    memory: int
    largest_context: int | None
    largest_batch: int

    @property
    def needed(self) -> int:
        return self.cache_bytes + (self.weight_bytes or 0)

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory

    @property
    def cache_share(self) -> float:
        return self.cache_bytes / self.memory

    @property
    def whole_share(self) -> float | None:
        return None if self.weight_bytes is None else self.needed / self.memory


def footprint(candidate: Candidate, demand: Demand) -> Footprint:
    per_token = candidate.bytes_per_token_layer * demand.model.layers
    weights = weight_bytes(candidate, demand)
    free = max(0, demand.memory - (weights or 0))
    a_sequence = per_token * demand.kept(demand.context)
    return Footprint(
        bytes_per_token=per_token,
        cache_bytes=demand.batch * a_sequence,
        weight_bytes=weights,
        memory=demand.memory,
        largest_context=_largest_context(free // (demand.batch * per_token), demand),
        largest_batch=free // a_sequence,
    )


def weight_bytes(candidate: Candidate, demand: Demand) -> int | None:
    """Of the whole model with this attention in place of its own."""
    model = demand.model
    if model.params is None:
        return None
    params = model.params
    own = next((other for other in candidates(model, demand.dtype) if other.own), None)
    if own is not None:
        params += model.layers * (candidate.attention_params - own.attention_params)
    return params * ITEM_BYTES[demand.dtype]


def _largest_context(tokens: int, demand: Demand) -> int | None:
    window = demand.model.window
    return None if window is not None and tokens >= window else tokens
