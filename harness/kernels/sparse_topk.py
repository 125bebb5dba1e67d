"""A fixed number of blocks for each block of queries, by pooled scores, as NSA and DSA choose them."""

from harness.kernels.blocksparse.blocks import KEYS, QUERIES, Blocks
from harness.kernels.blocksparse.kernel import TopBlocks, block_sparse_kernel
from harness.kernels.call import Kernel


def make(*, count: int = 16, block_q: int = QUERIES, block_k: int = KEYS, name: str = "sparse_topk") -> Kernel:
    blocks = Blocks(block_q, block_k)
    return block_sparse_kernel(name, TopBlocks(blocks, count=count), blocks=blocks)


KERNEL = make()
