"""Where a tensor is wrong: the sentence says it, of errors that are put where it should say."""

import math

import pytest
import torch

from harness.battery.axes import point
from harness.battery.call import make_call
from harness.candidate.examinee import InProcess
from harness.cell.golden import in_float64, outcome, textbook
from harness.diagnosis.evidence import Witness
from harness.diagnosis.place import described, find_place
from harness.diagnosis.weights import weights_used

LIMIT = 1e-9
CALL = make_call(point(70, 40, 16, mask="dead rows", batch="2", kv_heads="3"), 1).request
MASK = CALL.mask
assert MASK is not None
GOLDEN = outcome(in_float64(CALL), textbook)["out"]  # (2, 3, 70, 16)


def placed(change) -> str:
    got = GOLDEN.clone()
    change(got)
    place = find_place("out", got, GOLDEN, LIMIT, CALL)
    assert place is not None
    return place.sentence


@pytest.mark.parametrize(
    ("at", "n", "words"),
    [
        ([3], 9, "row 3"),
        ([8], 9, "row 8 (the last)"),
        ([0, 1], 9, "rows 0 to 1 (the first 2)"),
        (range(64, 70), 70, "rows from 64 on (the last, partial tile of 64)"),
        (range(60, 70), 70, "rows from 60 on"),
        (range(0, 64, 8), 64, "every 8th row, from 0 on"),
        (range(1, 9, 2), 9, "every 2nd row, from 1 on"),
        ([i for i in range(64) if i % 16 in (3, 4)], 64, "rows 3 to 4, and so in every 16 rows"),
        ([i for i in range(9) if i != 5], 9, "all rows but 5"),
        ([1, 3, 4], 9, "3 of 9 rows (1, 3, 4)"),
    ],
)
def test_which_of_an_axis(at, n, words):
    assert described("row", [i in set(at) for i in range(n)]) == words


def test_what_is_as_it_should_be_has_no_place():
    assert find_place("out", GOLDEN, GOLDEN, LIMIT, CALL) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t[1, 2].add_(1), "batch 1 (the last), head 2 (the last)"),
        (lambda t: t[:, :, 64:].zero_(), "rows from 64 on (the last, partial tile of 64)"),
        (lambda t: t[:, :, 64:].zero_(), "all of these are 0: as if never written"),
        (lambda t: t[:, 1].copy_(t[:, 0].clone()), "heads hold each other's answers: 1 that of 0"),
        (lambda t: t.copy_(GOLDEN.roll(1, 1)), "head i holds the answer of head i + 2 (of 3)"),
        (lambda t: t.copy_(GOLDEN.flip(1)), "the heads are in reverse order"),
        (lambda t: t[:, 2].mul_(1.5), "each is 1.5 times what it should be"),
        (lambda t: t[0, 0, 5].fill_(math.nan), "NaN there"),
        (lambda t: t[0, 0, 5, 3:5].add_(1), "channels 3 to 4"),
        (lambda t: t.masked_fill_(~MASK.any(-1, keepdim=True), 3.0), "just the rows that see no key at all"),
    ],
)
def test_a_pattern_is_told(change, words):
    assert words in placed(change)


def test_the_worst_element_has_its_index():
    got = GOLDEN.clone()
    got[1, 2, 3, 4] += 7
    place = find_place("out", got, GOLDEN, LIMIT, CALL)
    assert place is not None and place.index == (1, 2, 3, 4)
    assert place.got is not None and place.expected == pytest.approx(place.got - 7)
    assert place.worst.startswith("worst element: out[1, 2, 3, 4], expected ")
    assert any("█" in line for line in place.picture)


def test_a_shape_says_what_it_would_be():
    place = find_place("out", GOLDEN.transpose(1, 2), GOLDEN, LIMIT, CALL)
    assert place is not None and place.sentence.endswith("dimensions 1 and 2 have changed places")


def test_a_missing_key_is_told_of_a_kernel_without_weights():
    """And an extra one, and a sum that is not 1: by values that are one-hot."""
    request = make_call(point(40, 40, 16, mask="causal", batch="2", kv_heads="2"), 1).request

    def told(kernel) -> list[str]:
        weights = weights_used(Witness(InProcess(kernel, "wrong"), math.inf), request)
        assert weights is not None
        return list(weights.sentences())

    def seeing(q, k, v, change, **options):
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        change(seen)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen)

    def hides_32(seen):
        seen[33:, 32] = False

    def one_ahead(seen):
        seen |= torch.ones_like(seen).tril(1)

    def only_self(seen):
        seen &= ~torch.eye(len(seen), dtype=torch.bool) | (torch.arange(len(seen)) == 0)

    assert told(lambda q, k, v, **o: seeing(q, k, v, hides_32)) == ["key 32 is missing in rows from 33 on"]
    assert told(lambda q, k, v, **o: seeing(q, k, v, one_ahead)) == [
        "the key 1 after the row's own is seen though hidden"
    ]
    assert told(lambda q, k, v, **o: seeing(q, k, v, only_self)) == ["the key at the row's own position is missing"]
    halved = told(lambda q, k, v, **o: 0.5 * seeing(q, k, v, lambda seen: None))
    assert halved == ["weights sum to 0.5 instead of 1"]
    values = told(lambda q, k, v, **o: seeing(q, k, v.flip(1), lambda seen: None))
    assert values == ["the weights are right: what is wrong comes with the values, or with what is done after them"]
