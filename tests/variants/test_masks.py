"""Every mask against a predicate written as plain loops, and its parts against the whole."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.registry import UnknownName
from harness.variants.masks import MASKS, dense, positions, remainder

B, H = 3, 2


def noise(*terms: int) -> int:
    """The positions' hash in Python's own integers: nothing overflows here."""
    total = sum((term + 1) * prime for term, prime in zip(terms, (15_485_863, 104_729, 1_299_709, 7_919), strict=False))
    total = (total ^ (total >> 7)) * 2_654_435_761 % 2**32
    return (total ^ (total >> 15)) % 10_000


def valid_length(b: int, s: int) -> int:
    quarter = s // 4
    return s - quarter - (3 * b) % (quarter + 1)


def document_of(position: int, s: int) -> int:
    if position < s // 5:
        return 0
    return 1 if position < s // 2 else 2


# (batch row, head, query, key, sequence length) -> may it attend?
VISIBLE: dict[str, Callable[[int, int, int, int, int], bool]] = {
    "none": lambda b, h, i, j, s: True,
    "causal": lambda b, h, i, j, s: j <= i,
    "padding": lambda b, h, i, j, s: j < valid_length(b, s),
    "causal_padding": lambda b, h, i, j, s: j <= i and j < valid_length(b, s),
    "left_padding": lambda b, h, i, j, s: j <= i and j >= (1 + 3 * b % (s // 4 + 1) if s > 1 else 0),
    "bool_random": lambda b, h, i, j, s: i == j or noise(b, i, j) < 7000,
    "float_bias": lambda b, h, i, j, s: True,
    "sliding_window": lambda b, h, i, j, s: 0 <= i - j < max(1, s // 4),
    "prefix_lm": lambda b, h, i, j, s: j <= i or j < s // 4,
    "document": lambda b, h, i, j, s: document_of(i, s) == document_of(j, s),
    "alibi": lambda b, h, i, j, s: j <= i,
    "per_head": lambda b, h, i, j, s: i == j or noise(h, i, j) < 5000,
    "dead_rows": lambda b, h, i, j, s: i % 3 != 1 and j <= i,
}
BIAS: dict[str, Callable[[int, int, int, int], float]] = {
    "float_bias": lambda b, h, i, j: noise(b, h, i, j) / 2500 - 2,
    "alibi": lambda b, h, i, j: -(2.0 ** (-8.0 * (h + 1) / H)) * abs(i - j),
}
every_mask = pytest.mark.parametrize("name", list(MASKS))
lengths = pytest.mark.parametrize("s", [1, 2, 3, 4, 5, 8, 13, 20])


def by_loops(name: str, queries: range, keys: range, s: int) -> np.ndarray:
    """Scores to add: the bias, or 0 where a key is visible, and -inf where not."""
    out = np.zeros((B, H, len(queries), len(keys)))
    for b in range(B):
        for h in range(H):
            for row, i in enumerate(queries):
                for column, j in enumerate(keys):
                    if not VISIBLE[name](b, h, i, j, s):
                        out[b, h, row, column] = -math.inf
                    elif name in BIAS:
                        out[b, h, row, column] = BIAS[name](b, h, i, j)
    return out


def as_scores(mask: Tensor | None, shape: tuple[int, ...]) -> np.ndarray:
    """None, bool or float, as the scores they stand for."""
    if mask is None:
        return np.zeros(shape)
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    found: np.ndarray = mask.double().expand(shape).numpy()
    return found


def made(name: str, queries: range, keys: range, s: int, dtype: torch.dtype = torch.float64) -> Tensor | None:
    return dense(MASKS[name], positions(B, H, queries, keys, s), dtype)


def test_the_loops_know_every_mask() -> None:
    assert set(MASKS) == set(VISIBLE)
    assert set(BIAS) == {name for name in MASKS if MASKS[name].bias is not None}
    for name in MASKS:
        assert MASKS[name].name == name
        assert MASKS[name].title


@every_mask
@lengths
def test_dense_equals_the_loops(name: str, s: int) -> None:
    mask = made(name, range(s), range(s), s)
    expected = by_loops(name, range(s), range(s), s)
    np.testing.assert_array_equal(as_scores(mask, expected.shape), expected)


@every_mask
@pytest.mark.parametrize("s", [4, 9, 16])
def test_decode_slices_are_rows_of_the_full_mask(name: str, s: int) -> None:
    """Positions are absolute: a prefill of t tokens, then one token at a time, sees the same mask."""
    full = by_loops(name, range(s), range(s), s)
    for start, end in [(0, s - 2), *((t, t + 1) for t in range(s - 2, s)), (1, 3)]:
        mask = made(name, range(start, end), range(end), s)
        part = full[:, :, start:end, :end]
        np.testing.assert_array_equal(as_scores(mask, part.shape), part)


@every_mask
@lengths
def test_dead_rows_only_where_declared(name: str, s: int) -> None:
    visible = np.isfinite(as_scores(made(name, range(s), range(s), s), (B, H, s, s)))
    dead = ~visible.any(-1)
    if MASKS[name].has_dead_rows:
        starts = np.array([1 + 3 * b % (s // 4 + 1) if s > 1 else 0 for b in range(B)])[:, None, None]
        hidden = {"dead_rows": np.arange(s) % 3 == 1, "left_padding": np.arange(s) < starts}[name]
        np.testing.assert_array_equal(dead, np.broadcast_to(hidden, dead.shape))
    else:
        assert not dead.any()


@every_mask
@lengths
def test_structure_and_remainder_make_the_whole(name: str, s: int) -> None:
    """A kernel gets `causal` and `window` and the rest; the reference gets one tensor. Both must mean the same."""
    rule = MASKS[name]
    rest = remainder(rule, positions(B, H, range(s), range(s), s), torch.float64)
    together = as_scores(rest, (B, H, s, s)).copy()
    window = None if rule.window is None else rule.window(s)
    for i in range(s):
        for j in range(s):
            hidden = (rule.causal and j > i) or (window is not None and not 0 <= i - j < window)
            if hidden:
                together[:, :, i, j] = -math.inf
    np.testing.assert_array_equal(together, by_loops(name, range(s), range(s), s))


@pytest.mark.parametrize("name", ["causal", "sliding_window", "none"])
def test_pure_structure_leaves_no_remainder(name: str) -> None:
    assert remainder(MASKS[name], positions(B, H, range(8), range(8), 8), torch.float32) is None


def test_none_is_none_and_hiding_nothing_is_none() -> None:
    assert made("none", range(7), range(7), 7) is None
    assert made("causal", range(6, 7), range(7), 7) is None  # the last query sees every key
    assert made("causal", range(1), range(1), 1) is None
    assert made("causal", range(7), range(7), 7) is not None


@every_mask
def test_kind_and_dtype(name: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        mask = made(name, range(9), range(9), 9, dtype)
        if name == "none":
            assert mask is None
            continue
        assert mask is not None
        assert mask.dtype == (dtype if name in BIAS else torch.bool)
        assert mask.ndim == 4
        assert torch.broadcast_shapes(mask.shape, (B, H, 9, 9)) == (B, H, 9, 9)
        assert not bool(mask.isnan().any())


def test_masks_differ_along_the_axes_they_claim() -> None:
    s = 32
    by_row = made("bool_random", range(s), range(s), s)
    by_head = made("per_head", range(s), range(s), s)
    padded = made("padding", range(s), range(s), s)
    assert by_row is not None and by_head is not None and padded is not None
    assert by_row.shape == (B, 1, s, s)
    assert by_head.shape == (1, H, s, s)
    assert padded.shape == (B, 1, 1, s)
    assert not torch.equal(by_row[0], by_row[1])
    assert not torch.equal(by_head[:, 0], by_head[:, 1])
    assert len({int(row.sum()) for row in padded}) == B
    assert 0.66 < float(by_row.float().mean()) < 0.76
    assert 0.45 < float(by_head.float().mean()) < 0.57
    bias = made("float_bias", range(s), range(s), s)
    assert bias is not None
    assert -2 <= float(bias.min()) < -1.9
    assert 1.9 < float(bias.max()) < 2
    assert abs(float(bias.mean())) < 0.1


def test_the_hash_stays_right_at_long_lengths() -> None:
    """Products beyond 2**63 wrap in torch's integers; modulo 2**32 that changes nothing."""
    start = 1_000_000
    keys = range(start, start + 50)
    mask = dense(MASKS["bool_random"], positions(2, 1, range(start, start + 1), keys, start + 50), torch.float32)
    assert mask is not None
    expected = [[start == j or noise(b, start, j) < 7000 for j in keys] for b in range(2)]
    assert mask[:, 0, 0].tolist() == expected


def test_alibi_has_the_papers_slopes() -> None:
    mask = dense(MASKS["alibi"], positions(1, 8, range(2), range(2), 2), torch.float64)
    assert mask is not None
    assert (-mask[0, :, 1, 0]).tolist() == [2.0**-n for n in range(1, 9)]


def test_an_unknown_mask_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="unknown mask 'diagonal'; known: none, causal, padding"):
        MASKS["diagonal"]
