"""What each swapped layer put out during a forward pass, in order of execution."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Place:
    """Where in a forward pass a tensor was seen."""

    layer: str  # full name of the module; "" is the model itself
    call: int = 0  # a module may run several times in one pass
    part: int = 0  # joint attention gives a tensor per stream
    optional: bool = False  # attention weights: a layer may give them on one side alone

    def __str__(self) -> str:
        part = " weights" if self.optional else f"[{self.part}]" if self.part else ""
        call = f" (call {self.call + 1})" if self.call else ""
        return f"{self.layer or 'the model'}{part}{call}"


@contextmanager
def captured(model: nn.Module, layers: Iterable[str]) -> Iterator[dict[Place, Tensor]]:
    seen: dict[Place, Tensor] = {}
    calls: dict[str, int] = {}

    def hook_of(layer: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            call = calls[layer] = calls.get(layer, -1) + 1
            for part, tensor in enumerate(_floating(output)):
                optional = part > 0 and _outline(tensor) != _outline(_floating(output)[0])
                # A clone: what follows may add the residual in place.
                seen[Place(layer, call, part, optional)] = tensor.detach().clone()

        return hook

    handles = [model.get_submodule(layer).register_forward_hook(hook_of(layer)) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _floating(output: Any) -> list[Tensor]:
    """The streams of hidden states, alike but for their length, and beside them perhaps attention weights."""
    values = [output]
    if isinstance(output, tuple | list):
        values = list(output)
    elif isinstance(output, Mapping):
        values = list(output.values())
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _outline(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions, batch and width."""
    return (tensor.ndim, *tensor.shape[:1], *tensor.shape[-1:])
