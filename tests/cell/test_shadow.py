"""Cells in half precision are compared once more in float32, where no rounding of q, k and v hides a wrong function."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.case import Case
from harness.cell.build import build_pair
from harness.cell.large import compare_pair
from harness.cell.measure import measure
from harness.cell.referee import IN_FLOAT32, Referee
from harness.cell.rule import Equivalence, TensorVerdict
from harness.cell.timing import Stopwatch
from harness.kernels.call import AttentionCall, Kernel, Unsupported
from harness.kernels.eager import eager
from harness.kernels.front import find_kernel
from harness.record import Record
from harness.suite.schema import REGIMES, Timing

HALF = ("bfloat16", "float16")
MLA: dict[str, Any] = {"variant": "mla", "kv_heads": None, "kv_lora_rank": 16, "rope_head_dim": 4, "v_head_dim": 8}
CELLS: tuple[dict[str, Any], ...] = (
    {},
    {"phase": "train"},
    {"phase": "decode", "variant": "gqa", "kv_heads": 2},
    {"mask": "float_bias", "variant": "gqa", "kv_heads": 2},
    {"mask": "dead_rows"},
    {"phase": "decode", "mask": "padding", **MLA},
    {"variant": "block_post_ln"},
)
Run = Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Tensor | None]]


def case(**axes: Any) -> Case:
    defaults: dict[str, Any] = {
        "variant": "mha", "kernel": "eager", "embed_dim": 32, "heads": 4, "kv_heads": 4, "head_dim": 8,
        "seq_len": 20, "batch": 2, "mask": "causal", "dtype": "bfloat16", "phase": "prefill",
    }  # fmt: skip
    return Case(**(defaults | axes))


def record(run: Run | str = "eager", *, regimes: tuple[str, ...] = REGIMES, **axes: Any) -> Record:
    kernel = find_kernel(run) if isinstance(run, str) else Kernel("own", run, gives_weights=True)
    return measure(case(**axes), kernel, seed=0, regimes=regimes, timing=Timing(enabled=False))


def shadows(found: Record) -> list[dict[str, Any]]:
    return [row for row in found.equivalence if row["tensor"].endswith(IN_FLOAT32)]


def scaled_by(factor: float) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return eager(q, k, v, dataclasses.replace(call, scale=factor * call.scale))

    return run


def in_float32(instead: Callable[[], Any]) -> Run:
    """Right in half precision; in float32 whatever `instead` does, or gives for an output."""

    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        if q.dtype == torch.float32:
            return instead(), None
        return eager(q, k, v, call)

    return run


def raising(failure: Exception) -> Callable[[], None]:
    def instead() -> None:
        raise failure

    return instead


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("axes", CELLS, ids=str)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_right_kernels_are_ok_and_really_compared(kernel: str, axes: dict[str, Any], dtype: str):
    found = record(kernel, dtype=dtype, **axes)
    assert (found.status, found.error) == ("ok", None)
    rows = shadows(found)
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["regime"] for row in rows} == {"plain"}
    # Everything that the cell compares, and nothing else.
    plain = [row for row in found.equivalence if row["regime"] == "plain" and not row["is_aside"]]
    assert [row["tensor"] for row in rows] == [f"{row['tensor']} (in float32)" for row in plain]
    for row, half in zip(rows, plain, strict=True):
        assert 0 < row["err_budget"] < 1e-2 * half["err_budget"]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("axes", CELLS, ids=str)
@pytest.mark.parametrize("factor", [1.01, 1.001])
def test_a_scale_that_half_precision_hides_is_a_mismatch(factor: float, axes: dict[str, Any], dtype: str):
    found = record(scaled_by(factor), dtype=dtype, **axes)
    assert found.status == "mismatch"
    assert "mismatch" in {row["status"] for row in shadows(found)}
    # The bare call in half precision may see it, too, and then speaks for the cell.
    assert found.worst_tensor is not None and found.error is not None
    if found.worst_tensor != "check: half precision":
        assert found.worst_tensor.endswith(" (in float32)")
        assert found.error.startswith(f"{found.worst_tensor} in regime plain: error is ")
    assert "mismatch" not in {row["status"] for row in found.equivalence if not row["is_aside"]}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_other_dtypes_have_no_shadow(dtype: str):
    assert shadows(record(dtype=dtype)) == []


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (Unsupported("tensor cores take 16 bits"), "Unsupported: tensor cores take 16 bits"),
        (RuntimeError("expected BFloat16"), "RuntimeError: expected BFloat16"),
        (MemoryError("twice as much"), "MemoryError: twice as much"),
    ],
    ids=str,
)
def test_a_kernel_that_refuses_float32_is_judged_without_and_that_is_written_down(failure: Exception, told: str):
    found = record(in_float32(raising(failure)))
    assert (found.status, found.error) == ("ok", None)
    (row,) = shadows(found)
    assert row["tensor"] == "out (in float32)"
    assert (row["status"], row["reason"]) == ("skipped", f"the kernel does not run in float32: {told}")


def test_a_kernel_that_answers_float32_in_half_precision_has_no_shadow():
    found = record(in_float32(lambda: torch.zeros(2, 4, 20, 8, dtype=torch.bfloat16)))
    assert found.status == "ok"
    assert "torch.bfloat16 instead of" in shadows(found)[0]["reason"]


def test_a_failure_of_the_reference_in_float32_is_not_taken_for_the_kernels():
    pair = build_pair(case(), find_kernel("eager"), 0)
    forward = pair.reference.forward

    def fails(module: Any, x: Tensor, *rest: Any) -> Any:
        if x.dtype == torch.float32:
            raise RuntimeError("ours")
        return forward(module, x, *rest)

    pair = dataclasses.replace(pair, reference=dataclasses.replace(pair.reference, forward=fails))
    with pytest.raises(RuntimeError, match="ours"):
        list(Referee(pair, ["plain"], seed=0, poison=None).examine(pair))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("axes", [{}, {"phase": "train"}], ids=str)
def test_the_columns_of_a_passing_cell_are_those_of_its_own_dtype(axes: dict[str, Any], dtype: str):
    found = record(dtype=dtype, regimes=("plain",), **axes)
    own = [row for row in found.equivalence if not row["is_aside"]]
    worst = max(own, key=lambda row: row["err_ratio"])
    assert (found.worst_tensor, found.err_ratio) == (worst["tensor"], worst["err_ratio"])
    assert (found.max_abs_err, found.err_budget) == (worst["max_abs_err"], worst["err_budget"])
    gradients = [row["max_abs_err"] for row in own if row["tensor"].startswith("grad ")]
    assert found.grad_max_abs_err == max(gradients, default=None)


def test_gradients_that_are_wrong_in_float32_alone_stay_out_of_the_column():
    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return eager(q, k, 100 * v if q.dtype == torch.float32 else v, call)

    found = record(run, regimes=("plain",), phase="train")
    assert found.status == "mismatch"
    own = record(regimes=("plain",), phase="train")
    assert found.grad_max_abs_err == own.grad_max_abs_err


def verdict(status: str, ratio: float, *, is_aside: bool) -> TensorVerdict:
    return TensorVerdict("out", "plain", status, err_ratio=ratio, is_aside=is_aside)


@pytest.mark.parametrize(
    ("half", "shadow", "shadow_speaks"),
    [
        ("ok", "ok", False),
        ("ok", "skipped", False),
        ("mismatch", "mismatch", False),
        ("degraded", "ok", False),
        ("ok", "degraded", True),
        ("degraded", "mismatch", True),
    ],
)
def test_a_shadow_speaks_for_its_cell_only_where_it_is_what_fails(half: str, shadow: str, shadow_speaks: bool):
    found = Equivalence((verdict(half, 0.5, is_aside=False), verdict(shadow, 0.9, is_aside=True)))
    assert found.worst.is_aside == shadow_speaks


def test_a_shadow_alone_proves_nothing_about_the_cell():
    """Where the reference overflows in float16 there is nothing to compare: an ok in float32 must not hide that."""
    pair = build_pair(case(dtype="float16", variant="gqa", kv_heads=2), find_kernel("eager"), 0)
    forward = pair.reference.forward

    def overflows(module: Any, x: Tensor, *rest: Any) -> Any:
        out, weights = forward(module, x, *rest)
        return (out * float("inf") if x.dtype == torch.float16 else out), weights

    pair = dataclasses.replace(pair, reference=dataclasses.replace(pair.reference, forward=overflows))
    verdicts = list(Referee(pair, ["plain"], seed=0, poison=None).examine(pair))
    assert [(v.status, v.is_aside) for v in verdicts[:2]] == [("skipped", False), ("ok", True)]
    assert all(v.is_aside for v in verdicts[1:])
    with pytest.raises(ArithmeticError, match="none of plain can be judged"):
        compare_pair(pair, ["plain"], seed=0, stopwatch=Stopwatch())


def test_the_shadow_sees_the_rounded_weights_masks_and_inputs():
    pair = build_pair(case(mask="float_bias", variant="gqa", kv_heads=2), find_kernel("eager"), 0)
    twin = pair.in_float32()
    for side, copy in ((pair.reference, twin.reference), (pair.candidate, twin.candidate)):
        for old, new in zip(side.module.parameters(), copy.module.parameters(), strict=True):
            assert (old.dtype, new.dtype) == (torch.bfloat16, torch.float32)
            assert torch.equal(old.float(), new)
    mask, old_mask = twin.candidate.views[0]["mask"], pair.candidate.views[0]["mask"]
    assert mask.dtype == torch.float32
    assert torch.equal(mask, old_mask.float())
    referee = Referee(pair, REGIMES, seed=0, poison=None)
    shadow = referee._shadow
    assert shadow is not None
    half, wide = referee.expected("plain"), shadow.expected("plain")
    assert half is not None and wide is not None
    assert wide.inputs.x.dtype == torch.float32
    assert torch.equal(wide.inputs.x, half.inputs.x.float())


def test_the_kernel_is_shared_and_its_calls_are_counted_apart():
    class Own:
        def __deepcopy__(self, memo: object) -> "Own":
            raise TypeError("holds a device")

        def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
            return eager(q, k, v, call)

    pair = build_pair(case(), Kernel("own", Own(), gives_weights=True, shielded=False, origin="a test"), 0)
    verdicts = list(Referee(pair, ["plain"], seed=0, poison=None).examine(pair))
    assert {v.status for v in verdicts if v.is_aside} == {"ok"}
    assert pair.calls == 1


def test_without_the_plain_regime_the_first_one_is_compared():
    found = record(scaled_by(1.01), regimes=("wide", "tiny"))
    assert {row["regime"] for row in shadows(found)} == {"wide"}
    assert found.status == "mismatch"


def test_the_shadow_changes_no_number_of_the_cell():
    pair = build_pair(case(), find_kernel("eager"), 0)
    alone, beside = (Referee(pair, REGIMES, seed=0, poison=None) for _ in range(2))
    verdicts = [v for v in beside.examine(pair) if not v.is_aside]
    assert verdicts == [v for regime in REGIMES for v in alone.judge(pair, regime)]
