"""What a kernel is for. Inside it must be right; outside it must refuse: reject or correct, never wrong.

Declared at the function (`@harness.kernel(dtypes=["bfloat16"])`), as arguments (`Domain.of(dtypes=["bfloat16"])`) or
in a file beside the kernel's (`domain_file`). No torch: a domain crosses between processes as JSON.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from harness.case import DTYPES
from harness.errors import BadInput
from harness.kernels.layouts import layout_names
from harness.registry import nearest

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE = "__harness_domain__"  # where a function carries its own
PLAIN = "bhld"  # SDPA's own layout, which takes no packing
MASK_KINDS = ("none", "bool", "float", "causal")


class BadDomain(BadInput):
    """A limit that cannot be declared; the message names key, value and rule."""

    def __init__(self, key: str, value: Any, rule: str) -> None:
        super().__init__(f"{key} = {value!r}: {rule}")
        self.key, self.value, self.rule = key, value, rule


@dataclass(frozen=True)
class CallFacts:
    """What of a call decides whether it lies within a domain. Sizes are SDPA's: q (B, H, L, D), v (B, H_kv, S, D_v)."""

    dtype: str
    B: int
    H: int
    H_kv: int
    L: int
    S: int
    D: int
    D_v: int
    mask: str = "none"  # none, bool or float
    is_causal: bool = False
    dropout: bool = False
    other_scale: bool = False  # given, and not D ** -0.5
    gradients: bool = False  # asked for, of whatever input
    mask_gradients: bool = False
    second_derivatives: bool = False
    compiled: bool = False

    @property
    def mask_kinds(self) -> tuple[str, ...]:
        """All of which a kernel must know: a mask and `is_causal` may come together."""
        kinds = (*(() if self.mask == "none" else (self.mask,)), *(("causal",) if self.is_causal else ()))
        return kinds or ("none",)


@dataclass(frozen=True)
class Domain:
    """None: no limit of that kind. Lists become tuples; what is none of the known limits raises BadDomain."""

    layout: str = PLAIN  # what the function's own arguments look like: one of `kernels.layouts`
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None  # D, and with it D_v
    max_keys: int | None = None
    decode_only: bool = False  # one query, L = 1
    square: bool = False  # as many queries as keys, L = S
    masks: tuple[str, ...] | None = None  # of MASK_KINDS
    gqa: bool = True  # fewer key heads than query heads
    other_value_dim: bool = True  # D_v other than D
    scale: bool = True  # other than D ** -0.5
    dropout: bool = True
    gradients: bool = True
    mask_gradients: bool = True
    second_derivatives: bool = True
    compile: bool = True

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))

    @classmethod
    def of(cls, **limits: Any) -> "Domain":
        """From arguments; an unknown one is named together with the known ones."""
        known = [field.name for field in fields(cls)]
        for key, value in limits.items():
            if key not in known:
                raise BadDomain(key, value, f"unknown limit{nearest(key, known)} (known: {', '.join(known)})")
        return cls(**limits)

    @property
    def limits(self) -> dict[str, Any]:
        """Those that differ from no limit at all, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def as_json(self) -> dict[str, Any]:
        """Plain data: what JSON gives back makes the same domain."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self.limits.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Domain":
        return cls.of(**data)

    def narrowed(self, **limits: Any) -> "Domain":
        """What lies within this domain and within `limits`, too."""
        other = Domain.of(**limits)
        return Domain.of(
            **self.limits | {key: _both(key, getattr(self, key), value) for key, value in other.limits.items()}
        )

    def refusal(self, call: CallFacts) -> str | None:
        """Why the call lies outside, in words; None if it lies inside."""
        return next((said for is_outside, said in self._limits_on(call) if is_outside), None)

    def _limits_on(self, call: CallFacts) -> tuple[tuple[bool, str], ...]:
        strange = [] if self.masks is None else [kind for kind in call.mask_kinds if kind not in self.masks]
        dims = [] if self.head_dims is None else [d for d in (call.D, call.D_v) if d not in self.head_dims]
        return (
            (self.dtypes is not None and call.dtype not in self.dtypes, f"dtype {call.dtype}, {_only(self.dtypes)}"),
            (bool(dims), f"head dim {dims[0] if dims else ''}, {_only(self.head_dims)}"),
            (self.max_keys is not None and self.max_keys < call.S, f"{call.S} keys, at most {self.max_keys}"),
            (self.decode_only and call.L != 1, f"{call.L} queries, only one (decode only)"),
            (self.square and call.L != call.S, f"{call.L} queries over {call.S} keys, only as many as keys"),
            (bool(strange), f"mask {strange[0] if strange else ''}, {_only(self.masks)}"),
            (not self.gqa and call.H_kv != call.H, f"{call.H} query heads over {call.H_kv} key heads, no GQA"),
            (not self.other_value_dim and call.D_v != call.D, f"values of {call.D_v} channels, only as many as keys"),
            (not self.scale and call.other_scale, "a scale of its own, only D ** -0.5"),
            (not self.dropout and call.dropout, "dropout"),
            (not self.gradients and call.gradients, "gradients"),
            (not self.mask_gradients and call.mask_gradients, "a gradient of the mask"),
            (not self.second_derivatives and call.second_derivatives, "second derivatives"),
            (not self.compile and call.compiled, "torch.compile"),
        )


def _only(known: tuple[Any, ...] | None) -> str:
    return f"only {', '.join(map(str, known or ()))}"


def _both(key: str, mine: Any, theirs: Any) -> Any:
    if mine is None or key == "layout":
        return theirs
    if isinstance(mine, tuple):
        common = tuple(value for value in mine if value in theirs)
        if not common:
            raise BadDomain(key, list(mine), f"nothing of it is left within {list(theirs)}")
        return common
    return theirs if isinstance(mine, bool) else min(mine, theirs)  # of a flag only what differs from no limit is here


Check = Callable[[str, Any], Any]


def _flag(key: str, value: Any) -> bool:
    if type(value) is not bool:
        raise BadDomain(key, value, "must be true or false")
    return value


def _whole(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:  # True is no number
        raise BadDomain(key, value, "must be a positive whole number")
    return value


def _one_of(kind: str, known: Collection[str]) -> Check:
    def check(key: str, value: Any) -> str:
        if type(value) is not str or value not in known:
            hint = nearest(value, known) if isinstance(value, str) else ""
            raise BadDomain(key, value, f"unknown {kind}{hint} (known: {', '.join(known)})")
        return value

    return check


def _some(check: Check) -> Check:
    """A list, a tuple or one value alone; None: no limit."""

    def check_all(key: str, value: Any) -> tuple[Any, ...] | None:
        if value is None:
            return None
        values = tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)
        if not values:
            raise BadDomain(key, value, "must not be an empty list")
        return tuple(dict.fromkeys(check(key, one) for one in values))

    return check_all


def _optional(check: Check) -> Check:
    return lambda key, value: None if value is None else check(key, value)


_CHECKS: dict[str, Check] = {field.name: _flag for field in fields(Domain) if field.type is bool} | {
    "layout": _one_of("layout", layout_names()),
    "dtypes": _some(_one_of("dtype", DTYPES)),
    "head_dims": _some(_whole),
    "max_keys": _optional(_whole),
    "masks": _some(_one_of("mask", MASK_KINDS)),
}


EVERYTHING = Domain()


def kernel(**limits: Any) -> Callable[[F], F]:
    """A decorator that declares what a kernel is for: `@harness.kernel(dtypes=["bfloat16"], dropout=False)`."""
    domain = Domain.of(**limits)

    def declare(function: F) -> F:
        setattr(function, ATTRIBUTE, domain)
        return function

    return declare


def domain_of(function: Callable[..., Any]) -> Domain:
    """The declared one, or one without limits."""
    return cast(Domain, getattr(function, ATTRIBUTE, EVERYTHING))
