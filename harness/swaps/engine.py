"""Walk a model, replace what a converter knows, carry the weights over and compare them."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import BadInput
from harness.kernels.front import AnyKernel


class SwapError(BadInput):
    """A swap that cannot be done, or that did not carry its weights over."""


@dataclass(frozen=True)
class WeightSource:
    """Where a new parameter comes from: one of the old module's, whole or some of its rows."""

    name: str
    rows: tuple[int, int] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


@dataclass(frozen=True)
class Conversion:
    """A new module, its weights still to be loaded, and the source of each of its parameters."""

    module: nn.Module
    weights: Mapping[str, WeightSource]


@dataclass(frozen=True)
class SwappedModule:
    name: str  # full name in the model; "" is the model itself
    was: str
    became: str
    params_before: int
    params_after: int
    weights: Mapping[str, WeightSource]  # full new parameter name -> full old parameter name


@dataclass(frozen=True)
class SwapReport:
    swapped: tuple[SwappedModule, ...]

    def sources(self) -> dict[str, WeightSource]:
        """Every replaced parameter of the new model and where it stands in the old one."""
        return {name: source for module in self.swapped for name, source in module.weights.items()}


Converter = Callable[[Any, Mapping[str, Any]], Conversion]
CONVERTERS: dict[type[nn.Module], Converter] = {}
OPTIONS: dict[Converter, tuple[str, ...]] = {}  # which of `swap`'s options each converter heeds


def converts(*kinds: type[nn.Module], options: tuple[str, ...] = ()) -> Callable[[Converter], Converter]:
    def register(convert: Converter) -> Converter:
        for kind in kinds:
            if kind in CONVERTERS:
                raise ValueError(f"two converters for {kind.__name__}")
            CONVERTERS[kind] = convert
        OPTIONS[convert] = options
        return convert

    return register


def swap(
    model: nn.Module, to: str = "eager", *, kernel: AnyKernel | None = None, **options: Any
) -> tuple[nn.Module, SwapReport]:
    """A copy of `model` with every known attention replaced by ours, running `kernel` (default: the one named `to`)."""
    if kernel is None:
        kernel = to
    model = copy.deepcopy(model)
    done: dict[int, nn.Module] = {}  # old module -> its replacement: aliases get the same one
    rows: list[SwappedModule] = []
    heeded: set[str] = set()
    places: list[str] = []  # where a module was replaced whole, aliases included
    # The list is fixed before anything is replaced, and holds shared modules once per place.
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if any(place == "" or name.startswith(f"{place}.") for place in places):
            continue  # went with its parent
        convert = converter_of(name, module)
        if convert is None:
            continue
        if id(module) not in done:
            done[id(module)], row = _replace(name, module, convert, {"kernel": kernel, **options})
            rows.append(row)
            heeded |= {*OPTIONS[convert]}
        places.append(name)
        if name == "":
            model = done[id(module)]
        else:
            model.set_submodule(name, done[id(module)])
    if not rows:
        known = ", ".join(sorted(kind.__name__ for kind in CONVERTERS))
        raise SwapError(f"nothing to swap in {type(model).__name__}; known: {known}")
    if ignored := options.keys() - heeded:
        known = ", ".join(sorted(heeded)) or "none"
        raise SwapError(f"options no swapped module heeds: {', '.join(sorted(ignored))}; known here: {known}")
    return model, SwapReport(tuple(rows))


def converter_of(name: str, module: nn.Module) -> Converter | None:
    convert = CONVERTERS.get(type(module))
    if convert is None and isinstance(module, tuple(CONVERTERS)):
        known = next(kind.__name__ for kind in CONVERTERS if isinstance(module, kind))
        # A subclass may compute something else: replacing it by its parent's counterpart would be a silent change.
        raise SwapError(f"{name or 'the model'} is {type(module).__name__}, an unknown subclass of {known}")
    return convert


def convert_child(name: str, child: nn.Module, convert: Converter, options: Mapping[str, Any]) -> Conversion:
    """For a converter that replaces a module whole: its attention must be exactly the one it knows."""
    if converter_of(name, child) is not convert:
        raise SwapError(f"{name} is {type(child).__name__}: cannot be swapped inside its parent")
    return convert(child, options)


def _replace(
    name: str, old: nn.Module, convert: Converter, options: Mapping[str, Any]
) -> tuple[nn.Module, SwappedModule]:
    conversion = convert(old, options)
    new = conversion.module
    prefix = f"{name}." if name else ""
    # Two names of one tied parameter are two sources.
    old_parameters = dict(old.named_parameters(remove_duplicate=False))
    new_parameters = dict(new.named_parameters())
    if missing := new_parameters.keys() ^ conversion.weights.keys():
        raise SwapError(f"{name or 'the model'}: parameters without a source: {', '.join(sorted(missing))}")
    if lost := old_parameters.keys() - {source.name for source in conversion.weights.values()}:
        raise SwapError(f"{name or 'the model'}: parameters that nothing takes over: {', '.join(sorted(lost))}")
    with torch.no_grad():
        for key, source in conversion.weights.items():
            origin = old_parameters[source.name]
            new_parameters[key].copy_(source.of(origin))
            new_parameters[key].requires_grad_(origin.requires_grad)
    for key, source in conversion.weights.items():
        if not _same_bits(new_parameters[key], source.of(old_parameters[source.name])):
            raise SwapError(f"{prefix}{key} differs from its source {prefix}{source.name} after the swap")
    new.train(old.training)
    row = SwappedModule(
        name=name,
        was=type(old).__name__,
        became=type(new).__name__,
        params_before=sum(p.numel() for p in old.parameters()),
        params_after=sum(p.numel() for p in new.parameters()),
        weights={prefix + key: WeightSource(prefix + s.name, s.rows) for key, s in conversion.weights.items()},
    )
    return new, row


def _same_bits(new: Tensor, old: Tensor) -> bool:
    """NaN included, -0.0 apart from 0.0; tensors on the meta device have no bits."""
    if new.shape != old.shape or new.dtype != old.dtype:
        return False
    if new.is_meta and old.is_meta:
        return True
    return torch.equal(*(t.detach().flatten().view(torch.uint8) for t in (new, old)))
