"""Which modules can become what: the registry of converters, and what each of them is asked and gives."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from harness.errors import BadInput
from harness.kernels.call import Counter, Kernel
from harness.swaps.weights import WeightSource

DROP_IN = "drop-in"  # same signature as the replaced module: what `swap(model)` makes
VARIANT = "variant"  # one of harness.variants, with their signature and their caches: what the grid judges


class SwapError(BadInput):
    """A swap that cannot be done, or that did not carry its weights over."""


@dataclass(frozen=True)
class Request:
    """What a swap was asked for, as converters and adapters see it."""

    to: str  # what modules become: DROP_IN, VARIANT, or a conversion such as "gqa"
    size: int | None  # the number in "gqa-2" or "mla-64"
    kernel: Kernel
    options: Mapping[str, Any]
    wants: Callable[[str, nn.Module], bool]
    keeps_kernel: bool = False  # a conversion for which no kernel was named: each module keeps its own

    def counter(self, old: nn.Module | None = None) -> Counter:
        """Each replaced module counts its own calls."""
        own = getattr(old, "kernel", None)
        return Counter(own if self.keeps_kernel and isinstance(own, Kernel) else self.kernel)


@dataclass(frozen=True)
class Conversion:
    """A new module, and where each parameter comes from that it does not share with the old one.

    `error`: of an inexact conversion, how far its weights are from the old ones' (relative, Frobenius); None = exact.
    """

    module: nn.Module
    weights: Mapping[str, WeightSource]
    derived: frozenset[str] = frozenset()  # parameters the converter computed itself
    error: float | None = None
    # For undo, where derived parameters can be cut back: the old module's parameter -> its rows in the new one's.
    back: Mapping[str, WeightSource] = field(default_factory=dict)


Converter = Callable[[Any, Kernel, Request], Conversion]
CONVERTERS: dict[tuple[str, type[nn.Module]], Converter] = {}
OPTIONS: dict[Converter, tuple[str, ...]] = {}  # which of `swap`'s options each converter heeds


def converts(*kinds: type[nn.Module], to: str, options: tuple[str, ...] = ()) -> Callable[[Converter], Converter]:
    def register(convert: Converter) -> Converter:
        for kind in kinds:
            if (to, kind) in CONVERTERS:
                raise ValueError(f"two converters of {kind.__name__} to {to}")
            CONVERTERS[to, kind] = convert
        OPTIONS[convert] = options
        return convert

    return register


def converter_of(name: str, module: nn.Module, request: Request) -> Converter | None:
    kind = type(module)
    if parametrize.is_parametrized(module):
        kind = kind.__bases__[0]  # a class made for this instance; its own is beneath
    known = {known: convert for (to, known), convert in CONVERTERS.items() if to == request.to}
    convert = known.get(kind)
    if convert is None and not isinstance(module, tuple(known)):
        return None
    if not request.wants(name, module):
        return None
    if convert is None:
        parent = next(known.__name__ for known in known if isinstance(module, known))
        # A subclass may compute something else: replacing it by its parent's counterpart would be a silent change.
        raise SwapError(f"{name or 'the model'} is {kind.__name__}, an unknown subclass of {parent}")
    return convert


def is_convertible(module: nn.Module, to: str) -> bool:
    """Whether there is a converter of its kind, or of one above it."""
    return isinstance(module, tuple(known for target, known in CONVERTERS if target == to))


Places = Mapping[nn.Module, list[str]]  # every module of a model, with all its full names


def places_of(name: str, model: nn.Module) -> Places:
    places: dict[nn.Module, list[str]] = {}
    for place, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(".".join(part for part in (name, place) if part))
    return places


def unreached(
    places: Places, reached: Collection[nn.Module], request: Request, model_class: type[nn.Module]
) -> dict[str, nn.Module]:
    """What a library calls an attention, was asked for, and is neither reached nor around nor inside what is."""
    known = [place for module in reached for place in places[module]]
    found = {}
    for module, names in places.items():
        if "Attention" not in type(module).__name__ or module in reached or isinstance(module, model_class):
            continue
        around = any(place.startswith(f"{name}.") for name in names for place in known)
        inside = any(name.startswith(f"{place}.") for name in names for place in known)
        if not around and not inside and any(request.wants(name, module) for name in names):
            found[names[0]] = module
    return found


def convert_child(name: str, child: nn.Module, convert: Converter, kernel: Kernel, request: Request) -> Conversion:
    """For a converter that replaces a module whole: its attention must be exactly the one it knows."""
    if converter_of(name, child, request) is not convert:
        raise SwapError(f"{name} is {type(child).__name__}: cannot be swapped inside its parent")
    return convert(child, kernel, request)
