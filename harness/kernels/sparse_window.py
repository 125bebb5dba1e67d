"""Attention near the query alone: whole blocks within a sliding window."""

from harness.kernels.blocksparse.blocks import KEYS, QUERIES, Blocks
from harness.kernels.blocksparse.kernel import Window, block_sparse_kernel
from harness.kernels.call import Kernel


def make(*, window: int = 1024, block_q: int = QUERIES, block_k: int = KEYS, name: str = "sparse_window") -> Kernel:
    blocks = Blocks(block_q, block_k)
    return block_sparse_kernel(name, Window(blocks, window=window), blocks=blocks)


KERNEL = make()
