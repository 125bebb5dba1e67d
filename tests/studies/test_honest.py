"""The honest kernels are correct, differ from each other in rounding, and the false-alarm study can fail."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.sensitivity import honest
from bench.sensitivity.alarms import GRID, alarms, false_alarms, summary
from bench.sensitivity.honest import HONEST
from harness.kernels.call import AttentionCall, Kernel, Unsupported
from harness.kernels.front import attention

QUICK = [name for name in HONEST if name != "compiled"]  # a graph takes 10 s: it has a test of its own
ONE_CELL = {
    "name": "one",
    "grid": {"variant": "gqa", "embed_dim": 32, "heads": 4, "kv_heads": 2, "seq_len": 33, "mask": "causal", "batch": 2},
}


def tensors(L: int = 37, S: int = 37, H_kv: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(L + S)
    return tuple(torch.randn(2, heads, n, 8).to(dtype) for heads, n in ((4, L), (H_kv, S), (H_kv, S)))


def calls(L: int, S: int) -> dict[str, dict[str, Any]]:
    seen = torch.rand(2, 4, L, S, generator=torch.Generator().manual_seed(1)) > 0.4
    seen[:, :, 0] = False  # a dead row
    bias = torch.randn(2, 1, L, S, generator=torch.Generator().manual_seed(2))
    return {
        "none": {},
        "causal": {"causal": True},
        "window": {"window": (3, 2), "scale": 0.7},
        "bool": {"mask": seen},
        "bias": {"mask": bias, "causal": True},
        "bias with -inf": {"mask": bias.masked_fill(~seen[:, :1], float("-inf"))},
    }


def golden(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    mask = options.pop("mask", None)
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    result: Tensor = attention(q.double(), k.double(), v.double(), mask=mask, kernel="eager", **options)
    return result


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("sizes", [(37, 37, 2), (1, 130, 1), (5, 20, 4)], ids=str)
def test_correct(name: str, sizes: tuple[int, int, int]) -> None:
    q, k, v = tensors(*sizes)
    for what, options in calls(*sizes[:2]).items():
        out = attention(q, k, v, kernel=HONEST[name], **options)
        error = float((out - golden(q, k, v, **options)).abs().max())
        assert error <= 1e-6, what


@pytest.mark.parametrize("name", QUICK)
def test_half_types_are_scored_in_float32(name: str) -> None:
    q, k, v = tensors(dtype=torch.bfloat16)
    q, k = 8 * q, 8 * k
    out = attention(q, k, v, causal=True, kernel=HONEST[name])
    assert out.dtype == torch.bfloat16
    exact = golden(q, k, v, causal=True)
    assert float((out - exact).abs().max()) <= torch.finfo(torch.bfloat16).eps * float(exact.abs().max())


@pytest.mark.parametrize("name", [name for name in QUICK if name != "flex"])
def test_gradients(name: str) -> None:
    cotangent = torch.randn(2, 4, 37, 8, generator=torch.Generator().manual_seed(3))
    for what, options in calls(37, 37).items():
        leaves = [t.requires_grad_() for t in tensors()]
        found = torch.autograd.grad(attention(*leaves, kernel=HONEST[name], **options), leaves, cotangent)
        exact = torch.autograd.grad(golden(*leaves, **options), leaves, cotangent.double())
        for mine, theirs in zip(found, exact, strict=True):
            assert float((mine - theirs).abs().max()) <= 5e-6, what


def test_compiled() -> None:
    q, k, v = tensors()
    options = calls(37, 37)["bias with -inf"]
    out = attention(q, k, v, kernel=HONEST["compiled"], **options)
    assert float((out - golden(q, k, v, **options)).abs().max()) <= 1e-6


def test_no_two_round_alike() -> None:
    alike = ("padded_flash", "flash_style")  # as others here, unless values are narrower, or the type is half
    """Otherwise the study would count one kernel twice. torch's own may: math is `scale_split`, flex the textbook."""
    q, k, v = tensors(130, 130)
    options = calls(130, 130)["bias"]
    by_result: dict[bytes, list[str]] = {}
    for name in set(QUICK) - {"sdpa_math", "flex", *alike}:
        out = attention(q, k, v, kernel=HONEST[name], **options)
        by_result.setdefault(out.numpy().tobytes(), []).append(name)
    assert [names for names in by_result.values() if len(names) > 1] == []


def test_refuses_what_it_has_not() -> None:
    q, k, v = tensors()
    with pytest.raises(Unsupported, match="softcap"):
        attention(q, k, v, softcap=5.0, kernel=HONEST["scale_on_scores"])
    with pytest.raises(Unsupported, match="FLASH_ATTENTION"):
        attention(q, k, v[..., :6].contiguous(), kernel=HONEST["sdpa_flash"])
    with pytest.raises(Unsupported, match="backward"):
        attention(q.requires_grad_(), k, v, kernel=HONEST["flex"])


def test_honest_kernels_raise_no_alarm() -> None:
    runs = alarms(config=ONE_CELL, kernels=[HONEST[name] for name in QUICK])
    assert len(runs) == len(QUICK) and set(runs["status"]) <= {"ok", "degraded"}
    assert false_alarms(runs).empty
    assert (summary(runs)["mismatch"] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_flash_kernels_raise_no_alarm_where_the_reference_has_none(dtype: str) -> None:
    """MLA's keys are wider than its values: SDPA takes its plain formula, which rounds less in the backward pass."""
    cell = {"variant": "mla", "embed_dim": 32, "heads": 8, "seq_len": 101, "mask": "causal", "phase": "train"}
    config = {"name": "mla", "grid": cell | {"dtype": dtype, "batch": 2}}

    def off(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return HONEST["flash_style"].run(q, k, v, dataclasses.replace(call, scale=1.001 * call.scale))

    runs = alarms(config=config, kernels=[HONEST["padded_flash"], HONEST["flash_style"], Kernel("off", off)])
    assert dict(zip(runs["kernel"], runs["status"], strict=True)) == {
        "padded_flash": "ok", "flash_style": "ok", "off": "mismatch"
    }  # fmt: skip


def test_a_wrong_kernel_is_an_alarm() -> None:
    """The study can fail: a scale wrong by 1e-4 is none of rounding, nor is a kernel that writes into its inputs."""

    def off(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> honest.Result:
        return HONEST["scale_on_scores"].run(q, k, v, dataclasses.replace(call, scale=1.0001 * call.scale))

    def writes(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> honest.Result:
        q.mul_(2)
        return HONEST["scale_on_scores"].run(q, k, v, call)

    runs = alarms(config=ONE_CELL, kernels=[Kernel("off", off), Kernel("writes", writes), HONEST["scale_on_scores"]])
    assert dict(zip(runs["kernel"], runs["status"], strict=True)) == {
        "off": "mismatch",
        "writes": "mismatch",
        "scale_on_scores": "ok",
    }
    assert list(false_alarms(runs)["kernel"]) == ["off", "writes"]


def test_only_degraded_is_excused_and_only_in_log_space() -> None:
    def half(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> honest.Result:
        out, _ = HONEST["scale_on_scores"].run(q, k, v, call)
        return 1.5 * out, None

    runs = alarms(config=ONE_CELL, kernels=[Kernel("log_space", half)])
    assert list(false_alarms(runs)["status"]) == ["mismatch"]


def test_the_grid_is_large_enough() -> None:
    from harness.suite.config import load_suite
    from harness.variants.masks import MASKS

    cases = load_suite(GRID).cases
    assert len(cases) * len(HONEST) >= 5_000
    assert {case.phase for case in cases} == {"prefill", "decode", "train"}
    assert {case.mask for case in cases} == {*MASKS} and len({case.dtype for case in cases}) == 4
