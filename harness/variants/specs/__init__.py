"""What each variant is, as arithmetic: axes, rules, parameters, KV-cache elements, FLOPs. No torch here.

A new variant is one file beside this one that registers a `VariantSpec`; `reference` names its file in
harness/references (imported only when a case is built), and the swap makes the candidate from that module.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.case import Case
from harness.registry import Registry

# Axes that some variants do not have. For those they collapse to one value instead of multiplying the grid.
OPTIONAL_AXES = ("kv_heads", "q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim")
MATMUL = 2  # operations: a multiply and an add
# What a variant's tokens meet in: one softmax of a kernel; a recurrence, which has no kernel; or several softmaxes.
Core = Literal["softmax", "recurrence", "composed"]
NO_KERNEL = "eager"  # stands where a case has its kernel, though a recurrence calls none


class Impossible(ValueError):
    """A combination of axis values that no module can have."""

    def __init__(self, key: str, value: object, rule: str) -> None:
        super().__init__(f"{key} = {value!r}: {rule}")
        self.key, self.value, self.rule = key, value, rule


@dataclass(frozen=True)
class VariantSpec:
    name: str
    title: str
    axes: frozenset[str]  # which OPTIONAL_AXES apply
    phases: tuple[str, ...]
    resolve: Callable[[Mapping[str, Any]], dict[str, Any]]  # raw axis values -> resolved ones, or Impossible
    params: Callable[[Case], int]
    kv_elements_per_token: Callable[[Case], int] | None  # None: the variant keeps no cache
    flops: Callable[[Case], int]
    reference: Callable[[Case], str]  # a file in harness/references
    swap_options: Mapping[str, Any] = field(default_factory=dict)
    state_bytes: Callable[[Case], int] | None = None  # of a cache that is not so much for each token
    core: Core = "softmax"
    masks: tuple[str, ...] | None = None  # which of variants/masks.py it can have; None: all

    @property
    def keeps_cache(self) -> bool:
        return self.kv_elements_per_token is not None or self.state_bytes is not None

    def kv_cache_bytes(self, case: Case) -> int | None:
        """Bytes of the cache after `kv_len` tokens; training keeps none."""
        if not self.keeps_cache or case.phase == "train":
            return None
        if self.state_bytes is not None:
            return self.state_bytes(case)
        assert self.kv_elements_per_token is not None
        return case.batch * case.kv_len * self.kv_elements_per_token(case) * case.item_bytes


VARIANTS: Registry[VariantSpec] = Registry("variant")


def at_least_one(key: str, value: int) -> int:
    if value < 1:
        raise Impossible(key, value, "must be at least 1")
    return int(value)


def resolve_head_dim(raw: Mapping[str, Any]) -> int:
    at_least_one("heads", raw["heads"])
    if raw["head_dim"] is not None:
        return at_least_one("head_dim", raw["head_dim"])
    if raw["embed_dim"] % raw["heads"]:
        rule = f"must divide embed_dim ({raw['embed_dim']}) when head_dim is not given"
        raise Impossible("heads", raw["heads"], rule)
    return int(raw["embed_dim"] // raw["heads"])


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
