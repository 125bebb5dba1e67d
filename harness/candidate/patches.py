"""What a user's code replaced in torch, numpy and time: told, because others in its process would be fooled."""

import time
from types import ModuleType
from typing import Any

import numpy as np
import torch

WATCHED: tuple[tuple[str, Any], ...] = (
    ("torch.nn.functional", torch.nn.functional),
    ("torch", torch),
    ("torch.Tensor", torch.Tensor),
    ("torch.autograd", torch.autograd),
    ("torch.testing", torch.testing),
    ("torch.nn.MultiheadAttention", torch.nn.MultiheadAttention),
    ("numpy", np),
    ("time", time),
)


class Patches:
    """Compares what stands in these places with what stood there when this object was made."""

    def __init__(self) -> None:
        self._before = self._read()

    def found(self) -> list[str]:
        """Dotted names that lead elsewhere now. What was only added, such as a submodule, is no patch."""
        now = self._read()
        return sorted(name for name, value in self._before.items() if now.get(name) is not value)

    @staticmethod
    def _read() -> dict[str, Any]:
        return {
            f"{place}.{name}": value
            for place, holder in WATCHED
            for name, value in vars(holder).items()
            if callable(value) and not isinstance(value, ModuleType) and not name.startswith("__")
        }
