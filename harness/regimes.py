"""Inputs that make bugs visible: plain Gaussian ones hide overflow, cancellation, bad masks and lost precision."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness import masks
from harness.case import Case


def _plain(noise: Tensor, _: torch.Generator) -> Tensor:
    return noise


def _peaked(noise: Tensor, _: torch.Generator) -> Tensor:
    """Logits in the tens: the softmax becomes one-hot, and exp overflows without the max subtraction."""
    return 6 * noise


def _offset(noise: Tensor, _: torch.Generator) -> Tensor:
    """A common offset: scores are large and nearly equal, so rounded scores show."""
    return noise + 8


def _tiny(noise: Tensor, _: torch.Generator) -> Tensor:
    return 1e-3 * noise


def _wide(noise: Tensor, generator: torch.Generator) -> Tensor:
    """Tokens over three orders of magnitude."""
    return noise * 10 ** (3 * torch.rand(*noise.shape[:2], 1, generator=generator) - 2)


SHAPES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "plain": _plain,
    "peaked": _peaked,
    "offset": _offset,
    "tiny": _tiny,
    "wide": _wide,
    "poison": _plain,
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
