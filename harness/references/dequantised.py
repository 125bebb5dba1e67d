"""What a quantised cache holds, decoded number by number from its codes, in float64."""

from typing import Any

import torch
from torch import Tensor


def dequantised(cache: Any) -> tuple[Tensor, ...]:
    """Each stream (B, heads, S, width), from `cache.coded()`, `cache.how` and the tokens that wait uncoded.

    Nothing of the cache's own decoding is used: fp8 is read from its bits.
    """
    found = []
    for coded, waiting in zip(cache.coded(), cache.waiting(), strict=True):
        codes = coded.codes
        if cache.how.format == "fp8":
            numbers = _fp8_values()[codes.view(torch.uint8).long()]
        elif cache.how.format == "int4":
            halves = codes.long()
            numbers = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=torch.float64)
            numbers[..., 0::2], numbers[..., 1::2] = halves % 16, halves // 16
        else:
            numbers = codes.double()
        S, width = numbers.shape[2:]
        token = torch.arange(S) // max(1, S // max(1, coded.scale.shape[2]))
        channel = torch.arange(width) // (width // coded.scale.shape[3])
        scale = coded.scale.double()[:, :, token][..., channel] if S else numbers
        values = numbers * scale
        if coded.least is not None and S:
            values = values + coded.least.double()[:, :, token][..., channel]
        found.append(torch.cat((values, waiting.double()), dim=2))
    return tuple(found)


def _fp8_values() -> Tensor:
    """Of all 256 patterns: a sign, four bits of exponent (bias 7), three of mantissa; all ones is NaN."""
    values = []
    for bits in range(256):
        sign, exponent, mantissa = -1.0 if bits & 128 else 1.0, bits >> 3 & 15, bits & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(float("nan") if bits & 127 == 127 else sign * size)
    return torch.tensor(values, dtype=torch.float64)
