"""Masks: each is a predicate on positions; tensors come last, and torch only then.

A mask is the conjunction of three parts, so that a kernel may get the structure (`causal`, `window`) while the
reference gets the dense tensor made from the same predicate. Positions are absolute, so a decode step and a
prefill see the same mask. Bool: True = attends.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """Integer tensors that broadcast to (B, H, L, S): batch row, head, query position, key position."""

    b: Any
    h: Any
    i: Any
    j: Any
    seq_len: int
    heads: int


@dataclass(frozen=True)
class MaskRule:
    name: str
    title: str
    causal: bool = False
    window: Callable[[int], int] | None = None  # seq_len -> W visible keys, self included
    allowed: Callable[[Positions], Any] | None = None  # whatever is neither causal nor window
    bias: Callable[[Positions], Any] | None = None  # added to the scores
    has_dead_rows: bool = False


def positions(batch: int, heads: int, queries: range, keys: range, seq_len: int) -> Positions:
    import torch

    def along(values: range, dim: int) -> "Tensor":
        shape = [1, 1, 1, 1]
        shape[dim] = len(values)
        return torch.arange(values.start, values.stop).view(shape)

    return Positions(
        b=along(range(batch), 0),
        h=along(range(heads), 1),
        i=along(queries, 2),
        j=along(keys, 3),
        seq_len=seq_len,
        heads=heads,
    )


def dense(rule: MaskRule, at: Positions, dtype: Any) -> "Tensor | None":
    """The whole mask as one tensor in SDPA's convention; None if it hides nothing and adds nothing."""
    import torch

    visible = torch.ones((), dtype=torch.bool)
    if rule.causal:
        visible = visible & (at.j <= at.i)
    if rule.window is not None:
        distance = at.i - at.j
        visible = visible & (distance >= 0) & (distance < rule.window(at.seq_len))
    if rule.allowed is not None:
        visible = visible & rule.allowed(at)
    if rule.bias is None:
        return None if bool(visible.all()) else visible
    return torch.where(visible, rule.bias(at).to(dtype), torch.tensor(float("-inf"), dtype=dtype))


def remainder(rule: MaskRule, at: Positions, dtype: Any) -> "Tensor | None":
    """The part of the mask that `causal` and `window` do not say."""
    return dense(replace(rule, causal=False, window=None), at, dtype)


def _scramble(*terms: Any) -> Any:
    """A hash of positions, uniform over 0..9999: random-looking masks that need no generator and no storage."""
    primes = (15_485_863, 104_729, 1_299_709, 7_919)
    total: Any = sum((term + 1) * prime for prime, term in zip(primes, terms, strict=False))
    total = (total ^ (total >> 7)) * 2_654_435_761 % 4_294_967_296
    return (total ^ (total >> 15)) % 10_000


def _padding(at: Positions) -> Any:
    """Valid tokens of each batch row: 3/4 of seq_len and fewer, never none."""
    return at.j < at.seq_len - at.seq_len // 4 - (at.b * 3) % (at.seq_len // 4 + 1)


def _left_padding(at: Positions) -> Any:
    """Tokens before the start of each batch row's text, as when prompts of unlike length are decoded together."""
    return at.j >= (1 + (at.b * 3) % (at.seq_len // 4 + 1) if at.seq_len > 1 else 0)


def _bool_random(at: Positions) -> Any:
    return (_scramble(at.b, at.i, at.j) < 7_000) | (at.i == at.j)


def _per_head(at: Positions) -> Any:
    return (_scramble(at.h, at.i, at.j) < 5_000) | (at.i == at.j)


def _prefix_lm(at: Positions) -> Any:
    return (at.j <= at.i) | (at.j < at.seq_len // 4)


def _document(at: Positions) -> Any:
    """Three documents of unequal length packed into one row."""
    first, second = at.seq_len // 5, at.seq_len // 2

    def number(position: Any) -> Any:
        return (position >= first).long() + (position >= second).long()

    return number(at.i) == number(at.j)


def _dead_rows(at: Positions) -> Any:
    """Every third query attends nothing."""
    return (at.i % 3 != 1) & (at.j <= at.i)


def _float_bias(at: Positions) -> Any:
    return _scramble(at.b, at.h, at.i, at.j).double() / 2_500 - 2


def _alibi(at: Positions) -> Any:
    """Press et al. 2022: slopes 2^(-8 (h+1) / H)."""
    return -(2.0 ** (-8.0 * (at.h + 1).double() / at.heads)) * (at.i - at.j).abs()


MASKS: Registry[MaskRule] = Registry("mask")
for _rule in (
    MaskRule("none", "every query sees every key"),
    MaskRule("causal", "keys up to the query's own position", causal=True),
    MaskRule("padding", "a valid length per batch row, padded on the right", allowed=_padding),
    MaskRule("causal_padding", "causal and padding", causal=True, allowed=_padding),
    MaskRule(
        "left_padding",
        "causal, and padded on the left by other lengths per batch row",
        causal=True,
        allowed=_left_padding,
        has_dead_rows=True,
    ),
    MaskRule("bool_random", "70 % of the keys, at random, per batch row", allowed=_bool_random),
    MaskRule("float_bias", "a bias per batch row, head, query and key, added to the scores", bias=_float_bias),
    MaskRule("sliding_window", "the last seq_len/4 keys, self included", window=lambda s: max(1, s // 4)),
    MaskRule("prefix_lm", "causal, but the first quarter is seen by all", allowed=_prefix_lm),
    MaskRule("document", "packed documents do not see each other", allowed=_document),
    MaskRule("alibi", "causal with ALiBi's distance bias per head", causal=True, bias=_alibi),
    MaskRule("per_head", "a different bool mask for each head", allowed=_per_head),
    MaskRule("dead_rows", "causal, and every third query may attend nothing", allowed=_dead_rows, has_dead_rows=True),
):
    MASKS.add(_rule.name, _rule)
