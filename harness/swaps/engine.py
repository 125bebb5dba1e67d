"""Find every attention of a model, make it ours, carry the weights over, compare them, and be able to undo it."""

import copy
import fnmatch
import gc
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from harness.kernels.front import AnyKernel, find_kernel
from harness.swaps.converters import CONVERTERS, DROP_IN, OPTIONS, VARIANT, Converter, Request, SwapError, converter_of
from harness.swaps.report import SwappedModule, SwapReport
from harness.swaps.weights import Twins, WeightSource, carry_weights, inherit, parameter_count, write_back

log = logging.getLogger(__name__)

Only = str | type[nn.Module] | Callable[[str, nn.Module], bool]

# Libraries whose models are adapted whole, through their own extension points: base class -> module with `attach` and
# OPTIONS. Imported only when such a model is met, so the library is there.
ADAPTERS = {
    ("transformers", "PreTrainedModel"): "harness.swaps.transformers_models",
    ("diffusers", "ModelMixin"): "harness.swaps.diffusers_models",
}


def swap(
    model: nn.Module,
    to: str = "eager",
    *,
    kernel: AnyKernel | None = None,
    only: Only | None = None,
    inplace: bool = False,
    **options: Any,
) -> tuple[nn.Module, SwapReport]:
    """A copy of `model` with every known attention replaced by ours.

    to       a kernel's name: the same attention, called in the same way, run by that kernel; or a conversion:
             "split", "fused", "mha", "gqa-2", "mla", "mla-64" (see docs/swapping.md)
    kernel   the kernel, if not by name: a Kernel, or any callable with SDPA's signature
    only     which modules: a name pattern ("encoder.*"), a type, or a predicate (name, module) -> bool
    inplace  change the model itself; parameters that keep their shape stay the same objects
    """
    if not isinstance(model, nn.Module):
        raise SwapError(f"model is {type(model).__name__}: must be a torch.nn.Module")
    request = _request(to, kernel, only, options)
    if not inplace:
        model = copy.deepcopy(model)
    # Fixed before anything is replaced, with shared modules once per place.
    found = list(model.named_modules(remove_duplicate=False))
    edits = _Edits(model, _by_any_name(request, found))
    try:
        with _collector_paused():
            for name, module in found:
                edits.visit(name, module)
        return edits.finish()
    except BaseException:
        edits.undo()  # in place, half a swap would be left behind
        raise


def replace_mha_with_eager(model: nn.Module, use_in_proj: bool = False) -> nn.Module:
    """A copy of `model`, every nn.MultiheadAttention replaced by ours; the original is untouched."""
    return swap(model, use_in_proj=use_in_proj)[0]


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Thousands of modules are made and none is garbage: looking through them again and again takes a third more."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _request(to: str, kernel: AnyKernel | None, only: Only | None, options: Mapping[str, Any]) -> Request:
    if not isinstance(to, str):
        raise SwapError(f"to = {to!r}: must be the name of a kernel or of a conversion")
    target, dash, size = to.partition("-")
    if target not in {known for known, _ in CONVERTERS} - {DROP_IN}:
        found = find_kernel(to if kernel is None else kernel)
        return Request(DROP_IN, None, found, options, predicate(only))
    if dash and (target == VARIANT or not (size.isdecimal() and int(size) > 0)):
        rule = "takes no number" if target == VARIANT else f"after {target}- must come a positive number"
        raise SwapError(f"to = {to!r}: {rule}")
    found = find_kernel("eager" if kernel is None else kernel)
    return Request(target, int(size) if size else None, found, options, predicate(only), keeps_kernel=kernel is None)


def predicate(only: Only | None) -> Callable[[str, nn.Module], bool]:
    """`swap`'s argument as a function of a module's name and the module."""
    if only is None:
        return lambda name, module: True
    if isinstance(only, str):
        return lambda name, module: fnmatch.fnmatchcase(name, only)
    if isinstance(only, type):
        return lambda name, module: isinstance(module, only)
    if not callable(only):
        raise SwapError(f"only = {only!r}: must be a name pattern, a type, or a function of name and module")
    return only


def _by_any_name(request: Request, found: list[tuple[str, nn.Module]]) -> Request:
    """A shared module is asked for if any of its names is: replaced under one alone, it would be two modules."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in found:
        names.setdefault(module, []).append(name)
    wants = request.wants
    return replace(request, wants=lambda name, module: any(wants(n, module) for n in names.get(module, [name])))


class _Edits:
    """One swap under way."""

    def __init__(self, model: nn.Module, request: Request) -> None:
        self.model, self.request = model, request
        self.rows: list[SwappedModule] = []
        self.heeded: set[str] = set()
        self.done: dict[nn.Module, nn.Module] = {}  # old module -> its replacement: aliases get the same one
        self.places: dict[str, nn.Module] = {}  # full name -> old module, aliases included
        self.adapted: dict[str, Any] = {}  # full name of a library's model -> its adapter
        self.left: dict[str, str] = {}
        self.twins: Twins = {}  # so that tied parameters stay tied

    def visit(self, name: str, module: nn.Module) -> None:
        if _is_inside(name, self.places):
            return  # went with its parent
        # What stands in a library's model is the library's, but for what any model may hold: nn.MultiheadAttention.
        adapter = None if _is_inside(name, self.adapted) or self.request.to != DROP_IN else adapter_of(module)
        if adapter is not None:
            if module not in self.done:
                self.done[module] = module
                rows, left = adapter.attach(name, module, self.request)
                self.rows += rows
                self.left |= left
                self.heeded |= {*adapter.OPTIONS}
            self.adapted[name] = adapter
            return
        convert = converter_of(name, module, self.request)
        if convert is None:
            return
        if module not in self.done:
            self._replace(name, module, convert)
        self.places[name] = module
        self._put(name, self.done[module])

    def finish(self) -> tuple[nn.Module, SwapReport]:
        if not self.rows:
            kind, to = type(self.model).__name__, self.request.to
            known = ", ".join(sorted(known.__name__ for target, known in CONVERTERS if target == to))
            others = {adapter.REACHED for adapter in self.adapted.values()}
            if to == DROP_IN and not others:
                others = {"in a model of transformers or diffusers"}
            text = "".join(f", nor {other}" for other in sorted(others))
            raise SwapError(f"nothing to swap in {kind}: no module that was asked for is one of {known}{text}")
        if ignored := self.request.options.keys() - self.heeded:
            heeded = ", ".join(sorted(self.heeded)) or "none"
            raise SwapError(f"options no swapped module heeds: {', '.join(sorted(ignored))}; known here: {heeded}")
        split = {origin for origin, _ in self.twins}
        if tied := [name for name, p in self.model.named_parameters(remove_duplicate=False) if id(p) in split]:
            rule = "swap both, or keep it whole with use_in_proj=True"
            raise SwapError(f"{', '.join(tied)}: tied to a packed projection that is split here; {rule}")
        return self.model, SwapReport(tuple(self.rows), left=self.left, _root=lambda: self.model)

    def undo(self) -> None:
        for row in reversed(self.rows):
            row.undo()

    def _put(self, name: str, module: nn.Module) -> None:
        if name == "":
            self.model = module
        else:
            self.model.set_submodule(name, module)

    def _replace(self, name: str, old: nn.Module, convert: Converter) -> None:
        where = name or "the model"
        if "forward" in vars(old):
            raise SwapError(f"{where}: its forward was replaced on the instance, and a swap would lose that")
        counter = self.request.counter(old)
        try:
            conversion = convert(old, counter.as_kernel(), self.request)
            new = conversion.module
            sources = carry_weights(old, new, conversion.weights, derived=conversion.derived, twins=self.twins)
        except ValueError as error:
            raise SwapError(f"{where}: {error}") from error
        inherit(old, new, attributes=self.request.to == DROP_IN)
        self.heeded |= {*OPTIONS[convert]}
        self.done[old] = new
        prefix = f"{name}." if name else ""

        def undo() -> None:
            if self.done.pop(old, None) is None:
                return  # undone before, and perhaps trained since
            write_back(old, new, conversion.weights, conversion.back)
            for place, module in self.places.items():
                if module is old:
                    self._put(place, old)

        self.rows.append(
            SwappedModule(
                name=name,
                was=type(old).__name__,
                became=type(new).__name__,
                params_before=parameter_count(old),
                params_after=parameter_count(new),
                weights={prefix + key: WeightSource(prefix + s.name, s.rows) for key, s in sources.items()},
                error=conversion.error,
                counter=counter,
                undo=undo,
            )
        )
        log.info("%s: %s -> %s", where, type(old).__name__, type(new).__name__)


def _is_inside(name: str, places: Mapping[str, Any]) -> bool:
    """Whether one of these is it, or around it."""
    parts = name.split(".")
    return "" in places or any(".".join(parts[:end]) in places for end in range(1, len(parts)))


def adapter_of(module: nn.Module) -> Any:
    for base in type(module).__mro__:
        place = ADAPTERS.get((base.__module__.partition(".")[0], base.__name__))
        if place is not None:
            return importlib.import_module(place)
    return None
