"""The acceptance rule, clause by clause on tensors made for it, and its calibration on correct cores."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.cell.draws import Jitter, plain_and_jittered
from harness.cell.regimes import SHAPES
from harness.cell.rule import (
    BLOCK_FACTOR,
    DEGRADED_FACTOR,
    JITTER_DRAWS,
    MEAN_ELEMENTS,
    OK_FACTOR,
    Equivalence,
    TensorVerdict,
    judge,
)

U = 2.0**-23  # eps of float32
R_ERR = 2.0**-10  # the constructed reference is off by this, everywhere
N = R_ERR + U  # the noise floor around ones
NAN, INF = float("nan"), float("inf")


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def off_by(golden: Tensor, error: float, at: tuple[int, ...] | None = None) -> Tensor:
    """The golden with an error in one element, or in all, in float32. Powers of two: nothing here is rounded."""
    wrong = golden.clone()
    if at is None:
        wrong += error
    else:
        wrong[at] += error
    assert torch.equal(wrong.float().double(), wrong)
    return wrong.float()


def status(candidate: Any, golden: Tensor | None = None, **options: Any) -> str:
    """Of a candidate beside a reference that is off by R_ERR everywhere."""
    golden = ones(16, 16) if golden is None else golden
    return judge("out", candidate, [off_by(golden, R_ERR)], [golden], **options).status


# Float64, where the golden is no more exact than the reference


@pytest.mark.parametrize(("error", "expected"), [(4.0, "ok"), (4.1, "degraded"), (70.0, "mismatch")])
def test_a_float64_reference_that_is_the_golden_itself_lends_its_conditioning(error: float, expected: str) -> None:
    golden, moved, jitter = ones(8, 16), ones(8, 16), 2.0**-30
    moved += jitter
    verdict = judge("out", golden + error * jitter, [golden, moved], [golden, moved])
    assert verdict.status == expected
    assert verdict.ref_max_abs_err == 0.0  # told as it was measured
    assert verdict.err_ratio == pytest.approx(error / 2, rel=1e-3)


def test_a_float64_reference_with_errors_of_its_own_is_counted_as_it_is() -> None:
    golden, moved, jitter = ones(8, 16), ones(8, 16), 2.0**-30
    moved += jitter
    own = golden + jitter / 4
    verdict = judge("out", golden + 4.0 * jitter, [own, moved], [golden, moved])
    assert verdict.status == "degraded"  # N = 2 * jitter / 4 + jitter


# Over the whole tensor


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (0.0, "ok"),
        (OK_FACTOR * N - U, "ok"),
        (OK_FACTOR * N, "ok"),
        (OK_FACTOR * N + U, "degraded"),
        (DEGRADED_FACTOR * N - U, "degraded"),
        (DEGRADED_FACTOR * N, "degraded"),
        (DEGRADED_FACTOR * N + U, "mismatch"),
        (1.0, "mismatch"),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_whole_tensor_at_the_exact_factors(error: float, expected: str, sign: int):
    assert status(off_by(ones(16, 16), sign * error, (3, 5))) == expected


def test_the_factors_are_those_of_the_spec():
    assert (OK_FACTOR, BLOCK_FACTOR, DEGRADED_FACTOR, JITTER_DRAWS) == (2, 4, 32, 4)


def test_every_number_of_a_verdict():
    golden = 2 * ones(4, 4)
    verdict = judge(
        "weights", off_by(golden, 2.0**-4, (0, 0)), [off_by(golden, R_ERR, (1, 1))], [golden], regime="tiny"
    )
    floor = R_ERR + 2 * U
    assert (verdict.tensor, verdict.regime, verdict.status) == ("weights", "tiny", "mismatch")
    assert verdict.max_abs_err == 2.0**-4
    assert verdict.mean_abs_err == 2.0**-8
    assert verdict.max_rel_err == 2.0**-5
    assert verdict.max_ulp_err == 2.0**-5 / U
    assert verdict.ref_max_abs_err == R_ERR
    assert verdict.err_budget == 2 * floor
    assert verdict.err_ratio == pytest.approx(2.0**-4 / floor, rel=1e-15)
    assert verdict.block_ratio == verdict.err_ratio
    assert f"{verdict.err_ratio:.3g} N" in verdict.reason


def test_the_floor_is_reference_plus_jitter_plus_one_rounding():
    golden, moved = ones(4, 4), ones(4, 4) + 2.0**-6
    verdict = judge("out", golden.float(), [off_by(golden, R_ERR), moved.float()], [golden, moved])
    assert verdict.err_budget == 2 * (R_ERR + 2.0**-6 + U)


def test_the_reference_counts_with_the_worst_of_its_draws():
    golden = ones(4, 4)
    verdict = judge("out", golden.float(), [golden.float(), off_by(golden, R_ERR)], [golden, golden])
    assert verdict.ref_max_abs_err == R_ERR


@pytest.mark.parametrize("size", [1e-60, 1e-300, 1e60, 1e300])
def test_sizes_that_float32_cannot_hold(size: float):
    golden = size * ones(16, 16)
    reference = golden * (1 + 1e-15)
    assert judge("out", reference, [reference], [golden]).status == "ok"
    verdict = judge("out", 2 * golden, [reference], [golden])
    assert verdict.status == "mismatch"
    assert verdict.err_ratio is not None and verdict.err_ratio > 1e14


# Block by block


@pytest.mark.parametrize(
    ("shape", "at"),
    [
        ((1, 2, 16, 16), (0, 1, 3, 5)),  # heads
        ((2, 1, 16, 16), (1, 0, 3, 5)),  # batch rows
        ((2, 16, 16), (1, 3, 5)),
        ((32, 16), (19, 5)),
        ((17, 16), (16, 5)),  # a last block of one row
    ],
)
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BLOCK_FACTOR * N, "ok"),
        (BLOCK_FACTOR * N + U, "degraded"),
        (2 * DEGRADED_FACTOR * N, "degraded"),
        (2 * DEGRADED_FACTOR * N + U, "mismatch"),
    ],
)
def test_a_small_block_is_not_hidden_by_a_large_one(shape, at, error: float, expected: str):
    size = torch.full(shape, 1024.0, dtype=torch.float64)
    flat = size.view(-1, shape[-1])
    flat[len(flat) - (16 if len(flat) > 17 else 1) :] = 1.0  # the last block is small
    reference = (size * (1 + R_ERR)).float()
    candidate = off_by(size, error, at)
    verdict = judge("out", candidate, [reference], [size])
    assert verdict.status == expected
    assert verdict.err_ratio is not None and verdict.err_ratio < 0.1  # over the whole tensor it is nothing


def test_one_dimensional_tensors_are_one_block():
    golden = torch.tensor([1024.0, 1.0], dtype=torch.float64)
    reference = (golden * (1 + R_ERR)).float()
    assert judge("bias", off_by(golden, 0.5, (1,)), [reference], [golden]).status == "ok"


def test_a_gradient_block_whose_truth_is_zero_may_carry_one_rounding_of_the_rest():
    golden = torch.cat([ones(16, 16), 0 * ones(16, 16)])
    reference = golden.float()
    candidate = golden.clone()
    candidate[20, 3] = BLOCK_FACTOR * U / 4
    assert judge("grad x", candidate.float(), [reference], [golden], is_gradient=True).status == "ok"
    assert judge("out", candidate.float(), [reference], [golden]).status == "mismatch"


# In the mean


@pytest.mark.parametrize(
    ("error", "shape", "expected"),
    [
        (1.5 * R_ERR + U, (16, 16), "ok"),
        (1.5 * R_ERR + 2 * U, (16, 16), "degraded"),
        (1.5 * R_ERR + 2 * U, (15, 17), "ok"),  # 255 elements: a mean of so few says little
        (2 * N, (15, 17), "ok"),
        (2 * N + U, (15, 17), "degraded"),
    ],
)
def test_the_mean_rule(error: float, shape: tuple[int, int], expected: str):
    assert MEAN_ELEMENTS == 256
    assert status(off_by(ones(*shape), error), ones(*shape)) == expected


def test_jitter_widens_the_mean_limit():
    golden, moved = ones(16, 16), ones(16, 16) + 2.0**-9
    candidate = off_by(golden, 1.5 * R_ERR + 2.0**-9)
    references, goldens = [off_by(golden, R_ERR), off_by(moved, R_ERR)], [golden, moved]
    assert judge("out", candidate, references, goldens).status == "ok"
    assert judge("out", candidate, references[:1], goldens[:1]).status == "degraded"


# Exactness


def test_zeros_must_be_exactly_zero():
    golden = 0 * ones(4, 4)
    reference = golden.float()
    verdict = judge("out", reference, [reference], [golden])
    assert (verdict.status, verdict.err_ratio, verdict.max_rel_err) == ("ok", 0.0, 0.0)
    wrong = judge("out", off_by(golden, 2.0**-100, (1, 1)), [reference], [golden])
    assert (wrong.status, wrong.err_ratio) == ("mismatch", INF)


def test_an_empty_tensor_is_equal_and_has_no_numbers():
    verdict = judge("out", torch.empty(0, 4), [torch.empty(0, 4)], [ones(0, 4)])
    assert (verdict.status, verdict.max_abs_err, verdict.err_ratio) == ("ok", None, None)


# Shape, dtype, kind


@pytest.mark.parametrize(
    ("candidate", "told"),
    [
        (torch.ones(4, 5), "shape (4, 5) instead of (4, 4)"),
        (torch.ones(1, 4, 4), "shape (1, 4, 4) instead of (4, 4)"),
        (torch.ones(4, 4, dtype=torch.float64), "dtype torch.float64 instead of torch.float32"),
        (torch.ones(4, 4, dtype=torch.int32), "dtype torch.int32 instead of torch.float32"),
        (None, "NoneType instead of a tensor"),
        (1.0, "float instead of a tensor"),
        ((torch.ones(4, 4),), "tuple instead of a tensor"),
        ([[1.0] * 4] * 4, "list instead of a tensor"),
    ],
)
def test_what_is_not_even_comparable(candidate: Any, told: str):
    verdict = judge("out", candidate, [torch.ones(4, 4)], [ones(4, 4)])
    assert (verdict.status, verdict.reason) == ("mismatch", told)
    assert verdict.max_abs_err is None and verdict.err_ratio is None


# NaN and infinity


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_one_non_finite_element_is_a_mismatch(value: float):
    candidate = torch.ones(16, 16)
    candidate[7, 7] = value
    verdict = judge("out", candidate, [torch.ones(16, 16)], [ones(16, 16)])
    assert verdict.status == "mismatch"
    assert "1 of 256 elements" in verdict.reason


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    data=st.data(),
)
def test_nan_anywhere_is_never_ok(shape, dtype, data):
    golden = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))
    golden = golden.to(dtype).double()
    count = math.prod(shape)
    places = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count))
    also_reference = data.draw(st.booleans())
    candidate, reference = golden.to(dtype).clone(), golden.to(dtype).clone()
    candidate.view(-1)[places] = NAN
    if also_reference:  # a broken reference excuses nobody: then nothing is said
        reference.view(-1)[places] = NAN
    verdict = judge("out", candidate, [reference], [golden], is_gradient=data.draw(st.booleans()))
    assert verdict.status == ("skipped" if also_reference else "mismatch")
    assert not Equivalence((verdict,)).passed


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_same_non_finite_value_in_the_same_place_passes(value: float):
    golden = ones(16, 16)
    golden[2, 2] = value
    reference = golden.float()
    assert judge("out", reference, [reference], [golden]).status == "ok"
    for wrong in {NAN, INF, -INF, 0.0, 3e38} - ({value} if value == value else set()):
        candidate = reference.clone()
        candidate[2, 2] = wrong
        if value != value and wrong != wrong:
            continue
        assert judge("out", candidate, [reference], [golden]).status == "mismatch", wrong
    elsewhere = reference.clone()
    elsewhere[3, 3] = value
    assert judge("out", elsewhere, [reference], [golden]).status == "mismatch"


def test_beside_a_non_finite_place_the_rest_is_still_judged():
    golden = ones(16, 16)
    golden[2, 2] = INF
    reference, candidate = golden.float(), golden.float()
    candidate[5, 5] = 1.01
    verdict = judge("out", candidate, [reference], [golden])
    assert verdict.status == "mismatch"
    assert verdict.max_abs_err == pytest.approx(0.01, rel=1e-5)


@pytest.mark.parametrize("value", [NAN, INF, 1e30])
def test_elements_left_open_may_hold_anything(value: float):
    golden = ones(16, 16)
    open_places = torch.zeros(16, 16, dtype=torch.bool)
    open_places[4] = True
    reference, candidate = golden.float(), golden.float()
    candidate[4] = value
    assert judge("out", candidate, [reference], [golden], may_differ=open_places).status == "ok"
    candidate[5, 0] = value
    assert judge("out", candidate, [reference], [golden], may_differ=open_places).status == "mismatch"


@pytest.mark.parametrize("same", [True, False])
def test_where_the_reference_overflows_nothing_is_said(same: bool):
    golden = 70_000 * ones(4, 4)
    reference = golden.half()
    assert bool(reference.isinf().all())
    candidate = reference if same else torch.full((4, 4), 65_504.0, dtype=torch.float16)
    verdict = judge("out", candidate, [reference], [golden])
    assert (verdict.status, verdict.max_abs_err) == ("skipped", None)
    assert not Equivalence((verdict,)).passed


def test_an_overflow_of_the_reference_does_not_excuse_nan_elsewhere():
    golden = ones(4, 4)
    golden[0, 0] = 70_000
    reference = golden.half()
    candidate = reference.clone()
    candidate[1, 1] = NAN
    assert judge("out", candidate, [reference], [golden]).status == "mismatch"


def test_a_jittered_draw_that_overflows_is_no_endless_budget():
    golden = ones(4, 4)
    for references, goldens in (
        ([golden.float(), golden.float() * INF], [golden, golden]),
        ([golden.float(), golden.float()], [golden, golden * INF]),
        ([golden.float(), golden.float() * INF], [golden, golden * INF]),
    ):
        assert judge("out", 5 * golden.float(), references, goldens).status != "ok"


# All tensors together


def verdict_of(kind: str, ratio: float | None = None) -> TensorVerdict:
    return TensorVerdict(f"{kind} {ratio}", "plain", kind, err_ratio=ratio)


@pytest.mark.parametrize(
    ("kinds", "status", "judged"),
    [
        (["ok", "ok"], "ok", "ok"),
        (["skipped", "ok"], "skipped", "ok"),
        (["ok", "degraded"], "degraded", "degraded"),
        (["skipped", "degraded"], "degraded", "degraded"),
        (["degraded", "mismatch", "ok"], "mismatch", "mismatch"),
        (["skipped", "mismatch"], "mismatch", "mismatch"),
        (["skipped"], "skipped", "skipped"),
    ],
)
def test_the_worst_tensor_decides(kinds: list[str], status: str, judged: str):
    found = Equivalence(tuple(verdict_of(kind) for kind in kinds))
    assert (found.status, found.judged) == (status, judged)
    assert found.passed is (set(kinds) == {"ok"})  # what could not be judged has not passed


def test_a_reference_that_overflows_somewhere_excuses_nothing_elsewhere():
    golden = ones(4, 128)
    reference, candidate = golden.clone(), golden.clone()
    reference[0, 0] = candidate[0, 0] = INF
    assert judge("out", candidate, [reference], [golden]).status == "skipped"
    candidate[3] *= 3
    assert judge("out", candidate, [reference], [golden]).status == "mismatch"


def test_worst_is_the_severest_then_the_largest():
    numbers = [verdict_of("ok", 1.9), verdict_of("degraded", 3.0), verdict_of("degraded", 5.0)]
    assert Equivalence(tuple(numbers)).worst is numbers[2]
    broken = [*numbers, verdict_of("mismatch", 900.0), verdict_of("mismatch")]  # a wrong shape beats any number
    assert Equivalence(tuple(broken)).worst is broken[-1]
    assert Equivalence((verdict_of("skipped"), verdict_of("ok", 0.0))).worst.status == "ok"


def test_the_table_has_a_row_per_tensor():
    frame = Equivalence((verdict_of("ok", 1.5), verdict_of("mismatch"))).table()
    assert list(frame["status"]) == ["ok", "mismatch"]
    assert frame["err_ratio"].isna().tolist() == [False, True]


# Calibration: cores that are right but round differently raise no alarm, wrong ones always do

Core = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
REGIMES = tuple(SHAPES)
COUNT = 300


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def math_backend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, mask)


def permuted_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    order = torch.randperm(k.shape[2], generator=torch.Generator().manual_seed(k.shape[2]))
    return sdpa(q, k[:, :, order], v[:, :, order], None if mask is None else mask[..., order])


def in_double(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return math_backend(q.double(), k.double(), v.double(), mask).to(q.dtype)


def widened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.to(wide), k.to(wide).repeat_interleave(groups, 1), v.to(wide).repeat_interleave(groups, 1)


def online(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Tiles of five keys, a running maximum and a running sum."""
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    top = q.new_full((*q.shape[:3], 1), -INF)
    total, out = torch.zeros_like(top), q.new_zeros(*q.shape[:3], v.shape[3])
    for start in range(0, k.shape[2], 5):
        scores = q @ k[:, :, start : start + 5].mT * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[..., start : start + 5], -INF)
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink = torch.where(new == -INF, 0.0, (top - new).exp())
        weights = torch.where(scores == -INF, 0.0, (scores - new).exp())
        out = out * shrink + weights @ v[:, :, start : start + 5]
        total, top = total * shrink + weights.sum(-1, keepdim=True), new
    return (out / total).to(dtype)


def scale_inside(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The scale on q, the division after the product with v."""
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -INF)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    return (weights @ v / weights.sum(-1, keepdim=True)).to(dtype)


RIGHT: dict[str, Core] = {
    core.__name__: core for core in (sdpa, math_backend, permuted_keys, in_double, online, scale_inside)
}


class Problem:
    """Random shape, mask and regime; q, k and v projected from one x, as a module would."""

    def __init__(self, seed: int, regime: str, dtype: torch.dtype, *, smallest: int = 1) -> None:
        self.generator = g = torch.Generator().manual_seed(seed)
        self.regime, self.dtype = regime, dtype

        def pick(*options: int) -> int:
            return options[int(torch.randint(len(options), (), generator=g))]

        B, H_kv, G, D = pick(1, 2, 3), pick(1, 2, 3), pick(1, 2, 4), pick(4, 8, 16, 32)
        S = max(pick(1, 2, 5, 16, 33, 64), smallest)
        L = max(pick(1, S, 7), smallest)
        E = 16
        x = SHAPES[regime](torch.randn(B, max(L, S), E, generator=g), g)

        def project(heads: int, length: int) -> Tensor:
            weight = torch.randn(E, heads * D, generator=g) / E**0.5
            return (x[:, :length] @ weight).view(B, length, heads, D).transpose(1, 2).to(dtype)

        self.q, self.k, self.v = project(H_kv * G, L), project(H_kv, S), project(H_kv, S)
        self.mask: Tensor | None = None
        if regime == "poison" or pick(0, 1):
            self.mask = torch.rand(B, 1, L, S, generator=g) < 0.7
            self.mask[..., S // 2] = True  # no dead row: those are a matter of policy, not of rounding
            self.mask[..., -1] &= S <= 2
        jitter = Jitter(dtype, g)
        inputs = [self.q, self.k, self.v]
        draws = list(plain_and_jittered(inputs, lambda inputs: [jitter.tensor(t) for t in inputs]))
        self.references = [sdpa(q, k, v, self.mask) for q, k, v in draws]
        self.goldens = [math_backend(q.double(), k.double(), v.double(), self.mask) for q, k, v in draws]

    def judge(self, core: Core) -> TensorVerdict:
        k, v = self.k, self.v
        if self.regime == "poison" and k.shape[2] > 2:
            k, v = k.clone(), v.clone()
            k[:, :, -1], v[:, :, -1] = 50.0, -50.0  # nobody may see the last key
        return judge("out", core(self.q, k, v, self.mask), self.references, self.goldens, regime=self.regime)


def problems(count: int, **options: Any) -> Iterator[Problem]:
    for seed in range(count):
        yield Problem(seed, REGIMES[seed % len(REGIMES)], DTYPES[seed // len(REGIMES) % len(DTYPES)], **options)


def test_correct_cores_raise_no_alarm():
    """300 shapes, all regimes in all dtypes, six ways to round: none may be blamed."""
    blamed, judged, seen = [], 0, set()
    for at, problem in enumerate(problems(COUNT)):
        seen.add((problem.regime, problem.dtype))
        for name, core in RIGHT.items():
            verdict = problem.judge(core)
            judged += 1
            if verdict.status != "ok":
                blamed.append((at, name, problem.regime, problem.dtype, tuple(problem.q.shape), verdict.reason))
    assert blamed == []
    assert judged == COUNT * len(RIGHT)
    assert len(seen) == len(REGIMES) * len(DTYPES)


@pytest.mark.parametrize("relative", [1e-3, -1e-3, 1e-4])
def test_a_scale_that_is_off_in_float32_is_a_mismatch(relative: float):
    def scale_off(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return sdpa(q * (1 + relative), k, v, mask)

    for seed in range(40):
        verdict = Problem(seed, "plain", torch.float32, smallest=16).judge(scale_off)
        assert verdict.status == "mismatch", (seed, verdict)
