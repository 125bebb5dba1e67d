"""Wrong states: decays, chunks and their borders, what is carried to the next call, convolutions, padding.

A candidate is made wrong by putting a class over its own, whichever of the recurrent ones that is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.case import Case
from harness.cell.build import Pair
from harness.mutants.saboteurs.reach import both, context, several_rows
from harness.mutants.saboteurs.saboteur import in_class
from harness.variants.recurrence import Recurrence, StateCache, at_once, token_by_token
from harness.variants.recurrent import RecurrentLayer
from harness.variants.specs.recurrent import CHUNK, CONV

Scanned = tuple[Tensor, Tensor]


def _put_over(pair: Pair, wrong: type[RecurrentLayer]) -> None:
    """Nothing where the candidate is no recurrent layer."""
    module = pair.candidate.module
    if isinstance(module, RecurrentLayer):
        # Of its own making is only the class: parameters and their names stay.
        module.__class__ = type(wrong.__name__, (wrong, type(module)), {})


in_state = partial(in_class, _put_over, core="recurrence")


# ---- in which cells --------------------------------------------------------------------------------------------------


def _any(case: Case) -> bool:
    return True


def _several(case: Case) -> bool:
    """Some token comes behind another in one call, or in a later one."""
    return case.seq_len > 1


def _decodes(case: Case) -> bool:
    return case.phase == "decode" and case.seq_len > 1


def _has_border(case: Case) -> bool:
    """Some call has a second chunk."""
    return context(case) > CHUNK


def _delta(case: Case) -> bool:
    return case.variant in ("gated_deltanet", "kda")


def _convolves(case: Case) -> bool:
    return case.variant != "lightning"


def _pads(case: Case) -> bool:
    return case.mask == "left_padding" and case.seq_len > 1


def _groups(case: Case) -> bool:
    return case.kv_heads is not None and 1 < case.kv_heads < case.heads


def _several_heads(case: Case) -> bool:
    return case.heads > 1


def _of(*variants: str) -> Callable[[Case], bool]:
    return lambda case: case.variant in variants


def _with(steps: Recurrence, **changes: Tensor | None) -> Recurrence:
    parts = {"q": steps.q, "k": steps.k, "v": steps.v, "g": steps.g, "beta": steps.beta} | changes
    return Recurrence(**parts)  # type: ignore[arg-type]


# ---- the recurrence itself -------------------------------------------------------------------------------------------


@in_state("decay_missing", applies=_several)
class _NoDecay(RecurrentLayer):
    """The gate is 1 for every token: the state never forgets."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        return super()._scan(_with(steps, g=torch.zeros_like(steps.g)), state)


@in_state("decay_applied_twice", applies=_several)
class _TwiceDecayed(RecurrentLayer):
    """Decayed by the kernel and once more by its caller."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        return super()._scan(_with(steps, g=2 * steps.g), state)


@in_state(
    "decay_of_the_token_before",
    applies=lambda case: _several(case) and (case.variant != "lightning" or case.phase == "decode"),
)
class _LateDecay(RecurrentLayer):
    """Each token's gate is applied one token late."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        return super()._scan(_with(steps, g=F.pad(steps.g, (0, 0, 1, 0))[:, :, :-1]), state)


@in_state("decay_in_half_precision", applies=_several)
class _HalfDecay(RecurrentLayer):
    """The log of the gate is rounded to bfloat16 before it is summed: over many tokens the error adds up."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        return super()._scan(_with(steps, g=steps.g.to(torch.bfloat16).to(steps.g.dtype)), state)


@in_state("decay_after_the_write", applies=_several)
class _DecayedWrite(RecurrentLayer):
    """What a token writes is decayed by its own gate, too."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        gate = steps.g.exp()
        late = _with(steps, k=steps.k * gate) if steps.beta is None else _with(steps, beta=steps.beta * gate[..., :1])
        return super()._scan(late, state)


@in_state("decay_of_the_first_head", applies=both(_several, _several_heads))
class _OneDecay(RecurrentLayer):
    """The gate of the first head for all: an index that does not move."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        return super()._scan(_with(steps, g=steps.g[:, :1].expand_as(steps.g)), state)


@in_state("decay_of_the_first_channel", applies=both(_several, _of("kda")))
class _ScalarDecay(RecurrentLayer):
    """KDA's gate of a channel taken for that of the head, as in Gated DeltaNet."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        return super()._scan(_with(steps, g=steps.g[..., :1]), state)


@in_state("delta_rule_missing", applies=both(_several, _delta))
class _PlainLinear(RecurrentLayer):
    """Values are added without what the state says of their key already."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        return super()._scan(_with(steps, v=steps.v if steps.beta is None else steps.v * steps.beta, beta=None), state)


@in_state("delta_write_strength_missing", applies=_delta)
class _FullStrength(RecurrentLayer):
    """beta is 1: each token overwrites what stood under its key."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        ones = None if steps.beta is None else torch.ones_like(steps.beta)
        return super()._scan(_with(steps, beta=ones), state)


@in_state("delta_reads_before_the_decay", applies=both(_several, _delta))
class _ReadsUndecayed(RecurrentLayer):
    """What is subtracted is read from the state before it has forgotten."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        if steps.beta is None:
            return super()._scan(steps, state)
        steps = steps.widened()
        S, outputs = steps.empty_state() if state is None else state, []
        for t in range(steps.length):
            one = steps.cut(t, t + 1)
            assert one.beta is not None
            u = one.beta * (one.v - one.k @ S)
            S = S * one.g.exp().mT + one.k.mT @ u
            outputs.append(one.q @ S)
        return torch.cat(outputs, dim=2), S


@in_state("output_read_before_the_write", applies=_any)
class _ReadsOld(RecurrentLayer):
    """A query reads the state without its own token."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        S, outputs = state, []
        for t in range(steps.length):
            one = steps.widened().cut(t, t + 1)
            before = one.empty_state() if S is None else S
            outputs.append(one.q @ (before * one.g.exp().mT))
            _, S = token_by_token(one, before)
        assert S is not None
        return torch.cat(outputs, dim=2), S


@in_state("future_of_the_chunk_is_read", applies=lambda case: context(case) > 1)
class _NotCausal(RecurrentLayer):
    """Inside a chunk the mask of the future is forgotten."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        out, S = super()._scan(steps, state)
        wide = steps.widened()
        return out + (wide.q @ wide.k.mT).triu(1) @ wide.v, S


@in_state("key_heads_tiled", applies=_groups)
class _Tiled(RecurrentLayer):
    """Key heads are repeated as a whole where neighbours should share one."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        sizes = getattr(self, "sizes", None)
        if sizes is None:
            return super()._scan(steps, state)
        H, G = sizes[:2]
        order = torch.arange(H) % G * (H // G)
        return super()._scan(_with(steps, q=steps.q[:, order], k=steps.k[:, order]), state)


# ---- chunks and their borders ----------------------------------------------------------------------------------------


class _InChunks(RecurrentLayer):
    """Right but for what `_chunk` does; calls of a few tokens, and those of one chunk, are as they should be."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        if steps.length <= CHUNK:
            return super()._scan(steps, state)
        wide = steps.widened()
        S, outputs = wide.empty_state() if state is None else state, []
        for start in range(0, wide.length, CHUNK):
            out, S = self._chunk(wide, start, S)
            outputs.append(out)
        return torch.cat(outputs, dim=2), S

    def _chunk(self, steps: Recurrence, start: int, S: Tensor) -> Scanned:
        raise NotImplementedError


@in_state("state_dropped_between_chunks", applies=_has_border)
class _Forgetful(_InChunks):
    """Every chunk starts from an empty state."""

    def _chunk(self, steps: Recurrence, start: int, S: Tensor) -> Scanned:
        return at_once(steps.cut(start, start + CHUNK), torch.zeros_like(S))


@in_state("state_carried_undecayed", applies=lambda case: context(case) > CHUNK * (1 if _decodes(case) else 2))
class _Undecayed(_InChunks):
    """The state goes through a chunk without the chunk's decay."""

    def _chunk(self, steps: Recurrence, start: int, S: Tensor) -> Scanned:
        part = steps.cut(start, start + CHUNK)
        out, _ = at_once(part, S)
        return out, at_once(part, torch.zeros_like(S))[1] + S


@in_state("chunk_border_decay_forgotten", applies=_has_border)
class _BorderDecay(_InChunks):
    """The decay of a chunk's first token is not applied to the state that comes in."""

    def _chunk(self, steps: Recurrence, start: int, S: Tensor) -> Scanned:
        part = steps.cut(start, start + CHUNK)
        return at_once(part, S * (-part.g[:, :, :1]).exp().mT)


@in_state("chunk_border_one_early", applies=_has_border)
class _SkipsLast(_InChunks):
    """The last token of a chunk is not in the state that is handed on."""

    def _chunk(self, steps: Recurrence, start: int, S: Tensor) -> Scanned:
        out, _ = at_once(steps.cut(start, start + CHUNK), S)
        return out, at_once(steps.cut(start, start + CHUNK - 1), S)[1]


@in_state("chunk_border_one_late", applies=_has_border)
class _TakesTwice(_InChunks):
    """The last token of a chunk is also the first of the next."""

    def _chunk(self, steps: Recurrence, start: int, S: Tensor) -> Scanned:
        if start:
            _, S = token_by_token(steps.cut(start - 1, start), S)
        return at_once(steps.cut(start, start + CHUNK), S)


@in_state("last_chunk_padded_with_decay", applies=both(_decodes, lambda case: context(case) % CHUNK != 0))
class _PaddedChunk(RecurrentLayer):
    """The last chunk is filled up with copies of its last gate: the state forgets for tokens that are not there."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        out, S = super()._scan(steps, state)
        missing = -steps.length % CHUNK if state is None else 0
        return out, S * (missing * steps.g[:, :, -1:].to(S.dtype)).exp().mT


# ---- what is carried to the next call --------------------------------------------------------------------------------


@in_state("state_dropped_at_decode", applies=_decodes)
class _DropsState(RecurrentLayer):
    """A call with a cache begins from an empty state (transformers#45513)."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        return super()._scan(steps, None)


@in_state("state_in_bfloat16", applies=_decodes)
class _HalfState(RecurrentLayer):
    """The state is kept in half precision between two calls."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        return super()._scan(steps, None if state is None else state.to(torch.bfloat16).to(state.dtype))


@in_state("state_not_updated_at_decode", applies=lambda case: _decodes(case) and case.seq_len - context(case) > 1)
class _StaleState(RecurrentLayer):
    """Single tokens read the state and leave it as it was."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        out, S = super()._scan(steps, state)
        return out, S if state is None else state.clone()


@in_state("state_of_the_first_in_the_batch", applies=both(_decodes, several_rows))
class _FirstState(RecurrentLayer):
    """Every sequence goes on from the state of the first: an index without the batch."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        return super()._scan(steps, None if state is None else state[:1].expand_as(state))


@in_state("state_transposed", applies=both(_decodes, lambda case: case.variant in ("lightning", "kda")))
class _TransposedState(RecurrentLayer):
    """Stored by value and key, read by key and value: of a square state nothing else would tell."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        square = state is not None and state.shape[2] == state.shape[3]
        return super()._scan(steps, state.mT if state is not None and square and self._is_square else state)

    @property
    def _is_square(self) -> bool:
        return not hasattr(self, "sizes")


@in_state("state_left_from_the_last_call", applies=lambda case: case.phase != "decode")
class _Leftover(RecurrentLayer):
    """A call without a cache begins where the call before it ended: another sequence's state."""

    def _scan(self, steps: Recurrence, state: Tensor | None) -> Scanned:
        left = self.__dict__.get("left")
        fits = state is None and left is not None and left.dtype == steps.widened().q.dtype
        out, S = super()._scan(steps, left if fits else state)
        self.__dict__["left"] = S.detach()
        return out, S


# ---- convolutions ----------------------------------------------------------------------------------------------------


class _Convolving(RecurrentLayer):
    """Right but for what `_inputs`, `_weight` and `_after` do."""

    def _convolve(self, x: Tensor, conv: nn.Conv1d, cache: StateCache | None) -> Tensor:
        past = None if cache is None else cache.get("convolution")
        past = x.new_zeros(x.shape[0], x.shape[2], CONV) if past is None else past.clone()
        seen = torch.cat((past, x.mT), dim=2)
        if cache is not None:
            cache.put("convolution", self._kept(seen))
        return self._after(F.conv1d(self._inputs(seen), self._weight(conv), self._bias(conv), groups=conv.groups)).mT

    def _inputs(self, seen: Tensor) -> Tensor:
        return seen[:, :, 1:]

    def _kept(self, seen: Tensor) -> Tensor:
        return seen[:, :, -CONV:]

    def _weight(self, conv: nn.Conv1d) -> Tensor:
        return conv.weight

    def _bias(self, conv: nn.Conv1d) -> Tensor | None:
        return conv.bias

    def _after(self, mixed: Tensor) -> Tensor:
        return F.silu(mixed)


@in_state("convolution_window_one_early", applies=_convolves)
class _EarlyWindow(_Convolving):
    """The window ends one token before the newest."""

    def _inputs(self, seen: Tensor) -> Tensor:
        return seen[:, :, :-1]


@in_state("convolution_weights_reversed", applies=_convolves)
class _ReversedWeights(_Convolving):
    """A convolution where the checkpoint holds a correlation: the weights back to front."""

    def _weight(self, conv: nn.Conv1d) -> Tensor:
        return conv.weight.flip(2)


@in_state("convolution_without_activation", applies=_convolves)
class _Linear(_Convolving):
    """The silu behind the convolution is forgotten."""

    def _after(self, mixed: Tensor) -> Tensor:
        return mixed


@in_state("convolution_bias_missing", applies=_of("mamba2"))
class _NoBias(_Convolving):
    """The fused kernel is called without the convolution's bias."""

    def _bias(self, conv: nn.Conv1d) -> Tensor | None:
        return None


@in_state("convolution_state_dropped", applies=both(_convolves, _decodes))
class _NoPast(_Convolving):
    """A decoded token is convolved with zeros in the place of its predecessors."""

    def _kept(self, seen: Tensor) -> Tensor:
        return torch.zeros_like(seen[:, :, -CONV:])


@in_state("convolution_state_one_early", applies=both(_convolves, _decodes))
class _EarlyPast(_Convolving):
    """The window that is kept ends one token before the newest."""

    def _kept(self, seen: Tensor) -> Tensor:
        return seen[:, :, -CONV - 1 : -1]


# ---- padding ---------------------------------------------------------------------------------------------------------


@in_state("padding_leaks_into_the_state", applies=_pads)
class _PaddingLeaks(RecurrentLayer):
    """Padded tokens are written, and let the state forget, like all others (transformers#47086)."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None, **rules: Any) -> Tensor:
        return super().forward(x, **rules)


@in_state("padding_ignored_in_a_batch_of_one", applies=both(_pads, lambda case: case.batch == 1))
class _NoMaskAtOne(RecurrentLayer):
    """The padding mask is skipped where the batch is one sequence (transformers#46773)."""

    def forward(self, x: Tensor, *, mask: Tensor | None = None, **rules: Any) -> Tensor:
        return super().forward(x, mask=None if x.shape[0] == 1 else mask, **rules)


@in_state("padding_leaks_through_the_bias", applies=both(_pads, _of("mamba2")))
class _PaddingBias(RecurrentLayer):
    """Padded tokens are zeroed before the convolution alone: its bias makes something of them again."""

    def _run(self, steps: Recurrence, shown: Tensor | None, cache: StateCache | None) -> Tensor:
        return super()._run(steps, None, cache)
