"""What `harness verify` must know of a family of models."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import BadInput
from harness.models.families.names import family_names
from harness.registry import UnknownName, nearest
from harness.swaps.engine import ADAPTERS


class FamilyError(BadInput):
    """A family that cannot be built as asked: a library not installed, an unknown config key, a bad checkpoint."""


@dataclass(frozen=True)
class Structure:
    """Read from the model's config, not from what the swap finds: it is what the swap is held to."""

    layers: int
    attentions: int  # modules that must be swapped
    attention_class: str
    heads: int | None  # None, here and below: the modules differ, or a user's own model does not tell
    kv_heads: int | None
    head_dim: int | None
    config_class: str | None = None
    hidden_size: int | None = None

    @property
    def groups(self) -> int | None:
        """Query heads on one key/value head."""
        if not self.heads or not self.kv_heads:
            return None
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Batch:
    """Arguments of one forward pass, and which of its rows mean anything."""

    kwargs: Mapping[str, Any]  # model(*args, **kwargs)
    real: Tensor | None = None  # (B, L) bool, False = padding: outputs there are left open; None = all count
    args: tuple[Any, ...] = ()
    # How to call the model, where that is more than one call: (model, *args, **kwargs) -> what `Family.output` takes.
    run: Callable[..., Any] | None = None

    def through(self, model: nn.Module) -> Any:
        return model(*self.args, **self.kwargs) if self.run is None else self.run(model, *self.args, **self.kwargs)


def floating_tensors(output: Any) -> list[Tensor]:
    """All that a module returned, alone or in a tuple, a list or a mapping."""
    values = [output]
    if isinstance(output, tuple | list):
        values = list(output)
    elif isinstance(output, Mapping):
        values = list(output.values())
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


@dataclass(frozen=True)
class Family:
    name: str
    title: str  # one line: model and what is special about its attention
    library: str  # "transformers", "diffusers", or "torch"
    build: Callable[[Mapping[str, Any]], nn.Module]  # config overrides -> tiny random model in eval mode, float32
    load: Callable[[Path], nn.Module]  # a local checkpoint folder -> model in eval mode
    inspect: Callable[[nn.Module], Structure]
    batches: Callable[[nn.Module, torch.Generator], Mapping[str, Batch]]  # by name: plain, left-padded, ...
    output: Callable[[Any], Any]  # what a forward pass returns -> logits or latents (B, L, ...), or a list of tensors
    # Integer tokens: must be equal one by one. Floating latents: judged by the acceptance rule. None: no such step.
    generate: Callable[[nn.Module, torch.Generator], Tensor] | None
    swap_options: Mapping[str, Any] = field(default_factory=dict)


def find_family(name: str) -> Family:
    if name not in family_names():
        known = ", ".join(family_names())
        hint = nearest(name, family_names())
        raise UnknownName(f"unknown family {name!r}; known: {known}, or package.module:function{hint}")
    try:
        found: Family = importlib.import_module(f"harness.models.families.{name}").FAMILY
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("transformers", "diffusers"):
            raise
        raise FamilyError(f"{name} needs {library}: pip install 'attention-harness[models]'") from error
    return found


def all_families() -> tuple[str, ...]:
    """Those that can be built here: every one, or a message that says what to install."""
    missing = [library for library, _ in ADAPTERS if importlib.util.find_spec(library) is None]
    if missing:
        raise FamilyError(f"--all needs {' and '.join(missing)}: pip install 'attention-harness[models]'")
    return family_names()
