"""A sliding window and the first tokens, which many heads lean on (StreamingLLM's attention sinks)."""

from harness.kernels.blocksparse.blocks import KEYS, QUERIES, Blocks
from harness.kernels.blocksparse.kernel import Window, block_sparse_kernel
from harness.kernels.call import Kernel


def make(
    *,
    window: int = 1024,
    sink: int = 4,
    block_q: int = QUERIES,
    block_k: int = KEYS,
    name: str = "sparse_sink",
) -> Kernel:
    blocks = Blocks(block_q, block_k)
    return block_sparse_kernel(name, Window(blocks, window=window, sink=sink), blocks=blocks)


KERNEL = make()
