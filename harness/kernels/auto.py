"""The kernel for the call at hand: `pick` in names.py has the rule. All of them give the same."""

from torch import Tensor

from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.eager import eager
from harness.kernels.grouped import grouped_plainly
from harness.kernels.names import pick
from harness.kernels.tiled import tiled
from harness.kernels.transforms import is_transformed

KERNELS = {"eager": eager, "grouped": grouped_plainly, "tiled": tiled}


def auto(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    if is_transformed():  # all of them take eager's lines then, and a recorded length is no number to go by
        return eager(q, k, v, call)
    _, H, L, _ = q.shape
    B, H_kv, S, _ = k.shape
    name = pick(
        H // H_kv * L,
        L,
        S,
        products=B * H_kv,
        slanted=call.is_slanted,
        trains=call.needs_gradients(q, k, v),
        need_weights=call.need_weights,
    )
    return KERNELS[name](q, k, v, call)


KERNEL = Kernel("auto", auto, gives_weights=True)
