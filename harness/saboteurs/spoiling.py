"""How a right candidate is made wrong: its modules change their class, and keep every parameter and its name.

Not by replacing bound methods: a float32 copy of the module would still call those of the original.
"""

from torch import nn

from harness.build import Pair
from harness.variants.blocks import EncoderLayer
from harness.variants.mla import MultiHeadLatentAttention


def attention_of(pair: Pair) -> nn.Module:
    module = pair.candidate.module
    return module.attention if isinstance(module, EncoderLayer) else module


def become(module: nn.Module, wrong: type[nn.Module]) -> None:
    """`wrong` overrides methods of the module's own class."""
    assert type(module) in wrong.__bases__, f"{wrong.__name__} is no {type(module).__name__}"
    module.__class__ = wrong


def become_latent(pair: Pair, wrong: type[MultiHeadLatentAttention]) -> None:
    """Nothing where there is no MLA."""
    if isinstance(module := attention_of(pair), MultiHeadLatentAttention):
        become(module, wrong)


def become_block(pair: Pair, wrong: type[EncoderLayer]) -> None:
    """Nothing where there is no encoder layer."""
    if isinstance(module := pair.candidate.module, EncoderLayer):
        become(module, wrong)
