"""Large cells: some rows have a golden, all others are held to the reference, decoding goes by single steps."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.cell import large, sampling
from harness.cell.build import Pair, at_rows, build_pair
from harness.cell.large import LargeReferee, compare_pair, referee_of
from harness.cell.measure import measure
from harness.cell.referee import Expected, Referee
from harness.cell.regimes import Inputs
from harness.cell.rule import TensorVerdict
from harness.cell.sampling import ALL_QUERIES, choose_rows, is_large, rows_of, short_length
from harness.cell.timing import Stopwatch
from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.eager import eager
from harness.kernels.front import find_kernel
from harness.record import Record
from harness.store.records import dumps, loads
from harness.suite.schema import Timing
from tests.support.attention import assert_same, make_case

LENGTH = 200  # beyond the short length of 64
REGIMES = ("plain", "peaked", "poison")


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "LARGEST_DENSE", 1e5)
    monkeypatch.setattr(sampling, "SHORT_WORK", 1e6)


def the_pair(kernel: Kernel | None = None, variant: str = "gqa", **axes: Any) -> Pair:
    case = make_case(variant, seq_len=LENGTH, **axes)
    return build_pair(case, kernel or find_kernel("eager"), seed=1)


def at_full_length(pair: Pair, regime: str = "plain") -> dict[str, TensorVerdict]:
    referee = referee_of(pair, REGIMES, seed=1, poison=None)
    assert isinstance(referee, LargeReferee)
    return {verdict.tensor: verdict for verdict in referee.full.judge(pair, regime)}


def spoilt(spoil: Any, *, keys: int = 150) -> Kernel:
    """Right, but what it gives of more than so many keys is `spoil`ed: a short length does not show it."""

    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        out, weights = eager(q, k, v, call)
        return (spoil(out) if k.shape[2] > keys else out), weights

    return Kernel("spoilt", run, gives_weights=True)


def at(rows: Any, factor: float = 1.01) -> Any:
    def spoil(out: Tensor) -> Tensor:
        factors = torch.ones(out.shape[2], 1, dtype=out.dtype)
        factors[rows] = factor
        return out * factors

    return spoil


# The rows.


def test_rows_are_seeded_sorted_and_of_every_class() -> None:
    case = make_case("gqa", seq_len=4000, mask="dead_rows")
    rows = rows_of(case, seed=3).tolist()
    assert rows == sorted(set(rows)) == rows_of(case, seed=3).tolist() != rows_of(case, seed=4).tolist()
    assert {0, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 511, 512, 1023, 1024, 3999} <= set(rows)
    assert len([row for row in rows if row % 3 == 1]) >= 4  # those see no key at all
    assert len(rows) <= sampling.ROWS
    assert choose_rows(2, 6, torch.Generator()).tolist() == [0, 1]


def test_what_is_large_goes_by_the_work_and_not_by_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not is_large(make_case("mha", embed_dim=512, heads=8, seq_len=512))
    assert is_large(make_case("mha", embed_dim=2048, heads=32, seq_len=512))
    assert not is_large(make_case("mha", embed_dim=8192, heads=32, seq_len=sampling.ROWS))  # all rows would be sampled
    assert short_length(make_case("gqa", embed_dim=256, heads=8, seq_len=8192, batch=1)) == 512


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "dead_rows", "alibi", "per_head"])
@pytest.mark.parametrize("variant", ["mha", "gqa", "mla", "block_pre_ln", "block_post_ln", "block_mla"])
def test_some_rows_of_a_reference_are_those_rows_of_the_whole(variant: str, mask: str) -> None:
    if variant == "mha" and mask == "dead_rows":
        pytest.skip("torch gives NaN for dead rows where no gradients flow and weights are asked for")
    pair = the_pair(variant=variant, mask=mask, dtype="float64")
    x = torch.randn(2, LENGTH, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([0, 1, 17, 64, LENGTH - 1])
    side, some = pair.reference, at_rows(pair, rows)

    def whole(x: Tensor) -> Tensor:
        return side.forward(side.module, x, side.views[0], None, False)[0][:, rows]

    assert_same(lambda x: some.forward(some.module, x, some.views[0], None, False)[0], whole, x)


# Right kernels are right.


@pytest.mark.parametrize(
    ("variant", "axes"),
    [
        ("mha", {"mask": "causal"}),
        ("mha", {"mask": "padding", "phase": "train"}),
        ("gqa", {"mask": "dead_rows", "phase": "train"}),
        ("gqa", {"mask": "float_bias", "dtype": "bfloat16"}),
        ("gqa", {"mask": "causal_padding", "phase": "decode", "dtype": "float16"}),
        ("mla", {"mask": "causal", "phase": "train"}),
        ("mla", {"mask": "padding", "phase": "decode"}),
        ("mla_naive", {"mask": "causal", "phase": "decode"}),
        ("mla_absorbed", {"mask": "alibi", "phase": "decode"}),
        ("block_mla", {"mask": "causal"}),
        ("block_pre_ln", {"mask": "padding", "phase": "train"}),
    ],
)
def test_a_right_kernel_is_ok(variant: str, axes: dict[str, Any]) -> None:
    found = compare_pair(the_pair(variant=variant, **axes), REGIMES, seed=2, stopwatch=Stopwatch())
    assert [v for v in found.verdicts if v.status in ("degraded", "mismatch")] == []
    assert found.sampled is not None
    assert found.sampled.regimes == REGIMES


def test_the_record_says_what_was_sampled() -> None:
    case = make_case("gqa", seq_len=LENGTH)
    options: dict[str, Any] = {"seed": 0, "regimes": REGIMES, "timing": Timing(enabled=False)}
    record = measure(case, find_kernel("eager"), **options)
    assert record.status == "ok", record.error
    assert record.sampled["rows"] == rows_of(case, case.seed(0)).tolist()
    assert record.golden_rows == len(record.sampled["rows"])
    assert record.sampled["short_length"] == 64
    assert loads(dumps(record)[:-1], "a line").sampled["rows"] == record.sampled["rows"]
    wrong = measure(case, spoilt(at(slice(None))), **options)
    assert wrong.status == "mismatch"
    assert f"{record.golden_rows} of {LENGTH} queries have a golden, chosen by seed" in str(wrong.error)


# Wrong ones are not, and only the full length shows it.


@pytest.mark.parametrize("rows", [0, LENGTH - 1, 16, 63, 128, slice(64, 128)])
def test_a_sampled_row_shows_its_bug(rows: Any) -> None:
    assert at_full_length(the_pair(spoilt(at(rows))))["out"].status == "mismatch"


def test_sampled_dead_rows_show_what_they_attend() -> None:
    mean = spoilt(lambda out: out.index_fill(2, torch.arange(1, LENGTH, 3), 0.01))
    assert at_full_length(the_pair(mean, mask="dead_rows"))["out"].status == "mismatch"


@pytest.mark.parametrize("phase", ["prefill", "train"])
def test_a_row_outside_the_sample_is_promoted_and_judged(phase: str) -> None:
    rows = set(rows_of(make_case("gqa", seq_len=LENGTH, phase=phase), seed=1).tolist())
    outside = next(row for row in range(150, LENGTH) if row not in rows)
    found = at_full_length(the_pair(spoilt(at(outside, 1.001)), phase=phase))
    assert found["out"].status == "ok"
    assert found[ALL_QUERIES].status == "mismatch"
    assert f"query {outside}" in found[ALL_QUERIES].reason


def test_a_reference_that_rounds_worse_than_the_candidate_is_not_the_candidates_fault() -> None:
    pair = the_pair()
    referee = referee_of(pair, REGIMES, seed=1, poison=None)
    assert isinstance(referee, LargeReferee)
    expected = referee.full.expected("plain")
    assert expected is not None
    assert expected.whole is not None
    rows = rows_of(pair.case, seed=1).tolist()
    row = next(row for row in range(150, LENGTH) if row not in rows)
    expected.whole[:, row] *= 1.001
    others = list(referee.full.judge(pair, "plain"))[1]
    assert (others.tensor, others.status) == (ALL_QUERIES, "ok")


class _HalfOfDv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        return v.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        late = torch.arange(gradient.shape[2])[:, None] > 150
        return torch.where(late, 0.5 * gradient, gradient)


def test_gradients_of_the_sampled_rows_show_a_wrong_backward_pass() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return eager(q, k, _HalfOfDv.apply(v), call)

    found = at_full_length(the_pair(Kernel("half", run, gives_weights=True), phase="train"))
    assert found["out"].status == "ok"
    assert found["grad x"].status == "mismatch"


@pytest.mark.parametrize("variant", ["gqa", "mla", "mla_naive"])
def test_a_step_over_many_keys_shows_its_bug(variant: str) -> None:
    last = spoilt(at(slice(None), 1.001), keys=LENGTH - 3)
    assert at_full_length(the_pair(last, variant, phase="decode"))["out"].status == "mismatch"
    assert at_full_length(the_pair(None, variant, phase="decode"))["out"].status == "ok"


def test_a_long_context_is_never_prefilled() -> None:
    """By the kernel, that is: of S tokens its queries are one at a time."""
    longest: list[int] = []

    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        longest.append(q.shape[2] if k.shape[2] > 150 else 0)
        return eager(q, k, v, call)

    case = make_case("gqa", seq_len=LENGTH, phase="decode")
    pair = build_pair(case, Kernel("counts", run, gives_weights=True), seed=1)
    referee = referee_of(pair, REGIMES, seed=1, poison=None)
    assert isinstance(referee, LargeReferee)
    assert {v.status for v in referee.full.judge(pair, "plain")} == {"ok"}
    assert max(longest) == 1


def test_work_bounds_the_regimes_at_full_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "FULL_WORK", 1.0)
    found = compare_pair(the_pair(), REGIMES, seed=2, stopwatch=Stopwatch())
    assert found.sampled is not None
    assert found.sampled.regimes == ("plain",)
    short = {v.regime for v in found.verdicts if v.tensor.endswith("(at length 64)")}
    assert short == set(REGIMES)


def test_a_small_cell_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pair = the_pair()
    assert isinstance(referee_of(pair, REGIMES, seed=1, poison=None), Referee)
    assert dataclasses.replace(pair).steps == ((range(LENGTH), range(LENGTH)),)


# Kernels of one cell.


def test_kernels_of_a_cell_share_its_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    drawn: list[str] = []
    draw = Referee._of

    def noted(referee: Referee, inputs: Inputs, *rest: Any) -> Expected:
        drawn.append(inputs.regime)
        return draw(referee, inputs, *rest)

    monkeypatch.setattr(Referee, "_of", noted)
    options: dict[str, Any] = {"seed": 0, "regimes": REGIMES, "timing": Timing(enabled=False)}

    def judged(kernel: str, **axes: Any) -> Record:
        return measure(make_case("gqa", kernel=kernel, **axes), find_kernel(kernel), **options)

    def numbers(record: Record) -> Record:
        return dataclasses.replace(record, seconds=None, measured_seconds=None, parts_s={})

    first, second = judged("eager"), judged("tiled")
    assert (first.status, second.status) == ("ok", "ok")
    assert drawn == list(REGIMES)
    assert second.parts_s.get("golden") is None
    judged("eager", heads=2)  # another cell, and what was known of the first is forgotten
    assert numbers(judged("tiled")) == numbers(second)
    assert drawn == list(REGIMES) * 3
    wrong = measure(make_case("gqa", kernel="tiled"), spoilt(at(slice(None)), keys=0), **options)
    assert (wrong.status, len(drawn)) == ("mismatch", 3 * len(REGIMES))
