"""Wrong layers around a right attention: residuals, norms, activation, and the biases of the projections.

A right candidate is made wrong by giving its modules another class: they keep every parameter and its name. Not by
replacing bound methods: a float32 copy of the module would still call those of the original.
"""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from harness.cell.build import Pair
from harness.mutants.saboteurs.reach import chooses, is_block, is_latent
from harness.mutants.saboteurs.saboteur import in_class, in_module
from harness.variants.blocks import EncoderLayer


def attention_of(pair: Pair) -> nn.Module:
    module = pair.candidate.module
    return module.attention if isinstance(module, EncoderLayer) else module


def become(module: nn.Module, wrong: type[nn.Module]) -> None:
    """`wrong` overrides methods of the module's own class."""
    assert type(module) in wrong.__bases__, f"{wrong.__name__} is no {type(module).__name__}"
    module.__class__ = wrong


def become_part(pair: Pair, wrong: type[nn.Module], *, name: str) -> None:
    """Nothing where the attention has no part of that name: MLA's are others, and not every MLA has a query norm."""
    part = getattr(attention_of(pair), name, None)
    if part is not None:
        become(part, wrong)


def _become_layer(pair: Pair, wrong: type[nn.Module]) -> None:
    """The encoder layer, or the attention in it; nothing where neither is of the class that `wrong` overrides."""
    for module in {pair.candidate.module, attention_of(pair)}:
        if isinstance(module, wrong.__bases__):
            become(module, wrong)


in_layer = partial(in_class, _become_layer)


@in_layer("residual_missing", applies=is_block)
class _WithoutAttentionResidual(EncoderLayer):
    """The attention's output replaces its input; it should be added to it."""

    def forward(self, x: Tensor, **rules: Any) -> Tensor:
        if self.norm_first:
            x = self.dropout(self.attention(self.norm1(x), **rules))
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(self.dropout(self.attention(x, **rules)))
        out: Tensor = self.norm2(x + self._feed_forward(x))
        return out


@in_module(applies=is_block)
def norm_order_swapped(pair: Pair) -> None:
    """Pre-LN weights in a post-LN layer, or the other way round."""
    if isinstance(module := pair.candidate.module, EncoderLayer):
        module.norm_first = not module.norm_first


@in_module(applies=is_block)
def norm_eps_of_another_model(pair: Pair) -> None:
    """Keras' default of 1e-3 where the weights were trained with torch's 1e-5."""
    if isinstance(module := pair.candidate.module, EncoderLayer):
        module.norm1.eps = module.norm2.eps = 1e-3


@in_layer("activation_missing", applies=is_block)
class _LinearFeedForward(EncoderLayer):
    """Two linear maps in a row."""

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.linear2(self.dropout(self.linear1(x))))
        return out


@in_layer("activation_approximated", applies=is_block)
class _TanhGelu(EncoderLayer):
    """GPT-2's tanh form of GELU where the exact one is meant: off by 5e-4 at most."""

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.linear2(self.dropout(F.gelu(self.linear1(x), approximate="tanh"))))
        return out


class _WithoutBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@in_module(applies=lambda case: case.bias and not is_latent(case))
def value_bias_dropped(pair: Pair) -> None:
    """A bias is lost when a packed projection is split."""
    become_part(pair, _WithoutBias, name="v_proj")


# The query's bias moves scores alone; the key's would move all of a row alike, and nothing.
@in_module(applies=lambda case: case.bias and case.q_lora_rank is None and chooses(case))
def query_bias_dropped(pair: Pair) -> None:
    """Qwen2's q, k and v have biases; a converter written for LLaMA leaves them out."""
    become_part(pair, _WithoutBias, name="q_proj")


@in_module(applies=lambda case: case.bias)
def output_bias_dropped(pair: Pair) -> None:
    """The bias of the output projection is left out."""
    become_part(pair, _WithoutBias, name="out_proj")
