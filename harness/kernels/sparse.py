"""SpargeAttn on the CPU: blocks that matter little by their pooled scores are skipped."""

from harness.kernels.blocksparse.blocks import KEYS, QUERIES, Blocks
from harness.kernels.blocksparse.kernel import Sparge, block_sparse_kernel
from harness.kernels.call import Kernel


def make(
    *,
    topk: float | None = None,
    cdf: float | None = None,
    sim: float | None = None,
    pv: float | None = None,
    sink: bool = False,
    smooth: bool = True,
    block_q: int = QUERIES,
    block_k: int = KEYS,
    name: str = "sparse",
) -> Kernel:
    """With `cdf`, or else with `topk` (0.5): each with SpargeAttn's own defaults for the rest."""
    if cdf is None:
        topk = 0.5 if topk is None else topk
    elif topk is not None:
        raise ValueError("give either topk or cdf, not both")
    if sim is None:
        sim = -0.1 if cdf is None else 0.6
    if pv is None and cdf is not None and cdf < 1:
        pv = 50.0
    blocks = Blocks(block_q, block_k)
    selector = Sparge(blocks, topk=topk, cdf=cdf, sim=sim, smooth=smooth, sink=sink)
    return block_sparse_kernel(name, selector, blocks=blocks, pv=pv, exact=selector.keeps_all and pv is None)


KERNEL = make()
