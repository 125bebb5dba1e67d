"""Attention near the query alone: whole blocks within a sliding window."""

from harness.kernels.blocksparse.kernel import block_sparse_kernel
from harness.kernels.blocksparse.selectors import Window
from harness.kernels.blocksparse.sight import KEYS, QUERIES, Blocks
from harness.kernels.call import Kernel


def make(*, window: int = 1024, block_q: int = QUERIES, block_k: int = KEYS, name: str = "sparse_window") -> Kernel:
    blocks = Blocks(block_q, block_k)
    return block_sparse_kernel(name, Window(blocks, window=window), blocks=blocks)


KERNEL = make()
