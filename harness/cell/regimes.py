"""Inputs that make bugs visible: plain Gaussian ones hide overflow, cancellation, bad masks and lost precision."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.case import Case
from harness.variants import masks

SMOOTH_OVER = 6.0  # tokens along each axis over which a smooth field stays much the same
WAVES = 64


def _locally_smooth(noise: Tensor, generator: torch.Generator) -> Tensor:
    """Tokens of a video: a smooth random field over time, height and width, and a little noise.

    Scores spread by about 4, so that the softmax chooses: of flat attention nothing can be left out.
    """
    return 2 * smooth_field(noise.shape, generator) + 0.1 * noise


def smooth_field(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """(B, L, E), each channel a Gaussian field of variance 1: a sum of random waves, equal for neighbouring tokens."""
    B, L, E = shape
    waves = torch.randn(B, 3, WAVES, generator=generator) / SMOOTH_OVER
    phases = 2 * math.pi * torch.rand(B, 1, WAVES, generator=generator)
    values = (2 / WAVES) ** 0.5 * torch.cos(video_positions(L) @ waves + phases)  # (B, L, WAVES)
    return values @ torch.randn(B, WAVES, E, generator=generator)


def video_positions(length: int) -> Tensor:
    """(L, 3): time, height and width of each token, in Z-order: a run of tokens is a box, as SpargeAttn permutes them.

    Row after row, a block of 64 tokens would reach across the whole picture.
    """
    index = torch.arange(length)
    position = torch.zeros(length, 3)
    for bit in range(length.bit_length()):
        position[:, 2 - bit % 3] += (index >> bit & 1) * 2.0 ** (bit // 3)
    return position


def _text_like(noise: Tensor, generator: torch.Generator) -> Tensor:
    """Neighbours resemble each other, and a few tokens, the first among them, stand out for all."""
    x = noise.clone()
    for i in range(1, x.shape[1]):
        x[:, i] = 0.9 * x[:, i - 1] + (1 - 0.9**2) ** 0.5 * noise[:, i]
    heavy = torch.rand(*x.shape[:2], 1, generator=generator) < 0.01
    heavy[:, 0] = True
    return torch.where(heavy, 4.0, 2.0) * x


SHAPES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "plain": lambda noise, _: noise,
    # Logits in the tens: the softmax becomes one-hot, and exp overflows without the max subtraction.
    "peaked": lambda noise, _: 6 * noise,
    # A common offset: scores are large and nearly equal, so rounded scores show.
    "offset": lambda noise, _: noise + 8,
    "tiny": lambda noise, _: 1e-3 * noise,
    # Tokens over three orders of magnitude.
    "wide": lambda noise, draw: noise * 10 ** (3 * torch.rand(*noise.shape[:2], 1, generator=draw) - 2),
    "poison": lambda noise, _: noise,
    "locally_smooth": _locally_smooth,
    "text_like": _text_like,
}


@dataclass(frozen=True)
class Inputs:
    """`candidate_x` differs from `x` only in the poison regime, and there only in tokens nobody else may see."""

    regime: str
    x: Tensor  # (B, S, E)
    candidate_x: Tensor
    poisoned: Tensor | None = None  # (B, S), True = the candidate's token is garbage


def make_inputs(case: Case, regime: str, generator: torch.Generator, *, poison: float | None) -> Inputs | None:
    """None where the regime does not apply: nothing hidden to poison, or gradients, which poison would reach anyway.

    `poison` is NaN for kernels that promise not to leak; None means finite garbage, which no mask may let through.
    """
    noise = torch.randn(case.batch, case.seq_len, case.embed_dim, generator=generator)
    dtype = getattr(torch, case.dtype)
    x = SHAPES[regime](noise, generator).to(dtype)
    if regime != "poison":
        return Inputs(regime, x, x)
    hidden = hidden_tokens(case)
    if case.phase == "train" or not bool(hidden.any()):
        return None
    noise = 50 * torch.randn(x.shape, generator=generator)
    garbage = noise.to(dtype) if poison is None else torch.full_like(x, poison)
    spoilt = torch.where(hidden[..., None], garbage, x)
    return Inputs(regime, torch.where(hidden[..., None], torch.zeros_like(x), x), spoilt, hidden)


def hidden_tokens(case: Case) -> Tensor:
    """(B, S): tokens that no query but their own may see, whatever the head."""
    S = case.seq_len
    at = masks.positions(case.batch, case.heads, range(S), range(S), S)
    dense = masks.dense(masks.MASKS[case.mask], at, torch.float32)
    if dense is None:
        return torch.zeros(case.batch, S, dtype=torch.bool)
    visible = dense if dense.dtype == torch.bool else dense != float("-inf")
    seen = visible.any(1).expand(case.batch, S, S) & ~torch.eye(S, dtype=torch.bool)
    return ~seen.any(1)
