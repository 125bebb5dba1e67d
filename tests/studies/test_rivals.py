"""The rules of others: each accepts and rejects where its source says, and the tables count what they should."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.sensitivity.rivals import OURS, RULES, Compared, never_seen, rivalry, rivals_table, scores
from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.eager import eager
from harness.mutants.saboteurs.saboteur import Saboteur, everywhere
from harness.suite.config import load_suite

CELL = {"variant": "gqa", "embed_dim": 32, "heads": 4, "kv_heads": 2, "seq_len": 20, "mask": "causal", "batch": 2}


def compared(error: float, *, dtype: torch.dtype = torch.float32, rows: int = 10, wrong: int = 10) -> Compared:
    """Ones, of which the first `wrong` rows are off by `error`."""
    golden = torch.ones(rows, 4, dtype=torch.float64)
    candidate = golden.clone()
    candidate[:wrong] += error
    return Compared(candidate.to(dtype), golden.to(dtype), golden)


@pytest.mark.parametrize(
    ("rule", "dtype", "accepted", "rejected"),
    [
        ("assert_close", torch.float32, 1.0e-5, 1.3e-5),
        ("assert_close", torch.float64, 1.9e-7, 2.1e-7),
        ("assert_close", torch.float16, 0.5e-3, 3e-3),
        ("transformers", torch.float32, 0.9e-4, 1.1e-4),
        ("transformers", torch.float16, 9e-3, 12e-3),
        ("transformers", torch.bfloat16, 3.5e-2, 6e-2),
        ("kernelbench", torch.float32, 1.9e-4, 2.1e-4),
        ("kernelbench", torch.bfloat16, 1.5e-2, 3e-2),
        ("kernelbench_2024", torch.float32, 1.9e-2, 2.1e-2),
    ],
)
def test_limits(rule: str, dtype: torch.dtype, accepted: float, rejected: float) -> None:
    assert RULES[rule](compared(accepted, dtype=dtype))
    assert not RULES[rule](compared(rejected, dtype=dtype))


@pytest.mark.parametrize("rule", list(RULES))
def test_nan_is_rejected(rule: str) -> None:
    assert not RULES[rule](compared(float("nan")))


def test_transformers_needs_four_rows_of_five() -> None:
    assert RULES["transformers"](compared(1e3, wrong=2))
    assert not RULES["transformers"](compared(1e3, wrong=3))


def test_flash_attention_allows_twice_the_reference() -> None:
    golden = torch.zeros(4, dtype=torch.float64)
    reference = torch.full((4,), 1e-3)
    assert RULES["flash_attention"](Compared(torch.full((4,), 1.99e-3), reference, golden))
    assert not RULES["flash_attention"](Compared(torch.full((4,), 2.01e-3), reference, golden))


def test_flash_attention_forgives_two_roundings_at_0_3() -> None:
    golden = torch.tensor([1e-5], dtype=torch.float16)  # lost when 0.3 is added: the atol is 2e-5
    for error, accepted in ((1.9e-5, True), (2.2e-5, False)):
        candidate = golden + torch.tensor([error], dtype=torch.float16)
        assert RULES["flash_attention"](Compared(candidate, golden, golden.double())) == accepted


def saboteur(name: str, run: Any) -> Saboteur:
    return Saboteur(name, "made for this test", everywhere, kernel=lambda: Kernel(name, run, gives_weights=True))


def right(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    return eager(q, k, v, call)


def zeros(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    out, weights = eager(q, k, v, call)
    return torch.zeros_like(out), weights


def raises(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    raise RuntimeError("broken")


def writes(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    result = eager(q, k, v, call)
    q.zero_()
    return result


def overflows(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """No maximum subtracted: right for plain inputs, not for large ones."""
    out, weights = eager(q, k, v, call)
    top = ((q * call.scale) @ k.repeat_interleave(2, 1).mT).amax()
    return (out, weights) if bool(top < 20) else (torch.full_like(out, float("nan")), weights)


def test_who_sees_what() -> None:
    cases = load_suite({"name": "one", "grid": CELL}).cases
    tried = {run.__name__: run for run in (right, zeros, raises, writes, overflows)}
    judged = rivalry(cases, [saboteur(name, run) for name, run in tried.items()])
    table = rivals_table(judged)
    assert list(table.columns) == [*RULES, OURS, "cells"]
    assert (table["cells"] == 1).all()
    assert (table.loc["right", [*RULES, OURS]] == 0).all()
    for name in ("zeros", "raises"):
        assert (table.loc[name, [*RULES, OURS]] == 1).all(), name
    for name in ("writes", "overflows"):
        assert table.loc[name, OURS] == 1, name
        assert (table.loc[name, list(RULES)] == 0).all(), name
    assert never_seen(judged) == {name: ["writes", "overflows"] for name in RULES} | {OURS: []}
    summary = scores(judged)
    assert summary.loc[OURS, "all"] == 0.8 and summary.loc["kernelbench", "all"] == 0.4
    assert summary.loc["kernelbench", "never_seen"] == 2


def test_a_rule_that_rejects_the_right_one_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES._entries, "assert_close", lambda _: False)
    judged = rivalry(load_suite({"name": "one", "grid": CELL}).cases, [saboteur("zeros", zeros)])
    assert rivals_table(judged).loc["zeros", "assert_close"] == 0
    assert scores(judged).loc["assert_close", "rejects_right"] == 1


def test_gradients_are_compared_in_training() -> None:
    def detached(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return eager(q, k.detach(), v, call)

    train, prefill = (load_suite({"name": "one", "grid": CELL | {"phase": p}}).cases for p in ("train", "prefill"))
    assert rivals_table(rivalry(train, [saboteur("detached", detached)])).loc["detached", "kernelbench"] == 1
    assert rivals_table(rivalry(prefill, [saboteur("detached", detached)])).loc["detached", "kernelbench"] == 0
