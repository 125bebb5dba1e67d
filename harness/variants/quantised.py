"""A KV cache whose older tokens are codes of 8 or 4 bits; specs/quantised.py says which, and what they weigh.

Attention is given what the cache holds: the dequantised tokens, the newest of them as they came. A token's codes depend
on it and its group alone, so a prompt leaves the same codes whether it came at once, in pieces or token by token. A NaN
spoils its group: along tokens its own token, along channels its neighbours too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.variants.cache import KVCache
from harness.variants.specs.quantised import Quantisation

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
FP8_SMALLEST_STEP = 2.0**-9  # between its numbers nearest to 0
LEVELS = {"int8": 255, "int4": 15}


class Coded(NamedTuple):
    """Codes (B, heads, tokens, width or half of it) and, of each group, its scale and its least value.

    Scale and least are (B, heads, tokens / block, width / channels); fp8 has no least value.
    """

    codes: Tensor
    scale: Tensor
    least: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        pair = (self.codes, self.scale)
        return pair if self.least is None else (*pair, self.least)


def encode(x: Tensor, how: Quantisation) -> Coded:
    """x (B, heads, tokens, width), the tokens a whole number of blocks."""
    B, heads, tokens, width = x.shape
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    channels = how.channels(width)
    groups = wide.view(B, heads, tokens // how.block, how.block, width // channels, channels)
    if how.format == "fp8":
        scale = groups.abs().amax((3, 5), keepdim=True) / FP8_LARGEST
        # Rounded, a quotient may come out just above the largest number, which torch would make NaN.
        codes = (groups / _or_one(scale)).clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8).view(x.shape)
        return Coded(codes, scale.squeeze(5).squeeze(3), None)
    least = groups.amin((3, 5), keepdim=True)
    step = (groups.amax((3, 5), keepdim=True) - least) / LEVELS[how.format]
    numbers = ((groups - least) / _or_one(step)).round().clamp(0, LEVELS[how.format])
    codes = numbers.nan_to_num(0.0).to(torch.uint8).view(x.shape)
    if how.format == "int4":
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return Coded(codes, step.squeeze(5).squeeze(3), least.squeeze(5).squeeze(3))


def decode(coded: Coded, how: Quantisation, dtype: torch.dtype) -> Tensor:
    """(B, heads, tokens, width)"""
    scale, wide = coded.scale, coded.scale.dtype
    codes = coded.codes
    if how.format == "int4":
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    groups = codes.to(wide).unflatten(2, (scale.shape[2], how.block)).unflatten(-1, (scale.shape[3], -1))
    values = groups * scale[:, :, :, None, :, None]
    if coded.least is not None:
        values = values + coded.least[:, :, :, None, :, None]
    return values.flatten(-2).flatten(2, 3).to(dtype)


def step_bound(coded: Coded, how: Quantisation, dtype: torch.dtype) -> Tensor:
    """How far each dequantised number can be from what was encoded: half a step, and the rounding of both ways.

    (B, heads, tokens, width), in float64.
    """
    values = decode(coded, how, torch.float64 if coded.scale.dtype == torch.float64 else torch.float32).double()
    scale = coded.scale.double()[:, :, :, None, :, None]
    shape = (scale.shape[2], how.block), (scale.shape[4], -1)
    groups = values.unflatten(2, shape[0]).unflatten(-1, shape[1])
    if how.format == "fp8":
        numbers = torch.where(scale == 0, 0.0, groups / _or_one(scale)).abs()
        exponent = torch.floor(torch.log2(numbers.clamp(min=1e-30)))
        half_step = scale * (torch.exp2(exponent - 3)).clamp(min=FP8_SMALLEST_STEP) / 2
        size = groups.abs()
    else:
        half_step = scale.expand_as(groups) / 2
        least = coded.least
        assert least is not None
        size = groups.abs() + least.double().abs()[:, :, :, None, :, None] + LEVELS[how.format] * scale
    # Three operations each way in the dtype of the scales, and one rounding to that of the stream.
    rounding = 6 * torch.finfo(coded.scale.dtype).eps * size + torch.finfo(dtype).eps / 2 * groups.abs()
    return (half_step + rounding).flatten(-2).flatten(2, 3)


def _or_one(scale: Tensor) -> Tensor:
    """A group of equal numbers has a step of 0, and all its codes are 0."""
    return torch.where(scale == 0, 1.0, scale)


class QuantisedKVCache(KVCache):
    """As KVCache, for inference alone: codes have no gradient."""

    def __init__(self, capacity: int = 0, how: Quantisation | None = None) -> None:
        super().__init__(capacity)
        self.how = how or Quantisation()
        self._coded: tuple[tuple[Tensor, ...], ...] = ()  # of each stream, with room for more
        self._slots = 0  # tokens that there is room for as codes
        self._held = 0  # tokens held as codes; the others, newer ones, stand as they came in the buffers

    def append(self, *streams: Tensor) -> tuple[Tensor, ...]:
        self._check(streams)
        if torch.is_grad_enabled() and any(t.requires_grad for t in streams):
            raise ValueError("a quantised cache has no gradient: call it under torch.no_grad()")
        start, end = self.length, self.length + streams[0].shape[2]
        target = self.how.quantised(end)
        self._reserve(end, streams)
        kept = start - self._held
        fresh = [torch.cat((b[:, :, :kept], t), dim=2) for b, t in zip(self._buffers, streams, strict=True)]
        coded = target - self._held
        if coded > 0:
            for room, stream in zip(self._coded, fresh, strict=True):
                new = encode(stream[:, :, :coded], self.how)
                for held, part in zip(room, new.tensors, strict=True):
                    at = self._held * held.shape[2] // self._slots
                    held[:, :, at : at + part.shape[2]] = part
            self._held = target
        for buffer, stream in zip(self._buffers, fresh, strict=True):
            buffer[:, :, : end - self._held] = stream[:, :, max(coded, 0) :]
        self.length = end
        return self.streams()

    def streams(self) -> tuple[Tensor, ...]:
        pairs = zip(self.coded(), self.waiting(), strict=True)
        return tuple(torch.cat((decode(c, self.how, w.dtype), w), dim=2) for c, w in pairs)

    def waiting(self) -> tuple[Tensor, ...]:
        """Of each stream, the tokens that are not codes."""
        return tuple(buffer[:, :, : self.length - self._held] for buffer in self._buffers)

    def coded(self) -> tuple[Coded, ...]:
        """What the tokens held as codes are made of, for each stream."""
        return tuple(_cut(room, self._held, self._slots) for room in self._coded)

    def error_bound(self) -> tuple[Tensor, ...]:
        """For each stream, how far any number given can be from what was appended; 0 for what is not quantised."""
        found = []
        for coded, waiting in zip(self.coded(), self.waiting(), strict=True):
            bound = step_bound(coded, self.how, waiting.dtype)
            found.append(torch.cat((bound, bound.new_zeros(waiting.shape)), dim=2))
        return tuple(found)

    def crop(self, length: int) -> None:
        """Forget the tokens from `length` on; whole groups of tokens alone, where they are quantised together."""
        if 0 <= length < self._held and length % self.how.block:
            block = self.how.block
            rule = f"the first {self._held} tokens are quantised in groups of {block}, which cannot be cut"
            raise ValueError(f"length = {length}: {rule}")
        super().crop(length)
        self._held = min(self._held, length)

    def get_cache_info(self) -> dict[str, Any]:
        plain = sum(b.shape[0] * b.shape[1] * self.length * b.shape[3] * b.element_size() for b in self._buffers)
        how = {"format": self.how.format, "per": self.how.per, "group": self.how.group, "residual": self.how.residual}
        saved = {"quantised_tokens": self._held, "full_precision_bytes": plain}
        ratio = plain / self.allocated_bytes if self.allocated_bytes else None
        return {**super().get_cache_info(), **how, **saved, "compression": ratio}

    def _storages(self) -> Sequence[Tensor]:
        return (*self._buffers, *(tensor for room in self._coded for tensor in room))

    def _reserve(self, length: int, like: tuple[Tensor, ...]) -> None:
        if self._buffers and length <= self.capacity:
            return
        had = bool(self._buffers)
        self.capacity = max(length, 2 * self.capacity if had else self.capacity)
        old, held = (self._coded, self._buffers), self.length - self._held
        slots = self.how.quantised(self.capacity)
        waiting = min(self.capacity, self.how.waiting)
        self._buffers = tuple(t.new_empty((*t.shape[:2], waiting, t.shape[3])) for t in like)
        self._coded = tuple(self._room(t, slots) for t in like)
        for new, before in zip(self._buffers, old[1], strict=False):
            new[:, :, :held] = before[:, :, :held]
        for room, before_room in zip(self._coded, old[0], strict=False):
            for new, before in zip(room, before_room, strict=True):
                size = self._held * before.shape[2] // max(self._slots, 1)
                new[:, :, :size] = before[:, :, :size]
        self._slots = slots

    def _room(self, like: Tensor, slots: int) -> tuple[Tensor, ...]:
        """For so many tokens, laid out as `encode` gives them."""
        one = like.new_zeros((*like.shape[:2], self.how.block, like.shape[3]))
        blocks = slots // self.how.block
        return tuple(
            torch.empty((*t.shape[:2], blocks * t.shape[2], t.shape[3]), dtype=t.dtype, device=t.device)
            for t in encode(one, self.how).tensors
        )


def _cut(room: tuple[Tensor, ...], tokens: int, slots: int) -> Coded:
    """The parts of `tokens` of the `slots` tokens that there is room for."""
    parts = [t[:, :, : tokens * t.shape[2] // max(slots, 1)] for t in room]
    return Coded(parts[0], parts[1], parts[2] if len(parts) > 2 else None)
