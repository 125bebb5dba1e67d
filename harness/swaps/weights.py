"""What passes from an old module to its replacement, and back again.

carry_weights  gives the new module its parameters, and refuses to lose any of the old one's
inherit        its training flag, its hooks, and what the user hung on it
write_back     the new module's present weights, gradients and flags, into the old one that returns
"""

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


Twins = dict[tuple[int, WeightSource], nn.Parameter]  # (id of an old parameter, which rows) -> their copy


def carry_weights(
    old: nn.Module, new: nn.Module, weights: Mapping[str, WeightSource], *, derived: Collection[str], twins: Twins
) -> dict[str, WeightSource]:
    """Gives `new` its parameters: the old one itself where it is taken whole, a copy of its rows elsewhere.

    `twins` remembers copies, so that rows of one old parameter become one new parameter wherever they are used. Gives
    the source of every parameter of `new` but the `derived` ones, which were computed anew. Every parameter and buffer
    of the old module must go somewhere, bit for bit, or a ValueError tells which did not.
    """
    origins = _named(old)
    for key, source in weights.items():
        if source.name not in origins:
            raise ValueError(f"its {source.name} is made from something else (pruning, or an old weight_norm)")
        origin = origins[source.name]
        parameter = origin if source.rows is None else _copy_of_rows(origin, source, twins)
        path, _, name = key.rpartition(".")
        owner = new.get_submodule(path)
        made = owner._parameters[name]
        assert made is not None
        if made.shape != parameter.shape:
            raise ValueError(f"{key} has shape {tuple(made.shape)}, its source {tuple(parameter.shape)}")
        owner._parameters[name] = parameter
        if parameter is not origin and not same_bits(parameter.detach(), source.of(origin.detach())):
            raise ValueError(f"{key} differs from its source {source.name} after the swap")
    names = {id(parameter): name for name, parameter in origins.items()}
    shared = {key: WeightSource(names[id(p)]) for key, p in _named(new).items() if id(p) in names}
    sources = shared | dict(weights)
    _refuse_losses(old, new, sources, derived)
    return sources


def _copy_of_rows(origin: nn.Parameter, source: WeightSource, twins: Twins) -> nn.Parameter:
    known = twins.get((id(origin), source))
    if known is not None:
        return known
    parameter = nn.Parameter(source.of(origin.detach()).clone(), requires_grad=origin.requires_grad)
    if origin.grad is not None:
        parameter.grad = source.of(origin.grad).clone()
    twins[id(origin), source] = parameter
    return parameter


def _refuse_losses(
    old: nn.Module, new: nn.Module, sources: Mapping[str, WeightSource], derived: Collection[str]
) -> None:
    parameters = _named(new)
    if missing := parameters.keys() - sources.keys() - {*derived}:
        raise ValueError(f"parameters without a source: {', '.join(sorted(missing))}")
    kept = {id(parameter) for parameter in parameters.values()}
    taken = {source.name for source in sources.values()}
    lost = [name for name, parameter in _named(old).items() if name not in taken and id(parameter) not in kept]
    if lost and not derived:
        raise ValueError(f"parameters that nothing takes over: {', '.join(sorted(lost))}")
    buffers = {id(buffer) for buffer in new.buffers()}
    if missed := [name for name, buffer in old.named_buffers() if id(buffer) not in buffers]:
        raise ValueError(f"buffers that nothing takes over: {', '.join(sorted(missed))}")


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
    origins, present = _named(old), _named(new)
    # For each old parameter that is not the new one itself: a new one, its rows there, and where they stand here.
    parts: dict[str, list[tuple[nn.Parameter, WeightSource, WeightSource]]] = {}
    for key, source in weights.items():
        if present[key] is not origins[source.name]:
            parts.setdefault(source.name, []).append((present[key], WeightSource(key), source))
    for name, source in back.items():
        parts.setdefault(name, []).append((present[source.name], source, WeightSource(name)))
    with torch.no_grad():
        for name, found in parts.items():
            origin = origins[name]
            origin.requires_grad_(any(part.requires_grad for part, _, _ in found))
            origin.grad = None if all(part.grad is None for part, _, _ in found) else torch.zeros_like(origin)
            for part, there, here in found:
                here.of(origin).copy_(there.of(part))
                if origin.grad is not None and part.grad is not None:
                    here.of(origin.grad).copy_(there.of(part.grad))
    for module in _made(old, new):
        module.training = new.training


def _named(module: nn.Module) -> dict[str, nn.Parameter]:
    """Two names of a tied parameter are two sources."""
    return dict(module.named_parameters(remove_duplicate=False))


def parameter_count(module: nn.Module) -> int:
    """Tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


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
