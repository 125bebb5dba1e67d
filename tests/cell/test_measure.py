"""Case -> Record: every column filled or empty as it should be, and every failure of a kernel a row of its own."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harness.cell.build
import harness.variants.gqa
from harness.case import Case
from harness.cell.large import compare_pair
from harness.cell.measure import measure
from harness.cell.timing import Stopwatch, interleave
from harness.environment import Others
from harness.kernels.call import AttentionCall, ContractBroken
from harness.kernels.front import find_kernel
from harness.record import COLUMNS, STATUSES, Record, retimed
from harness.suite.schema import REGIMES, Timing
from harness.variants.cache import KVCache
from harness.variants.gqa import GroupedQueryAttention
from harness.variants.specs import VARIANTS
from tests import wrong_kernels

UNTIMED = Timing(enabled=False)
BRIEF = Timing(budget_s=0.001, min_blocks=3, max_blocks=3)
EQUALITY = ("max_abs_err", "mean_abs_err", "max_rel_err", "max_ulp_err", "ref_max_abs_err", "err_budget", "err_ratio")
SPEED = ("latency_ms", "ref_latency_ms", "latency_ratio", "latency_ratio_lo", "latency_ratio_hi", "peak_bytes")
WEIGHT = ("params", "ref_params", "params_formula", "flops")
CACHE = ("kv_cache_bytes", "kv_cache_bytes_formula", "kv_bytes_per_token")
# The columns that are promised to whoever reads results.csv.
SPEC_COLUMNS = """
case_id variant kernel reference embed_dim heads kv_heads head_dim seq_len
kv_len batch mask dtype phase status max_abs_err mean_abs_err max_rel_err max_ulp_err ref_max_abs_err err_budget
err_ratio grad_max_abs_err params ref_params kv_cache_bytes kv_cache_bytes_formula kv_bytes_per_token latency_ms
ref_latency_ms latency_ratio latency_ratio_lo latency_ratio_hi peak_bytes flops calls error"""


def case(**axes: Any) -> Case:
    defaults: dict[str, Any] = {
        "variant": "mha", "kernel": "eager", "embed_dim": 32, "heads": 4, "kv_heads": 4, "head_dim": 8,
        "seq_len": 12, "batch": 2, "mask": "causal", "dtype": "float32", "phase": "prefill",
    }  # fmt: skip
    return Case(**(defaults | axes))


GQA: dict[str, Any] = {"variant": "gqa", "kv_heads": 2}
MLA: dict[str, Any] = {"variant": "mla", "kv_heads": None, "kv_lora_rank": 16, "rope_head_dim": 4, "v_head_dim": 8}
BLOCK: dict[str, Any] = {"variant": "block_post_ln"}


def record(
    kernel: Any = "eager",
    *,
    regimes: tuple[str, ...] = ("plain",),
    timing: Timing = UNTIMED,
    seed: int = 0,
    retime: bool = False,
    **axes: Any,
) -> Record:
    return measure(case(**axes), find_kernel(kernel), seed=seed, regimes=regimes, timing=timing, retime=retime)


def filled(found: Record, *names: str) -> bool:
    return all(getattr(found, name) is not None for name in names)


def empty(found: Record, *names: str) -> bool:
    return all(getattr(found, name) is None for name in names)


# Columns


def test_every_column_of_the_spec_exists():
    assert set(SPEC_COLUMNS.split()) <= set(COLUMNS)


@pytest.mark.parametrize("axes", [{}, GQA, MLA, {"phase": "decode"}, {"phase": "decode", **MLA}], ids=str)
def test_prefill_and_decode_fill_everything_but_gradients(axes: dict[str, Any]):
    found = record(timing=BRIEF, regimes=REGIMES, **axes)
    assert (found.status, found.error) == ("ok", None)
    assert filled(found, *EQUALITY, *WEIGHT, *CACHE, *SPEED, "calls", "worst_tensor", "worst_regime")
    assert empty(found, "grad_max_abs_err")
    assert found.kv_len == found.seq_len == 12


@pytest.mark.parametrize("axes", [{}, GQA, MLA, BLOCK], ids=str)
def test_training_fills_gradients_and_keeps_no_cache(axes: dict[str, Any]):
    found = record(timing=BRIEF, phase="train", **axes)
    assert (found.status, found.error) == ("ok", None)
    assert filled(found, *EQUALITY, *WEIGHT, *SPEED, "calls", "grad_max_abs_err")
    assert empty(found, *CACHE)
    compared = {row["tensor"] for row in found.equivalence}
    assert {"out", "grad x"} < compared
    assert found.grad_max_abs_err == max(row["max_abs_err"] for row in found.equivalence if "grad" in row["tensor"])


def test_training_compares_the_gradient_of_every_parameter():
    found = record(phase="train")
    parts = [f"grad {p}_proj.{kind}" for p in ("q", "k", "v", "out") for kind in ("weight", "bias")]
    own = [row["tensor"] for row in found.equivalence if not row["is_aside"]]
    assert sorted(own) == sorted(["out", "grad x", *parts])


def test_without_timing_the_speed_columns_are_empty():
    found = record()
    assert found.status == "ok"
    assert empty(found, *SPEED)
    assert found.samples_s == {}


def test_a_block_keeps_no_cache():
    found = record(**BLOCK, mask="padding")
    assert found.status == "ok"
    assert empty(found, *CACHE)
    assert found.reference == "torch_encoder_layer"


def test_the_numbers_that_can_be_counted_by_hand():
    found = record(timing=BRIEF)
    assert found.params == found.ref_params == found.params_formula == 4 * (32 * 32 + 32)
    assert found.kv_bytes_per_token == 2 * 4 * 8 * 4
    assert found.kv_cache_bytes == found.kv_cache_bytes_formula == 2 * 12 * 256
    assert found.flops == 2 * 12 * 2 * (4 * 32 * 32 + 2 * 4 * 12 * 8)
    assert found.reference == "torch_mha"
    half = record(dtype="bfloat16", **GQA)
    assert half.kv_bytes_per_token == 2 * 2 * 8 * 2
    assert half.params == 2 * (32 * 32 + 32) + 2 * (32 * 16 + 16)


def test_equality_columns_belong_to_one_tensor():
    found = record(regimes=REGIMES)
    row = next(
        row for row in found.equivalence if (row["tensor"], row["regime"]) == (found.worst_tensor, found.worst_regime)
    )
    assert {name: getattr(found, name) for name in EQUALITY} == {name: row[name] for name in EQUALITY}
    assert found.err_ratio == max(row["err_ratio"] for row in found.equivalence if not row["is_aside"])
    assert found.max_abs_err is not None and found.err_budget is not None
    assert found.err_ratio == pytest.approx(2 * found.max_abs_err / found.err_budget, rel=1e-12)


def test_timing_keeps_the_raw_samples():
    found = record(timing=BRIEF)
    assert {side: len(samples) for side, samples in found.samples_s.items()} == {"candidate": 3, "reference": 3}
    assert {side: len(shares) for side, shares in found.waited.items()} == {"candidate": 3, "reference": 3}
    assert found.latency_ms is not None
    samples_ms = [seconds * 1e3 for seconds in found.samples_s["candidate"]]
    assert min(samples_ms) <= found.latency_ms <= max(samples_ms)
    assert found.timing in ("ok", "disturbed")  # as the machine is
    assert found.rounds is not None and found.rounds >= 2
    assert found.others_busy is not None and found.others_busy >= 0
    assert found.latency_ratio is not None and found.latency_ratio_lo is not None and found.latency_ratio_hi is not None
    assert found.latency_ratio_lo <= found.latency_ratio <= found.latency_ratio_hi
    assert found.peak_bytes is not None and found.peak_bytes > 0
    assert found.seconds is not None and found.measured_seconds is not None
    assert 0 < found.measured_seconds < found.seconds


def test_both_sides_are_timed_with_no_more_threads_than_there_are_free_cores(monkeypatch: pytest.MonkeyPatch):
    """As seen while the cell was judged; judging goes on with what was asked for."""
    monkeypatch.setattr(Others, "stop", lambda self: (1.0, 2.6))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert record(timing=BRIEF).threads == 1
        assert torch.get_num_threads() == 3
        monkeypatch.setattr(Others, "stop", lambda self: (1.0, 0.1))
        assert record(timing=BRIEF).threads == 3
    finally:
        torch.set_num_threads(before)


def test_a_cell_that_is_timed_anew_is_not_judged_again():
    """Its speed alone counts; what fails while it is timed is its result all the same."""
    whole = record(timing=BRIEF)
    again = record(timing=BRIEF, retime=True)
    assert filled(again, *SPEED)
    assert empty(again, *EQUALITY)
    merged = retimed(whole, again)
    assert (merged.err_ratio, merged.params, merged.attempt) == (whole.err_ratio, whole.params, 2)
    assert merged.samples_s == again.samples_s != whole.samples_s

    def tired(*arguments: Any, **options: Any) -> Tensor:
        raise RuntimeError("tired")

    merged = retimed(whole, record(tired, timing=BRIEF, retime=True))
    assert merged.status == "error"
    assert "tired" in str(merged.error)
    assert merged.latency_ms is None and merged.timing == "none"


def test_only_timing_runs_without_the_contract_checks(monkeypatch: pytest.MonkeyPatch):
    """Their clones would be timed, and counted as peak memory."""
    honest, seen = harness.cell.build.WatchedKernel.run, list[bool]()

    def run(self: harness.cell.build.WatchedKernel, *arguments: Any) -> Any:
        seen.append(self.checking)
        return honest(self, *arguments)

    monkeypatch.setattr(harness.cell.build.WatchedKernel, "run", run)
    found = record(wrong_kernels.plain, timing=BRIEF)
    assert found.calls == 1
    assert seen[0]  # compared; then the checks without a reference, and the cache is weighed
    assert seen == sorted(seen, reverse=True)
    assert not seen[-1]


@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
def test_the_first_call_of_a_kernel_is_judged(phase: str):
    """A kernel that is wrong once, before its tables are warm, say."""
    calls = []

    def cold(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(q.shape)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        return 1.01 * out if len(calls) == 1 else out

    found = record(cold, phase=phase, mask="causal")
    assert found.status == "mismatch" and found.worst_regime == "plain"


@pytest.mark.parametrize(("dtype", "lost"), [("bfloat16", "6.2 %"), ("float16", "0.78 %")])
def test_rounded_scores_are_told_in_words(dtype: str, lost: str):
    """As transformers' eager attention has them in half precision."""

    def half(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, attn_mask: Any = None, **_: Any) -> Any:
        scores = q @ k.mT * scale
        scores = scores if attn_mask is None else scores + attn_mask
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v

    found = record(half, dtype=dtype, mask="none")
    assert found.status == "degraded" and found.error is not None
    assert (
        f"right in float32, as a kernel is whose scores are rounded to {dtype}" in found.error and lost in found.error
    )
    assert record(mask="none", dtype=dtype).error is None


def test_weights_are_compared_where_both_sides_have_them():
    assert {row["tensor"] for row in record().equivalence if not row["is_aside"]} == {"out", "weights"}
    assert {row["tensor"] for row in record("sdpa").equivalence if not row["is_aside"]} == {"out"}
    assert {row["tensor"] for row in record(mask="dead_rows").equivalence if not row["is_aside"]} == {"out"}
    assert {row["tensor"] for row in record(**GQA).equivalence if not row["is_aside"]} == {"out"}


@pytest.mark.parametrize(
    ("axes", "calls"),
    [
        ({}, 6),
        ({"mask": "none"}, 5),  # nothing hidden to poison
        ({"phase": "train"}, 5),
        ({"phase": "decode"}, 6 * 5),  # a prefill and four steps
    ],
    ids=str,
)
def test_calls_are_those_of_the_comparison(axes: dict[str, Any], calls: int):
    assert record(wrong_kernels.plain, regimes=REGIMES, timing=BRIEF, **axes).calls == calls


# What a kernel can do wrong


def test_a_message_of_megabytes_is_cut():
    def verbose(*args: Any, **options: Any) -> Any:
        raise ValueError("x" * 10_000_000)

    error = record(verbose).error
    assert error is not None
    assert len(error) < 2500
    assert re.search(r"^ValueError: x{1988}… \(10000012 characters\) at .*test_measure\.py:\d+$", error)


@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
@pytest.mark.parametrize(
    ("kernel", "status", "told"),
    [
        (wrong_kernels.is_none, "mismatch", "kernel returned NoneType instead of a tensor"),
        (wrong_kernels.wrong_shape, "mismatch", r"kernel returned \(2, \d+, 4, 8\) .* instead of \(2, 4, \d+, 8\)"),
        (wrong_kernels.wrong_dtype, "mismatch", "float64 instead of .*float32"),
        (wrong_kernels.writes_q, "mismatch", "kernel wrote into its input q"),
        (wrong_kernels.gives_nan, "mismatch", "elements are NaN or infinite"),
        (wrong_kernels.zeros, "mismatch", "in regime plain: error is"),
        (wrong_kernels.scale_off, "mismatch", "in regime plain: error is"),
        (wrong_kernels.refuses, "unsupported", "^only for tensor cores$"),
        (wrong_kernels.out_of_memory, "oom", "MemoryError: 8 TB at .*wrong_kernels.py:"),
        (wrong_kernels.torch_out_of_memory, "oom", "can't allocate memory"),
        (wrong_kernels.raises, "error", "^RuntimeError: no such tile at "),
        (wrong_kernels.leaves, "error", "^SystemExit: 0 at .*wrong_kernels.py:"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:20]),
)
def test_what_a_kernel_does_becomes_its_row(kernel: Any, status: str, told: str, phase: str):
    found = record(kernel, phase=phase)
    assert found.status == status
    assert found.status in STATUSES
    assert found.error is not None
    assert re.search(told, found.error), found.error
    assert empty(found, *SPEED)
    assert filled(found, "params_formula", "flops", "seconds")


def test_an_error_gives_the_line_that_raised():
    source = Path(wrong_kernels.__file__)
    line = 1 + next(at for at, text in enumerate(source.read_text().splitlines()) if "# RAISED HERE" in text)
    found = record(wrong_kernels.raises)
    assert found.error == f"RuntimeError: no such tile at {source}:{line}"


@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
def test_a_kernel_that_writes_into_the_mask(phase: str):
    found = record(wrong_kernels.writes_mask, phase=phase, mask="bool_random")
    assert (found.status, found.error) == ("mismatch", "kernel wrote into its input mask")
    assert record(wrong_kernels.writes_mask, phase=phase, mask="none").status == "ok"


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_writing_what_looks_the_same_to_a_comparison_is_seen(value: float):
    """-inf to a large number in a float mask, or NaN to 0: nan_to_num on both sides would call them equal."""

    def writes(q: Tensor, k: Tensor, v: Tensor, call: Any) -> tuple[Tensor, None]:
        out = torch.softmax(q @ k.mT, -1) @ v
        if call.mask is not None and call.mask.is_floating_point():
            call.mask.masked_fill_(call.mask == -math.inf, torch.finfo(call.mask.dtype).min)
        v.masked_fill_(v.isnan(), value)
        return out, None

    watch = harness.cell.build.WatchedKernel(dataclasses.replace(find_kernel("eager"), run=writes))
    q, k, v = (torch.randn(1, 1, 2, 2) for _ in range(3))
    mask = torch.tensor([[0.0, -math.inf], [0.0, 0.0]])
    with pytest.raises(ContractBroken, match="input mask"):
        watch.run(q, k, v, AttentionCall(scale=1.0, mask=mask))
    v[0, 0, 0, 0] = math.nan
    if math.isnan(value):
        watch.run(q, k, v, AttentionCall(scale=1.0))
    else:
        with pytest.raises(ContractBroken, match="input v"):
            watch.run(q, k, v, AttentionCall(scale=1.0))


def test_a_mismatch_keeps_its_numbers():
    found = record(wrong_kernels.scale_off, timing=BRIEF)
    assert found.status == "mismatch"
    assert filled(found, *EQUALITY, *WEIGHT, *CACHE, *SPEED, "calls")
    assert found.err_ratio is not None and found.err_ratio > 32
    assert found.worst_regime == "plain"


def test_a_kernel_that_fails_only_while_it_is_timed(monkeypatch: pytest.MonkeyPatch):
    timing = []

    def noted(*arguments: Any, **options: Any) -> Any:
        timing.append(True)
        return interleave(*arguments, **options)

    def tires(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if timing:
            raise RuntimeError("tired")
        return F.scaled_dot_product_attention(q, k, v, **options)

    monkeypatch.setattr("harness.cell.clock.interleave", noted)
    found = record(tires, timing=BRIEF)
    assert found.status == "error"
    assert found.error is not None and "tired" in found.error
    assert filled(found, *EQUALITY, "calls")
    assert empty(found, *SPEED)


def test_a_kernel_may_only_see_finite_garbage_behind_a_mask():
    """A user's kernel is judged as it is, and 0 * NaN is NaN in every kernel without a shield; ours get NaN."""
    seen: list[bool] = []

    def looks(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append(bool(k.isfinite().all()))
        return F.scaled_dot_product_attention(q, k, v, **options)

    assert record(looks, regimes=("poison",), mask="padding").status == "ok"
    assert seen
    assert all(seen)
    assert record("eager", regimes=("poison",), mask="padding").status == "ok"
    assert record(wrong_kernels.mask_ignored, regimes=("poison",), mask="padding").status == "mismatch"


def test_a_declared_limit_is_no_error():
    class Partial:
        __name__ = "partial"

        def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            if options["attn_mask"] is not None:
                return wrong_kernels.refuses(q, k, v)
            return F.scaled_dot_product_attention(q, k, v, **options)

    assert record(Partial(), mask="padding").status == "unsupported"
    assert record(Partial(), mask="causal").status == "ok"


# What a module can do wrong


def test_a_kernel_that_is_never_called_is_a_mismatch(monkeypatch: pytest.MonkeyPatch):
    """The right numbers from somewhere else prove nothing about this kernel."""

    def elsewhere(q: Tensor, k: Tensor, v: Tensor, *, kernel: Any, **rules: Any) -> Any:
        return harness.attention(q, k, v, **rules)

    monkeypatch.setattr(harness.variants.gqa, "attention", elsewhere)
    for phase in ("prefill", "decode", "train"):
        found = record(wrong_kernels.plain, phase=phase)
        assert (found.status, found.calls) == ("mismatch", 0)
        assert found.error is not None and "never called" in found.error
        assert found.err_ratio is not None and found.err_ratio <= 2


def test_a_module_that_calls_its_kernel_only_when_nobody_compares(monkeypatch: pytest.MonkeyPatch):
    honest = GroupedQueryAttention.forward

    def forward(self: GroupedQueryAttention, x: Tensor, *, cache: Any = None, **rules: Any) -> Any:
        if cache is not None:  # weighing fills a cache; comparing a prefill does not
            return honest(self, x, cache=cache, **rules)
        other = GroupedQueryAttention(32, 4, 4, bias=True)
        other.load_state_dict(self.state_dict())
        return honest(other, x, **rules)

    monkeypatch.setattr(GroupedQueryAttention, "forward", forward)
    found = record(wrong_kernels.plain)
    assert (found.status, found.calls) == ("mismatch", 0)


def test_a_cache_that_holds_more_than_the_formula_is_a_mismatch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GroupedQueryAttention, "new_cache", lambda self, capacity=0: KVCache(2 * capacity))
    for phase in ("prefill", "decode"):
        found = record(phase=phase)
        assert (found.status, found.error) == ("mismatch", "kv_cache_bytes: measured 12288, by formula 6144")
        assert (found.kv_cache_bytes, found.kv_cache_bytes_formula) == (12288, 6144)
    assert record(phase="train").status == "ok"


def test_parameters_that_differ_from_the_formula_are_a_mismatch(monkeypatch: pytest.MonkeyPatch):
    spec = dataclasses.replace(VARIANTS["mha"], params=lambda _: 4223)
    monkeypatch.setitem(VARIANTS._entries, "mha", spec)
    found = record()
    assert (found.status, found.error) == ("mismatch", "params: measured 4224, by formula 4223")


def test_parameters_that_differ_from_the_reference_are_a_mismatch(monkeypatch: pytest.MonkeyPatch):
    honest = harness.swap

    def loses_one(model: nn.Module, **options: Any) -> Any:
        swapped = honest(model, **options)
        model.register_parameter("forgotten", nn.Parameter(torch.ones(3)))
        return swapped

    monkeypatch.setattr(harness.cell.build, "swap", loses_one)
    found = record()
    assert (found.status, found.error) == ("mismatch", "params: 4224, the reference has 4227")


def test_a_swap_that_loses_a_weight_is_found_by_its_numbers(monkeypatch: pytest.MonkeyPatch):
    honest = harness.swap

    def spoils_one(model: nn.Module, **options: Any) -> Any:
        candidate, report = honest(model, **options)
        with torch.no_grad():
            candidate.get_parameter("v_proj.bias")[0] += 0.01
        return candidate, report

    monkeypatch.setattr(harness.cell.build, "swap", spoils_one)
    for phase in ("prefill", "decode", "train"):
        assert record(phase=phase).status == "mismatch"


# torch's fast path


def test_the_fast_path_is_off_while_comparing_and_on_while_timing():
    seen: list[bool] = []

    def looks(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append(torch.backends.mha.get_fastpath_enabled())
        return F.scaled_dot_product_attention(q, k, v, **options)

    assert torch.backends.mha.get_fastpath_enabled()
    found = record(looks, timing=BRIEF)
    assert found.status == "ok"
    assert seen.count(False) == found.calls
    assert seen[-1] is True
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("kernel", [wrong_kernels.raises, wrong_kernels.refuses, wrong_kernels.wrong_shape])
def test_the_fast_path_is_restored_whatever_happens(kernel: Any):
    for phase in ("prefill", "train"):
        assert record(kernel, phase=phase).status != "ok"
        assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("variant", ["block_post_ln", "block_pre_ln"])
def test_the_fast_path_hides_no_wrong_kernel(variant: str):
    assert record(wrong_kernels.plain, variant=variant).status == "ok"
    assert record(wrong_kernels.scale_off, variant=variant).status == "mismatch"


# Reproducibility


def test_the_seed_decides_every_error_whatever_the_order():
    cases: list[dict[str, Any]] = [
        {},
        {"phase": "decode", **GQA},
        {"phase": "train", "mask": "none"},
        {"mask": "padding", **MLA},
    ]

    def errors(order: list[int], **options: Any) -> dict[int, Any]:
        found = {at: record(regimes=("plain", "wide", "poison"), **options, **cases[at]) for at in order}
        return {at: (r.status, r.calls, [getattr(r, n) for n in EQUALITY], r.equivalence) for at, r in found.items()}

    torch.manual_seed(1)
    first = errors([0, 1, 2, 3])
    torch.manual_seed(2)
    assert errors([3, 1, 2, 0]) == first
    assert errors([2], timing=BRIEF)[2] == first[2]
    other = errors([0, 1, 2, 3], seed=1)
    assert all(other[at][3] != first[at][3] for at in first)


# Comparisons that cannot be judged


def test_where_every_regime_overflows_the_row_is_an_error_and_never_ok(monkeypatch: pytest.MonkeyPatch):
    honest = harness.cell.build.randomise

    def huge(module: nn.Module, generator: torch.Generator) -> None:
        honest(module, generator)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(300)

    monkeypatch.setattr(harness.cell.build, "randomise", huge)
    found = record(dtype="float16", regimes=("plain", "peaked"))
    assert found.status == "error"
    assert found.error is not None and found.error.startswith("ArithmeticError: ")
    assert "plain, peaked" in found.error
    assert empty(found, *EQUALITY)


def test_a_comparison_over_regimes_that_do_not_apply_raises():
    pair = harness.cell.build.build_pair(case(mask="none"), find_kernel("eager"), 0)
    with pytest.raises(ArithmeticError, match="poison"):
        compare_pair(pair, ("poison",), seed=0, stopwatch=Stopwatch())
    assert record(mask="none", regimes=("poison",)).status == "error"
