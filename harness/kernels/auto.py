"""The kernel for the call at hand: `pick` in names.py has the rule. All of them give the same."""

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.eager import eager
from harness.kernels.grouped import grouped
from harness.kernels.names import pick
from harness.kernels.tiled import tiled


def auto(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    trains = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (q, k, v, call.mask, call.sinks)
    )
    slanted = call.causal or call.left is not None or call.right is not None
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    name = pick(
        rows,
        q.shape[2],
        k.shape[2],
        products=k.shape[0] * k.shape[1],
        slanted=slanted,
        trains=trains,
        need_weights=call.need_weights,
    )
    return {"eager": eager, "grouped": grouped, "tiled": tiled}[name](q, k, v, call)


KERNEL = Kernel("auto", auto, gives_weights=True)
