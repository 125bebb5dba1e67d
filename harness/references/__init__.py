"""What candidates are judged against: torch's own modules, or modules around F.scaled_dot_product_attention.

Nothing here imports harness's kernels, variants or caches: a reference that shared code with the candidate would
share its bugs. The float64 golden of a reference is its own copy in double precision.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from harness.case import Case
from harness.variants.specs import VARIANTS


def reference_of(case: Case) -> "Reference":
    module = importlib.import_module(f"{__name__}.{VARIANTS[case.variant].reference(case)}")
    found: Reference = module.REFERENCE
    return found


class RunReference(Protocol):
    """`cache` is whatever the reference's `new_cache` made; `view` is what its `view` made of the mask."""

    def __call__(
        self, module: nn.Module, x: Tensor, view: Mapping[str, Any], cache: Any, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]: ...


class RunRows(Protocol):
    """(B, S, E) to the outputs of some queries, (B, n, E): keys and values of all tokens, scores of these alone."""

    def __call__(self, module: nn.Module, x: Tensor, rows: Tensor, view: Mapping[str, Any]) -> Tensor: ...


class Streams(Protocol):
    """What tokens leave in a cache, each (B, heads, S, width)."""

    def __call__(self, module: nn.Module, x: Tensor) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Reference:
    name: str
    build: Callable[[Case], nn.Module]
    # (case, dense mask in SDPA's convention or None, whether it is plain causal with L == S) -> the mask as it takes it
    view: Callable[[Case, Tensor | None, bool], Mapping[str, Any]]
    run: RunReference
    new_cache: Callable[[int], Any] | None = None
    gives_weights: bool = False
    # A copy that takes SDPA's other way, where the module's own lacks the rounding of a flash kernel's backward pass
    other_backend: Callable[[nn.Module], nn.Module] | None = None
    # Without these a cell cannot be judged by some of its rows, or by single steps, however large it is.
    run_rows: RunRows | None = None
    streams: Streams | None = None
    # A cache that holds these streams
    cache_of: Callable[[nn.Module, tuple[Tensor, ...]], Any] | None = None
