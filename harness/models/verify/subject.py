"""What is verified: a family's model, or a user's own as a family of one, its attention counted from itself."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from harness.errors import BadInput
from harness.kernels import plugin
from harness.kernels.names import is_plugin
from harness.models.families.family import Batch, Family, FamilyError, Structure, find_family, floating_tensors
from harness.models.families.names import family_names
from harness.swaps.engine import ADAPTERS

Load = Callable[[], tuple[nn.Module, Family]]
SHAPES = "a tensor, a tuple of positional arguments, a dict of keyword arguments, or a dict of harness Batches"


def subject(
    target: str | Family | nn.Module, config: Mapping[str, Any], path: Path | None, inputs: Any
) -> tuple[str, Load]:
    """Its name, and what loads it; arguments that do not go together raise BadInput."""
    if isinstance(target, Family) or (isinstance(target, str) and not is_plugin(target)):
        return _family(target, config, path, inputs)
    if config or path is not None:
        raise BadInput(f"{'config' if config else 'path'}: only a family has one; your own model is built by your code")
    if isinstance(target, nn.Module):
        name = type(target).__name__
        return name, lambda: (target, family_of_model(name, target, inputs))
    if inputs is not None:
        raise BadInput(f"inputs: {target} must give them itself, as a pair of model and inputs")
    function = user_function(target)

    def load() -> tuple[nn.Module, Family]:
        model, given = model_and_inputs(target, function())
        return model, family_of_model(target, model, given)

    return target, load


def _family(wanted: str | Family, config: Mapping[str, Any], path: Path | None, inputs: Any) -> tuple[str, Load]:
    name = wanted if isinstance(wanted, str) else wanted.name
    if inputs is not None:
        raise BadInput(f"inputs: {name} makes its own")
    if path is not None and config:
        raise BadInput(f"config ({', '.join(config)}) and path ({path}): a checkpoint has its own config")

    def load() -> tuple[nn.Module, Family]:
        family = find_family(wanted) if isinstance(wanted, str) else wanted
        return family.build(config) if path is None else family.load(path), family

    return name, load


def user_function(spec: str) -> Callable[[], Any]:
    """`file.py:function` or `package.module:function`; what stands beside it can be imported, as by Python itself."""
    place = spec.rpartition(":")[0]
    folder = str(Path(place).resolve().parent if place.endswith(".py") else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    return plugin.find_function(spec)[0]


def model_and_inputs(spec: str, built: Any) -> tuple[nn.Module, Any]:
    match built:
        case nn.Module():
            return built, None
        case (nn.Module() as model, inputs):
            return model, inputs
    raise BadInput(f"{spec} returned {type(built).__name__}: must be a module, or a pair (module, inputs)")


def family_of_model(name: str, model: nn.Module, inputs: Any) -> Family:
    """The family that the model's class belongs to, else one made of what the model shows."""
    library = library_of(model) or "torch"
    known = _known_family(model) if library != "torch" else None
    if inputs is None and known is None:
        raise BadInput(f"{name}: {type(model).__name__} needs inputs: return a pair (model, inputs), inputs {SHAPES}")
    batches = {} if inputs is None else _batches(name, inputs)
    own = Family(
        name=name,
        title=f"{type(model).__name__}, your own model",
        library=library,
        build=lambda overrides: model,
        load=lambda path: model,
        inspect=structure_of,
        batches=lambda model, generator: batches,
        output=_output,
        generate=None,
    )
    if known is None:
        return own
    own = replace(own, inspect=known.inspect, output=known.output, generate=known.generate)
    return own if batches else replace(own, batches=known.batches)


def library_of(model: nn.Module) -> str | None:
    """The library whose models are swapped whole and of which this is one."""
    homes = {(base.__module__.partition(".")[0], base.__name__) for base in type(model).__mro__}
    return next((library for library, base in ADAPTERS if (library, base) in homes), None)


def _known_family(model: Any) -> Family | None:
    """The family with this very class of models; any other causal language model of transformers does as LLaMA does."""
    for name in family_names():
        try:
            family = find_family(name)
        except FamilyError:
            continue  # of the other library, which is not installed
        if family.library == library_of(model) and type(family.build({})) is type(model):
            return family
    if library_of(model) == "transformers" and model.can_generate() and not model.config.is_encoder_decoder:
        return replace(find_family("llama"), inspect=structure_of)
    return None


def _batches(name: str, inputs: Any) -> Mapping[str, Batch]:
    match inputs:
        case Batch():
            return {"given": inputs}
        case Tensor():
            return {"given": Batch({}, args=(inputs,))}
        case tuple() | list():
            return {"given": Batch({}, args=tuple(inputs))}
        case Mapping() if inputs and all(isinstance(value, Batch) for value in inputs.values()):
            return dict(inputs)
        case Mapping() if inputs:
            return {"given": Batch(dict(inputs))}
    raise BadInput(f"{name}: its inputs are {type(inputs).__name__}: must be {SHAPES}")


def _output(output: Any) -> list[Tensor]:
    if not (tensors := floating_tensors(output)):
        raise FamilyError(f"the model returned {type(output).__name__} without a floating-point tensor in it")
    return tensors


def structure_of(model: nn.Module) -> Structure:
    """Counted from the modules, apart from what the swap finds."""
    found = attentions_of(model)
    if not found:
        libraries = " or ".join(library for library, _ in ADAPTERS)
        kind = type(model).__name__
        raise FamilyError(f"no attention in {kind}: neither nn.MultiheadAttention nor a model of {libraries}")
    config = getattr(model, "config", None)
    return Structure(
        layers=len({name.rpartition(".")[0] for name in found}),  # two attentions of one decoder layer are one layer
        attentions=len(found),
        attention_class=", ".join(sorted({type(module).__name__ for module in found.values()})),
        heads=_common(found.values(), "num_heads", "heads", "num_attention_heads"),
        kv_heads=_common(found.values(), "num_key_value_heads", "num_heads", "heads", "num_attention_heads"),
        head_dim=_common(found.values(), "head_dim"),
        config_class=type(config).__name__ if config is not None else None,
        hidden_size=getattr(config, "hidden_size", None) or _common(found.values(), "embed_dim", "hidden_size"),
    )


def attentions_of(model: nn.Module) -> dict[str, nn.Module]:
    """nn.MultiheadAttention anywhere; inside a model of a library, what is called an attention and holds no other."""
    modules = dict(model.named_modules())
    libraries = tuple(f"{name}." if name else "" for name, module in modules.items() if library_of(module))
    names = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.MultiheadAttention)
        or (name.startswith(libraries) and "Attention" in type(module).__name__ and not library_of(module))
    ]
    return {name: modules[name] for name in names if not any(other.startswith(f"{name}.") for other in names)}


def _common(modules: Iterable[nn.Module], *names: str) -> int | None:
    """The first of these that a module or its config has, where all modules agree on it."""
    values = set()
    for module in modules:
        holders = (module, getattr(module, "config", None))
        found = (getattr(holder, name, None) for name in names for holder in holders)
        values.add(next((value for value in found if isinstance(value, int)), None))
    return values.pop() if len(values) == 1 else None
