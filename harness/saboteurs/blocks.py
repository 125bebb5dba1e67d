"""Wrong layers around a right attention: residuals, norms, activation, and the biases of the projections."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from harness.build import Pair
from harness.case import Case
from harness.saboteurs.cells import chooses, is_block, is_latent
from harness.saboteurs.saboteur import in_module
from harness.saboteurs.spoiling import attention_of, become, become_block
from harness.variants.blocks import EncoderLayer


class _WithoutAttentionResidual(EncoderLayer):
    def forward(self, x: Tensor, **rules: Any) -> Tensor:
        if self.norm_first:
            x = self.dropout(self.attention(self.norm1(x), **rules))
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(self.dropout(self.attention(x, **rules)))
        out: Tensor = self.norm2(x + self._feed_forward(x))
        return out


@in_module(applies=is_block)
def residual_missing(pair: Pair) -> None:
    """The attention's output replaces its input; it should be added to it."""
    become_block(pair, _WithoutAttentionResidual)


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


class _LinearFeedForward(EncoderLayer):
    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.linear2(self.dropout(self.linear1(x))))
        return out


@in_module(applies=is_block)
def activation_missing(pair: Pair) -> None:
    """Two linear maps in a row."""
    become_block(pair, _LinearFeedForward)


class _TanhGelu(EncoderLayer):
    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.linear2(self.dropout(F.gelu(self.linear1(x), approximate="tanh"))))
        return out


@in_module(applies=is_block)
def activation_approximated(pair: Pair) -> None:
    """GPT-2's tanh form of GELU where the exact one is meant: off by 5e-4 at most."""
    become_block(pair, _TanhGelu)


class _WithoutBias(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def _without_bias(pair: Pair, name: str) -> None:
    """Nothing where there is no such projection (MLA's are others)."""
    projection = getattr(attention_of(pair), name, None)
    if projection is not None:
        become(projection, _WithoutBias)


def _has_value_bias(case: Case) -> bool:
    return case.bias and not is_latent(case)


@in_module(applies=_has_value_bias)
def value_bias_dropped(pair: Pair) -> None:
    """A bias is lost when a packed projection is split."""
    _without_bias(pair, "v_proj")


def _has_query_bias(case: Case) -> bool:
    """The query's bias moves scores alone; the key's would move all of a row alike, and nothing."""
    return case.bias and case.q_lora_rank is None and chooses(case)


@in_module(applies=_has_query_bias)
def query_bias_dropped(pair: Pair) -> None:
    """Qwen2's q, k and v have biases; a converter written for LLaMA leaves them out."""
    _without_bias(pair, "q_proj")


def _has_output_bias(case: Case) -> bool:
    return case.bias


@in_module(applies=_has_output_bias)
def output_bias_dropped(pair: Pair) -> None:
    """The bias of the output projection is left out."""
    _without_bias(pair, "out_proj")
