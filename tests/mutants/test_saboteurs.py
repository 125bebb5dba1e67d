"""Saboteurs: right everywhere but for their bug, and `applies` says exactly where that bug is."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.case import Case
from harness.cell.build import Pair, build_pair
from harness.cell.draws import fast_path_off
from harness.cell.referee import outputs
from harness.cell.regimes import make_inputs
from harness.kernels.call import AttentionCall, ContractBroken, Kernel
from harness.kernels.eager import eager
from harness.kernels.front import make_call
from harness.mutants.saboteurs.reach import calls_of
from harness.mutants.saboteurs.saboteur import SABOTEURS, Saboteur, attend, load_all
from harness.variants.masks import MASKS
from harness.variants.specs import VARIANTS

load_all()
KERNEL_SABOTEURS = {name: SABOTEURS[name] for name in SABOTEURS if SABOTEURS[name].kernel is not None}
CORE = Kernel("core", attend, gives_weights=True)
SEQ_LEN = 42  # one whole tile of 32 and a partial one, in the decode steps too

# What one comparison of values cannot show: each has a test of its own below.
BY_REPETITION = {"sums_in_random_order", "output_buffer_reused", "last_output_again", "cached_by_shape"}
BY_PROBE = {"dropout_not_rescaled", "dropout_ignored", "reference_called_secretly", "strides_ignored"}
BY_LARGE_SCORES = {"exponentials_overflow_half"}
BY_POISON = {"nan_leaks_from_behind_the_mask"}
BY_CONTRACT = {"output_in_the_memory_of_q", "keys_scaled_in_place"}
ELSEWHERE = BY_REPETITION | BY_PROBE | BY_LARGE_SCORES | BY_POISON | BY_CONTRACT


def make_case(variant: str, mask: str, phase: str, **changes: Any) -> Case:
    raw: dict[str, Any] = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim", "head_dim"))
    raw |= {"embed_dim": 24, "heads": 4, "kv_heads": 2}
    resolved = VARIANTS[variant].resolve(raw)
    options = {"seq_len": SEQ_LEN, "batch": 2, "dtype": "float64", **changes}
    return Case(variant=variant, kernel="eager", embed_dim=24, heads=4, mask=mask, phase=phase, **resolved, **options)


SOME_MASKS = ("causal", "padding", "float_bias", "dead_rows")
CASES = [
    *(make_case("gqa", mask, phase) for mask, phase in product(MASKS, ("prefill", "decode", "train"))),
    *(
        make_case(variant, mask, phase)
        for variant, mask, phase in product(("mha", "mla"), SOME_MASKS, ("prefill", "decode", "train"))
    ),
    *(make_case("mqa", "causal", phase) for phase in ("prefill", "decode", "train")),
    *(make_case(variant, "causal", "decode") for variant in ("mla_naive", "mla_absorbed")),
    *(make_case("block_mla", mask, "train") for mask in ("causal", "padding")),
    *(make_case("gqa", mask, phase, batch=1) for mask in ("padding", "alibi") for phase in ("prefill", "train")),
    *(make_case("gqa", mask, phase, seq_len=20) for mask in ("causal", "padding") for phase in ("prefill", "decode")),
    *(make_case("gqa", mask, "decode", seq_len=64) for mask in ("causal", "sliding_window")),
    make_case("gqa", "causal", "prefill", seq_len=64),
    make_case("gqa", "causal", "train", seq_len=2),
    *(make_case("mha", "causal", "prefill", dtype=dtype) for dtype in ("bfloat16", "float16")),
    make_case("mqa", "per_head", "prefill"),
    make_case("mla", "per_head", "decode"),
]


def run(pair: Pair, x: Tensor, kernel: Kernel) -> dict[str, Tensor]:
    pair.watch.kernel = kernel
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(7)).to(x.dtype)
    with fast_path_off():
        return outputs(pair, pair.candidate, x, cotangent)


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name].nan_to_num(1e30), b[name].nan_to_num(1e30)) for name in a)


def inputs_of(case: Case, regime: str = "plain") -> Tensor:
    inputs = make_inputs(case, regime, torch.Generator().manual_seed(1), poison=math.nan)
    assert inputs is not None
    return inputs.candidate_x


def made(saboteur: Saboteur) -> Kernel:
    assert saboteur.kernel is not None
    return saboteur.kernel()


def test_registry():
    assert len(KERNEL_SABOTEURS) >= 52
    assert all(saboteur.name == name for name, saboteur in KERNEL_SABOTEURS.items())
    bugs = [saboteur.stands_for for saboteur in KERNEL_SABOTEURS.values()]
    assert len(set(bugs)) == len(bugs) and all(len(bug) > 20 for bug in bugs)
    assert KERNEL_SABOTEURS.keys() >= ELSEWHERE


@pytest.mark.parametrize("mask", list(MASKS))
def test_the_core_is_right(mask):
    for phase, variant in product(("prefill", "decode", "train"), ("gqa", "mla_absorbed")):
        for reached in calls_of(make_case(variant, mask, phase)):
            generator = torch.Generator().manual_seed(0)
            q, k, v = (
                torch.randn(t.shape, generator=generator, dtype=torch.float64).requires_grad_()
                for t in (reached.q, reached.k, reached.v)
            )
            call = replace(reached.call, need_weights=True)
            ours, theirs = attend(q, k, v, call), eager(q, k, v, call)
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
            gradients = [torch.autograd.grad(out.sin().sum(), (q, k, v)) for out, _ in (ours, theirs)]
            for a, b in zip(*gradients, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.case_id)
def test_applies_is_exact(case):
    # Of two keys only large scores make one weight small.
    pair, x = build_pair(case, CORE, seed=3), inputs_of(case, "plain" if case.seq_len > 2 else "peaked")
    pair.watch.checking = False
    right = run(pair, x, CORE)
    wrong_about = []
    for name, saboteur in KERNEL_SABOTEURS.items():
        applies = saboteur.applies(case)
        if applies and name in ELSEWHERE:
            continue
        if same_bits(run(pair, x, made(saboteur)), right) == applies:
            wrong_about.append(f"{name}: applies {applies}")
    assert not wrong_about


@pytest.mark.parametrize("case", CASES[:36:5], ids=lambda case: case.case_id)
def test_the_calls_of_a_case_are_those_that_reach_the_kernel(case):
    caught: list[tuple[Tensor, Tensor, Tensor, AttentionCall]] = []

    def catch(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        caught.append((q, k, v, call))
        return attend(q, k, v, call)

    run(build_pair(case, CORE, seed=3), inputs_of(case), replace(CORE, run=catch))
    for (q, k, v, call), reached in zip(caught, calls_of(case), strict=True):
        assert (q.shape, k.shape, v.shape) == (reached.q.shape, reached.k.shape, reached.v.shape)
        assert q.dtype == reached.q.dtype
        for field in ("scale", "q_start", "causal", "left", "right"):
            assert getattr(call, field) == getattr(reached.call, field)
        assert (call.mask is None) == (reached.call.mask is None)
        assert call.mask is None or (reached.call.mask is not None and torch.equal(call.mask, reached.call.mask))


@pytest.mark.parametrize("name", sorted(BY_REPETITION))
def test_seen_by_repetition(name):
    case = make_case("gqa", "causal", "prefill")
    pair, kernel = build_pair(case, CORE, seed=3), made(KERNEL_SABOTEURS[name])
    q, k, v = torch.randn(3, 2, 4, SEQ_LEN, 6, dtype=torch.float64)
    call = make_call(q, k, v, causal=True)
    first, _ = kernel.run(q, k, v, call)
    kept = first.clone()
    repeats = [kernel.run(q, k, v, call)[0].clone() for _ in range(8)]
    second, _ = kernel.run(q, k, 2 * v, call)
    if name == "sums_in_random_order":
        assert any(not torch.equal(kept, repeat) for repeat in repeats)
        torch.testing.assert_close(repeats, [kept] * 8, rtol=1e-12, atol=1e-12)
    elif name == "output_buffer_reused":
        assert second.data_ptr() == first.data_ptr() and not torch.equal(first, kept)
    else:
        assert torch.equal(second, kept)  # the values were doubled, the result was not
        x = inputs_of(case)
        run(pair, x, kernel := made(KERNEL_SABOTEURS[name]))
        assert not same_bits(run(pair, 2 * x, kernel), run(pair, 2 * x, CORE))


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_seen_by_dropout(p):
    q, k, v = torch.randn(3, 2, 4, 64, 6, dtype=torch.float64)
    call = replace(make_call(q, k, v, dropout_p=p), need_weights=True)
    right, _ = attend(q, k, v, replace(call, dropout_p=0.0))
    rows = {
        name: made(KERNEL_SABOTEURS[name]).run(q, k, v, call) for name in ("dropout_not_rescaled", "dropout_ignored")
    }
    sums = {name: weights.sum(-1).mean().item() for name, (_, weights) in rows.items() if weights is not None}
    assert sums["dropout_ignored"] == pytest.approx(1.0) and torch.equal(rows["dropout_ignored"][0], right)
    assert sums["dropout_not_rescaled"] == pytest.approx(1.0 - p, abs=0.05)
    assert attend(q, k, v, call)[1].sum(-1).mean().item() == pytest.approx(1.0, abs=0.05)


def test_seen_by_a_delegation_spy(monkeypatch):
    q, k, v = torch.randn(3, 2, 4, 9, 6, dtype=torch.float64)
    spied: list[str] = []
    real = F.scaled_dot_product_attention

    def spy(*arguments: Any, **options: Any) -> Tensor:
        spied.append("called")
        return real(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    for name, saboteur in KERNEL_SABOTEURS.items():
        made(saboteur).run(q.clone(), k.clone(), v.clone(), make_call(q, k, v))
        assert bool(spied) == (name == "reference_called_secretly"), name
        spied.clear()


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.case_id)
def test_the_secret_reference_is_right(case):
    pair, x = build_pair(case, CORE, seed=3), inputs_of(case)
    found, right = (run(pair, x, k) for k in (made(KERNEL_SABOTEURS["reference_called_secretly"]), CORE))
    tolerance = 1e-9 if case.dtype == "float64" else 0.1
    for name in right:
        torch.testing.assert_close(found[name], right[name], rtol=tolerance, atol=tolerance)


def test_seen_by_strides():
    base = torch.randn(2, 9, 4, 6, dtype=torch.float64)
    k, v = torch.randn(2, 2, 4, 9, 6, dtype=torch.float64)
    q, kernel = base.transpose(1, 2), made(KERNEL_SABOTEURS["strides_ignored"])
    call = make_call(q, k, v)
    right, _ = attend(q, k, v, call)
    assert torch.equal(kernel.run(q.contiguous(), k, v, call)[0], right)
    assert not torch.allclose(kernel.run(q, k, v, call)[0], right)


@pytest.mark.parametrize(
    ("name", "dtype"), [("exponentials_overflow_half", "float64"), ("no_max_subtraction", "float32")]
)
def test_seen_by_large_scores_alone(name, dtype):
    case = make_case("gqa", "causal", "prefill", dtype=dtype)
    pair = build_pair(case, CORE, seed=3)
    for regime, shows in (("tiny", False), ("peaked", True)):
        x = inputs_of(case, regime)
        x = 2 * x if shows else x
        out = run(pair, x, made(KERNEL_SABOTEURS[name]))["out"]
        assert bool(out.isnan().any()) == shows
        if not shows:
            torch.testing.assert_close(out, run(pair, x, CORE)["out"])


@pytest.mark.parametrize("case", [c for c in CASES if c.phase != "train"], ids=lambda case: case.case_id)
def test_seen_by_poison(case):
    """`applies` is what really happens to a candidate without the shield, token by token."""
    inputs = make_inputs(case, "poison", torch.Generator().manual_seed(1), poison=math.nan)
    saboteur = KERNEL_SABOTEURS["nan_leaks_from_behind_the_mask"]
    if inputs is None or inputs.poisoned is None:
        assert not saboteur.applies(case)
        return
    poisoned = inputs.poisoned
    for kernel, leaks in ((CORE, False), (made(saboteur), saboteur.applies(case))):
        out = run(build_pair(case, kernel, seed=3), inputs.candidate_x, kernel)["out"]
        assert bool(out[~poisoned].isnan().any()) == leaks


@pytest.mark.parametrize("name", sorted(BY_CONTRACT))
@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
def test_seen_by_the_watch(name, phase):
    case, saboteur = make_case("gqa", "causal", phase), KERNEL_SABOTEURS[name]
    pair, x = build_pair(case, CORE, seed=3), inputs_of(case)
    if saboteur.applies(case):
        with pytest.raises(ContractBroken, match="wrote into its input"):
            run(pair, x, made(saboteur))
    else:
        assert same_bits(run(pair, x, made(saboteur)), run(pair, x, CORE))
