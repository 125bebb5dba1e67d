"""A selector and the engine as a kernel that counts what it leaves out."""

import functools
import math

import torch
from torch import Tensor

from harness.kernels.blocksparse.alone import alone
from harness.kernels.blocksparse.engine import block_sparse, expanded, refuse
from harness.kernels.blocksparse.selectors import Selector
from harness.kernels.blocksparse.sight import Blocks, covered
from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.tally import Choice, Tally


def block_sparse_kernel(
    name: str, selector: Selector, *, blocks: Blocks, pv: float | None = None, exact: bool = False
) -> Kernel:
    """`exact`: the selector keeps all and nothing else is left out, so the result is judged as dense attention."""
    tally = Tally()

    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, None]:
        refuse(q, k, v, call)
        if 0 in (q.numel(), k.numel(), v.numel()):
            return q.new_zeros(*q.shape[:3], v.shape[3]), None
        keep = alone(lambda: choose(selector, q, k, call, blocks=blocks))
        out, count = block_sparse(q, k, v, call, keep, blocks=blocks, pv=pv)
        choice = Choice(functools.partial(expanded, keep, blocks, q.shape[2], k.shape[2]), pv)
        tally.add(count, choice=choice, call=call, is_spoilt=is_spoilt(out, call))
        return out, None

    return Kernel(name, run, approximate=not exact, tally=tally)


def is_spoilt(out: Tensor, call: AttentionCall) -> bool:
    """As the shield asks, which then runs the same call once more."""
    return call.hides and not math.isfinite(float(out.sum(dtype=torch.promote_types(out.dtype, torch.float32))))


def choose(selector: Selector, q: Tensor, k: Tensor, call: AttentionCall, *, blocks: Blocks) -> Tensor:
    """The selector's map within sight, and no query that sees keys left without any."""
    keep = selector(q.detach(), k.detach(), call)
    return covered(keep.expand(*q.shape[:2], *keep.shape[2:]), q, k, call, blocks)
