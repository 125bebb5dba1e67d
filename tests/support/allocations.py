"""What a call allocates: every tensor that an operation makes in memory of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """`made` holds the bytes of each new storage, `written` those of each copy_ and each new storage."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []
        self.written: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in given:
                self.made.append(t.untyped_storage().nbytes())
                if func not in (torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format):
                    self.written.append(t.untyped_storage().nbytes())
        if func is torch.ops.aten.copy_.default:
            self.written.append(out.numel() * out.itemsize)
        return out


def allocations(call: Callable[[], object]) -> Allocations:
    with torch.no_grad(), Allocations() as found:
        call()
    return found
