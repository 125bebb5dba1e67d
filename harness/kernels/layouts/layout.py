"""What a layout is, and a kernel with a layout of its own as a function with SDPA's signature."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from harness.kernels.call import ContractBroken, Unsupported
from harness.kernels.domain import ATTRIBUTE, PLAIN, Domain, domain_of
from harness.kernels.layouts import find_layout


@dataclass(frozen=True, eq=False)
class SdpaCall:
    """The arguments of one SDPA call: q (B, H, L, D), k (B, H_kv, S, D), v (B, H_kv, S, D_v)."""

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None = None  # bool (True = attends) or float, broadcastable to (B, H, L, S)
    dropout_p: float = 0.0
    is_causal: bool = False  # aligned top-left
    scale: float | None = None
    enable_gqa: bool = False


class Prepared(NamedTuple):
    """The kernel's own arguments, and what `restore` has to know to put its result back in SDPA's shape."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: tuple[int, ...]  # that its result must have
    memo: Any = None


@dataclass(frozen=True)
class Layout:
    """`prepare(call)` packs, outside any clock; `restore(result, memo)` gives (B, H, L, D_v)."""

    name: str
    prepare: Callable[[SdpaCall], Prepared]
    restore: Callable[[Any, Any], Tensor]
    about: str  # the signature that such a kernel has
    limits: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of a Domain: what it can express at all

    def refuse(self, why: str) -> Unsupported:
        return Unsupported(f"layout {self.name} cannot express {why}")


class Adapted:
    """A kernel of any layout with SDPA's signature. Its domain is what it declares and its layout can express."""

    def __init__(self, function: Callable[..., Any], layout: Layout, domain: Domain) -> None:
        self.function, self.layout = function, layout
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        setattr(self, ATTRIBUTE, domain.narrowed(**layout.limits))

    def around(self, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> "Adapted":
        """The same with the kernel itself changed, and the packing as it is: who compiles or times means it alone."""
        return Adapted(change(self.function), self.layout, domain_of(self))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        own = self.layout.prepare(SdpaCall(query, key, value, *args, **options))
        result = self.function(*own.args, **own.kwargs)
        # Told here: in another shape it might be taken for what it is not.
        if not isinstance(result, Tensor):
            raise ContractBroken(f"kernel returned {type(result).__name__} instead of a tensor")
        if result.shape != own.shape:
            raise ContractBroken(f"kernel returned {tuple(result.shape)} instead of {own.shape}")
        return self.layout.restore(result, own.memo)


def adapt(function: Callable[..., Any], domain: Domain | None = None) -> Callable[..., Any]:
    """With SDPA's signature, whatever its layout; `domain` is given where the function itself does not declare it."""
    if isinstance(function, Adapted) or (domain is None and domain_of(function).layout == PLAIN):
        return function
    domain = domain_of(function) if domain is None else domain
    return Adapted(function, find_layout(domain.layout), domain)
