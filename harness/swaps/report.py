"""What a swap did: every module it replaced, the calls seen since, and the way back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from harness.kernels.call import Counter
from harness.swaps.weights import WeightSource

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class SwappedModule:
    name: str  # full name in the model; "" is the model itself
    was: str
    became: str
    params_before: int
    params_after: int
    weights: Mapping[str, WeightSource] = field(default_factory=dict)  # full new name -> full old name
    error: float | None = None  # None: the conversion is exact
    counter: Counter = field(kw_only=True, repr=False, compare=False)
    undo: Callable[[], None] = field(kw_only=True, repr=False, compare=False)

    @property
    def calls(self) -> int:
        """How often its kernel ran since the swap."""
        return self.counter.calls


@dataclass(frozen=True)
class SwapReport:
    swapped: tuple[SwappedModule, ...]
    # Attention of a library's model that no swap can reach, and that goes on as before: full name -> its class.
    left: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    _root: Callable[[], nn.Module] = field(repr=False, compare=False, kw_only=True)

    @property
    def exact(self) -> bool:
        return all(module.error is None for module in self.swapped)

    @property
    def uncalled(self) -> tuple[str, ...]:
        """Modules whose kernel has not run since the swap."""
        return tuple(module.name for module in self.swapped if module.calls == 0)

    def undo(self) -> nn.Module:
        """Puts the old modules back, with the weights as they are now; gives the model."""
        for module in reversed(self.swapped):
            module.undo()
        return self._root()

    def sources(self) -> dict[str, WeightSource]:
        """Every replaced parameter of the new model and where it stands in the old one."""
        return {name: source for module in self.swapped for name, source in module.weights.items()}

    def table(self) -> "DataFrame":
        import pandas as pd

        columns = ("name", "was", "became", "params_before", "params_after", "error", "calls")
        return pd.DataFrame([{column: getattr(row, column) for column in columns} for row in self.swapped])
