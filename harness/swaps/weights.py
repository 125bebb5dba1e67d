"""What passes from an old module to its replacement: parameters, hooks, flags; and back again."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Shared, not copied: a handle from `register_forward_hook` removes its hook through the very dict it was put in.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class WeightSource:
    """Where a new parameter comes from: one of the old module's, whole or some of its rows."""

    name: str
    rows: tuple[int, int] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        return tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]


@dataclass(frozen=True)
class Carried:
    sources: Mapping[str, WeightSource]  # of every parameter of the new module that was not computed anew
    params_before: int
    params_after: int


def carry_weights(
    old: nn.Module,
    new: nn.Module,
    weights: Mapping[str, WeightSource],
    derived: Collection[str],
    twins: dict[tuple[int, WeightSource], nn.Parameter],
) -> Carried:
    """Gives `new` its parameters: the old one itself where it is taken whole, a copy of its rows elsewhere.

    `twins` remembers copies, so that rows of one old parameter become one new parameter wherever they are used. Every
    parameter and buffer of the old module must go somewhere, bit for bit, or a ValueError tells which did not.
    """
    old_parameters = dict(old.named_parameters(remove_duplicate=False))  # two names of a tied one are two sources
    for key, source in weights.items():
        if source.name not in old_parameters:
            raise ValueError(f"its {source.name} is made from something else (pruning, or an old weight_norm)")
        origin = old_parameters[source.name]
        rows = source.of(origin.detach())
        parameter = origin if source.rows is None else twins.get((id(origin), source))
        if parameter is None:
            parameter = twins[id(origin), source] = _copy_of_rows(origin, rows, source)
        module, name = _owner(new, key)
        made = module._parameters[name]
        assert made is not None
        if made.shape != parameter.shape:
            raise ValueError(f"{key} has shape {tuple(made.shape)}, its source {tuple(parameter.shape)}")
        module._parameters[name] = parameter
        if parameter is not origin and not same_bits(parameter.detach(), rows):
            raise ValueError(f"{key} differs from its source {source.name} after the swap")

    new_parameters = dict(new.named_parameters(remove_duplicate=False))
    old_names = {id(parameter): name for name, parameter in old_parameters.items()}
    shared = {
        key: WeightSource(old_names[id(parameter)])
        for key, parameter in new_parameters.items()
        if id(parameter) in old_names
    }
    sources = shared | dict(weights)
    if missing := new_parameters.keys() - sources.keys() - {*derived}:
        raise ValueError(f"parameters without a source: {', '.join(sorted(missing))}")
    kept = {id(parameter) for parameter in new_parameters.values()}
    taken = {source.name for source in sources.values()}
    lost = [name for name, p in old_parameters.items() if name not in taken and id(p) not in kept and not derived]
    if lost:
        raise ValueError(f"parameters that nothing takes over: {', '.join(sorted(lost))}")
    buffers = {id(buffer) for buffer in new.buffers()}
    if missed := [name for name, buffer in old.named_buffers() if id(buffer) not in buffers]:
        raise ValueError(f"buffers that nothing takes over: {', '.join(sorted(missed))}")
    return Carried(sources, _count(old_parameters), _count(new_parameters))


def _count(parameters: Mapping[str, nn.Parameter]) -> int:
    """Tied ones once."""
    return sum(parameter.numel() for parameter in {id(p): p for p in parameters.values()}.values())


def inherit(old: nn.Module, new: nn.Module, *, attributes: bool) -> None:
    """Training flag and hooks; with `attributes` also what the user hung on the module."""
    own = vars(new)
    for module in _made(new, old):
        module.training = old.training
    for name in HOOKS:
        own[name] = vars(old)[name]
    for name, value in vars(old).items() if attributes else ():
        if not name.startswith("_") and name not in own and not hasattr(type(new), name):
            own[name] = value


def write_back(
    old: nn.Module, new: nn.Module, weights: Mapping[str, WeightSource], back: Mapping[str, WeightSource]
) -> None:
    """The new module's present weights, gradients and flags, into the old one's parameters.

    `weights` cuts old parameters into new ones, `back` new ones into old.
    """
    places = {(parameter.device, parameter.dtype) for parameter in new.parameters()}
    if len(places) == 1:  # moved or cast as a whole meanwhile, perhaps: its parameters here follow
        old.to(*places.pop())
    old_parameters = dict(old.named_parameters(remove_duplicate=False))
    new_parameters = dict(new.named_parameters(remove_duplicate=False))
    parts: dict[str, list[tuple[nn.Parameter, WeightSource]]] = {}
    for key, source in weights.items():
        if new_parameters[key] is not old_parameters[source.name]:
            parts.setdefault(source.name, []).append((new_parameters[key], source))
    with torch.no_grad():
        for name, found in parts.items():
            origin = old_parameters[name]
            origin.requires_grad_(any(part.requires_grad for part, _ in found))
            origin.grad = None if all(part.grad is None for part, _ in found) else torch.zeros_like(origin)
            for part, source in found:
                source.of(origin).copy_(part)
                if origin.grad is not None and part.grad is not None:
                    source.of(origin.grad).copy_(part.grad)
        for name, source in back.items():
            origin, packed = old_parameters[name], new_parameters[source.name]
            origin.requires_grad_(packed.requires_grad)
            origin.copy_(source.of(packed))
            origin.grad = None if packed.grad is None else source.of(packed.grad).clone()
    for module in _made(old, new):
        module.training = new.training


def _made(module: nn.Module, beside: nn.Module) -> list[nn.Module]:
    """Its modules that are not those of the other: a child both share keeps its own flags."""
    shared = {id(child) for child in beside.modules()}
    return [child for child in module.modules() if id(child) not in shared]


def same_bits(new: Tensor, old: Tensor) -> bool:
    """NaN included, -0.0 apart from 0.0; tensors on the meta device have no bits."""
    if new.shape != old.shape or new.dtype != old.dtype:
        return False
    if new.is_meta and old.is_meta:
        return True
    whole_numbers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[new.itemsize]
    return torch.equal(new.view(whole_numbers), old.view(whole_numbers))


def _copy_of_rows(origin: nn.Parameter, rows: Tensor, source: WeightSource) -> nn.Parameter:
    parameter = nn.Parameter(rows.clone(), requires_grad=origin.requires_grad)
    if origin.grad is not None:
        parameter.grad = source.of(origin.grad).clone()
    return parameter


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last
