"""What fits: bytes of the KV cache and of the weights against a budget. Exact integers throughout.

The first half reads amounts as people write them: 24GiB, 128k, 1M, 8e9.
"""

import argparse
import re
from dataclasses import dataclass

from harness.advise.candidates import Candidate, Model, own_attention_params
from harness.case import ITEM_BYTES

BYTES = {"": 1, "b": 1} | {
    f"{prefix}{kind}".lower(): base**power
    for power, prefix in enumerate("KMGT", start=1)
    for kind, base in (("iB", 1024), ("B", 1000))
}
NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+]?[0-9]+)?)\s*([a-zA-Z]*)\s*"


def memory_size(text: str) -> int:
    """GiB counts by 1024, GB by 1000, a bare number is bytes."""
    amount = _scaled(text, BYTES, "must be an amount of memory, as in 24GiB, 80GB or 8e9")
    if amount < 2**20 and text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be more than a few bytes; is {text.strip()}GiB meant?")
    return amount


def tokens(text: str) -> int:
    units = {"": 1, "k": 1024, "m": 1024**2}
    return _scaled(text, units, "must be a positive number of tokens, as in 32768, 32k or 1M")


def parameters(text: str) -> int:
    units = {"": 1, "k": 1000, "m": 10**6, "b": 10**9, "t": 10**12}
    return _scaled(text, units, "must be a number of parameters, as in 8030261248, 8e9 or 8B")


def _scaled(text: str, units: dict[str, int], rule: str) -> int:
    match = re.fullmatch(NUMBER, text)
    amount = 0
    if match and match[2].lower() in units and len(match[1]) < 40:
        number = match[1]
        # Digits stay exact: a float would round large counts.
        whole = int(number) if number.isdecimal() else float(number)
        amount = int(whole * units[match[2].lower()]) if whole < 1e30 else 0
    if amount < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: {rule}")
    return amount


@dataclass(frozen=True, slots=True)
class Requirement:
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


def footprint(candidate: Candidate, demand: Requirement) -> Footprint:
    per_token = candidate.bytes_per_token_layer * demand.model.layers
    weights = weight_bytes(candidate, demand)
    free = max(0, demand.memory - (weights or 0))
    a_sequence = per_token * demand.kept(demand.context)
    longest, window = free // (demand.batch * per_token), demand.model.window
    return Footprint(
        bytes_per_token=per_token,
        cache_bytes=demand.batch * a_sequence,
        weight_bytes=weights,
        memory=demand.memory,
        largest_context=None if window is not None and longest >= window else longest,
        largest_batch=free // a_sequence,
    )


def weight_bytes(candidate: Candidate, demand: Requirement) -> int | None:
    """Of the whole model with this attention in place of its own."""
    model = demand.model
    if model.params is None:
        return None
    more = candidate.attention_params - own_attention_params(model) if model.existing else 0
    return (model.params + model.layers * more) * ITEM_BYTES[demand.dtype]
