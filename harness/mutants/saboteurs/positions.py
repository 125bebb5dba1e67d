"""Wrong rotary positions of MLA. RoPE reaches the output through scores alone: some query must see two keys."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from harness.case import Case
from harness.cell.build import Pair
from harness.mutants.saboteurs.blocks import attention_of, in_layer
from harness.mutants.saboteurs.reach import chooses, decoded, is_latent
from harness.mutants.saboteurs.saboteur import in_module
from harness.variants.mla import MultiHeadLatentAttention, Rope

EXACT_IN_BFLOAT16 = 256  # integers up to here


def _scores_matter(case: Case) -> bool:
    return is_latent(case) and chooses(case)


def _has_slow_pairs(case: Case) -> bool:
    """One pair of channels turns by the position itself, whatever theta and wherever the channels are."""
    return _scores_matter(case) and case.rope_head_dim != 2


def _decode_rows_matter(case: Case) -> bool:
    return is_latent(case) and chooses(case, decoded(case))


@in_layer("rope_half_split", applies=_has_slow_pairs)
class _HalfSplit(MultiHeadLatentAttention):
    """LLaMA's rotate_half on DeepSeek's weights, whose pairs are interleaved."""

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        R = x.shape[-1]
        halves_as_pairs = x.unflatten(-1, (2, R // 2)).mT.flatten(-2)
        return super()._rotate(halves_as_pairs, start).unflatten(-1, (R // 2, 2)).mT.flatten(-2)


@in_layer("rope_restarts_in_decode", applies=_decode_rows_matter)
class _StartsAtZero(MultiHeadLatentAttention):
    """The length of the cache is not passed on: each decoded token stands at position 0."""

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        return super()._rotate(x, 0)


@in_layer("rope_query_off_by_one", applies=_scores_matter)
class _QueryOneAhead(MultiHeadLatentAttention):
    """The cache's length is read after the append for the query, before it for the key."""

    def _queries(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        return super()._queries(x, start + 1)


@in_layer("rope_query_off_by_one_in_decode", applies=_decode_rows_matter)
class _QueryOneAheadInDecode(MultiHeadLatentAttention):
    """The same, in steps behind a cache alone: prefill looks right."""

    def _queries(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        return super()._queries(x, start + 1 if start else 0)


@contextmanager
def _without_rope(module: MultiHeadLatentAttention) -> Iterator[None]:
    rope, module.rope = module.rope, None
    try:
        yield
    finally:
        module.rope = rope


@in_layer("rope_on_query_only", applies=_scores_matter)
class _QueryOnly(MultiHeadLatentAttention):
    """The shared key k_pe goes into the cache as it is: scores depend on the query's position, not the distance."""

    def _latents(self, x: Tensor, start: int) -> Tensor:
        with _without_rope(self):
            return super()._latents(x, start)


@in_layer("rope_on_the_wrong_part", applies=_scores_matter)
class _RopeChannelsFirst(MultiHeadLatentAttention):
    """The first R channels of each query head are turned; the last R are the ones meant."""

    def _queries(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        with _without_rope(self):
            q = torch.cat(super()._queries(x, start), dim=-1)
        q_pe, q_nope = q.split((self.rope_head_dim, self.nope_head_dim), dim=-1)
        return q_nope, self._rotate(q_pe, start)


def _set_rope(pair: Pair, make: Callable[[Rope], Rope]) -> None:
    """Nothing where there is no MLA."""
    if isinstance(module := attention_of(pair), MultiHeadLatentAttention):
        assert module.rope is not None
        module.rope = make(module.rope)


@in_module(applies=_has_slow_pairs)
def rope_theta_of_another_model(pair: Pair) -> None:
    """theta = 500,000 (LLaMA 3) where the weights were trained with 10,000."""
    _set_rope(pair, lambda right: Rope(right.dim, 500_000.0))


class _RoundedPositions(Rope):
    def _angles(self, start: int, end: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        at = torch.arange(start, end, device=device).to(torch.bfloat16).long()
        cos, sin = super()._angles(0, int(at.max()) + 1, dtype, device)
        return cos[at], sin[at]


@in_module(applies=lambda case: is_latent(case) and chooses(case, torch.arange(case.seq_len) > EXACT_IN_BFLOAT16))
def rope_positions_in_bfloat16(pair: Pair) -> None:
    """Position ids cast to the model's dtype: from 257 on, neighbours in bfloat16 stand at the same place."""
    _set_rope(pair, lambda right: _RoundedPositions(right.dim, right.theta))
