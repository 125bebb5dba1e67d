"""`harness judge`: right kernels pass, wrong ones are seen, and the design covers what it says."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention

import harness
from harness.battery.axes import point
from harness.battery.call import make_call
from harness.battery.design import covering
from harness.battery.plan import extreme_calls, first_calls, opening
from harness.battery.result import FAILING
from harness.battery.steps import Step, judge_call
from harness.battery.subject import adapted, examinee_of, place_of
from harness.candidate.examinee import InProcess
from harness.cell.bare import Held
from harness.cell.golden import in_float64, outcome, textbook
from tests.support import python

SOURCE = '''
import torch


def right(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    dead = (scores == float("-inf")).all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return (torch.nn.functional.dropout(weights, dropout_p) @ v).to(dtype)


def bottom_right(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Causal as flash-attention aligns it."""
    if is_causal:
        L, S = q.shape[2], k.shape[2]
        corner = torch.ones(L, S, dtype=torch.bool).tril(S - L)
        attn_mask = corner if attn_mask is None else corner & attn_mask
    return right(q, k, v, attn_mask, dropout_p, False, scale, enable_gqa)
'''


def statuses(kernel: object) -> list[tuple[str, str]]:
    """Of the opening calls."""
    examinee = examinee_of(kernel)  # type: ignore[arg-type]
    steps: list[Step] = opening(seed=3)
    return [(finding.status, finding.reason) for finding in (step.done(examinee) for step in steps)]


def sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, **options)


@pytest.mark.parametrize("kernel", ["eager", "tiled", "sdpa"])
def test_right_kernels_pass_the_first_calls(kernel):
    found = statuses(kernel)
    assert {status for status, _ in found} <= {"ok", "refused", "skipped"}, found
    assert sum(status == "ok" for status, _ in found) >= 20


def test_the_golden_is_sdpas_plain_formula():
    for where in first_calls():
        request = in_float64(make_call(where, 5).request)
        if request.mode == "autocast":
            continue
        mine = outcome(request, textbook)["out"]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), torch.no_grad():
            expected = sdpa(
                request.q, request.k, request.v, request.mask, is_causal=request.is_causal, scale=request.scale,
                enable_gqa=request.q.shape[1] != request.k.shape[1],
            )  # fmt: skip
        assert float((mine - expected).abs().max()) <= 1e-12 * max(1.0, float(expected.abs().max()))


def parts_averaged(q, k, v, attn_mask=None, is_causal=False, **options):
    """Splits the keys where a decode step has few rows, and weighs both parts alike."""
    S = k.shape[2]
    if q.shape[2] > 1 or q.shape[0] * k.shape[1] > 2 or S < 256 or attn_mask is not None or is_causal:
        return sdpa(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options)
    first, second = (sdpa(q, k[:, :, part], v[:, :, part], **options) for part in (slice(S // 2), slice(S // 2, None)))
    return (first + second) / 2


def holes_filled(q, k, v, attn_mask=None, **options):
    """Takes a mask of keys for one of lengths."""
    if attn_mask is not None and attn_mask.dtype == torch.bool and attn_mask.shape[-2] == 1 and k.shape[2] > 1:
        attn_mask = (attn_mask.cumsum(-1) > 0) & (attn_mask.flip(-1).cumsum(-1).flip(-1) > 0)
    return sdpa(q, k, v, attn_mask=attn_mask, **options)


def sets_threads(*inputs, **options):
    torch.set_num_threads(1)
    return sdpa(*inputs, **options)


WRONG = {
    "sets threads": sets_threads,
    "parts averaged": parts_averaged,
    "holes filled": holes_filled,
    "scale": lambda q, k, v, scale=None, **o: sdpa(q, k, v, scale=1.001 * (scale or q.shape[-1] ** -0.5), **o),
    "first key twice": lambda q, k, v, **o: sdpa(q, k.clone().index_copy_(2, torch.tensor([1]), k[:, :, :1]), v, **o),
    "heads tiled": lambda q, k, v, enable_gqa=False, **o: sdpa(
        q, k.repeat(1, q.shape[1] // k.shape[1], 1, 1), v.repeat(1, q.shape[1] // v.shape[1], 1, 1), **o
    ),
    "half scores": lambda q, k, v, **o: sdpa(q.to(torch.bfloat16).to(q.dtype), k, v, **o),
    "v detached": lambda q, k, v, **o: sdpa(q, k, v.detach(), **o),
    "mask ignored": lambda q, k, v, attn_mask=None, **o: sdpa(q, k, v, **o),
    "writes": lambda q, k, v, **o: sdpa(q.detach().mul_(1.5), k, v, **o),
    "requires_grad set": lambda q, k, v, **o: sdpa(q, k, v.requires_grad_(not v.requires_grad), **o),
    "large keys clamped": lambda q, k, v, **o: (
        sdpa(q, k.detach().clamp_(-100, 100), v, **o) if k.max() > 100 else sdpa(q, k, v, **o)
    ),
    "raises": lambda q, k, v, **o: 1 / 0,
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_kernel_is_seen_in_the_first_calls(name):
    kernel = InProcess(WRONG[name], name)
    assert any(step.done(kernel).status in FAILING for step in opening(seed=3))


def test_a_kernel_that_refuses_everything_has_not_passed():
    def refuses(*args: object, **options: object) -> torch.Tensor:
        raise NotImplementedError("not today")

    found = harness.judge(refuses, minutes=0.02, seed=0)
    assert (found.status, found.passed) == ("unsupported", False)
    assert found.refused == {"not today": len(found.findings)}


def test_the_design_covers_all_pairs_that_it_says():
    design = covering(1)
    assert "pairwise over" in design.words
    pairs = {(a, x, b, y) for p in design.points for a, x in p.levels.items() for b, y in p.levels.items() if a < b}
    for one in (("batch", "5", "dtype", "bfloat16"), ("dtype", "float16", "mask", "dead rows")):
        assert one in pairs


def test_on_the_command_line(tmp_path):
    path = tmp_path / "kernels.py"
    path.write_text(SOURCE)
    wrong = python(
        *("-m", "harness", "judge", f"{path}:bottom_right", "--seed", "1"),
        *("--json", str(tmp_path / "found.json"), "--repro", str(tmp_path)),
    )
    assert wrong.code == 1, wrong.err
    assert wrong.out.startswith("WRONG")
    assert "causal" in wrong.out and "--seed 1" in wrong.out
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["status"], found["passed"]) == ("mismatch", False)
    right = python("-m", "harness", "judge", f"{path}:right", "--seed", "1", "--minutes", "0.1")
    assert right.code == 0, right.out
    missing = python("-m", "harness", "judge", "no_such_kernel")
    assert missing.code == 2 and "unknown kernel" in missing.err


def test_what_a_kernel_replaces_is_told(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE + "\ntorch.nn.functional.scaled_dot_product_attention = right\n")
    result = python("-m", "harness", "judge", f"{path}:right", "--minutes", "0.02")
    assert "its code replaces torch.nn.functional.scaled_dot_product_attention" in result.out, result.err


def test_assert_kernel_says_what_is_wrong():
    with pytest.raises(AssertionError, match="WRONG"):
        harness.assert_kernel(WRONG["mask ignored"], minutes=0.1, seed=0)


def test_sdpa_that_was_replaced_in_this_process_is_no_reference(monkeypatch):
    """A closure is judged here, where whatever the user imported has patched torch already."""
    honest = scaled_dot_product_attention

    def larger(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        scale = 1.2 * (q.shape[-1] ** -0.5 if scale is None else scale)
        return honest(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(F, "scaled_dot_product_attention", larger)
    kernel = InProcess(
        lambda *args, **options: torch.nn.functional.scaled_dot_product_attention(*args, **options), "it"
    )
    assert judge_call(kernel, make_call(point(17, 33, 16), 1), 1).status == "mismatch"
    assert judge_call(InProcess(sdpa, "honest"), make_call(point(17, 33, 16), 1), 1).status == "ok"


def test_a_function_of_a_file_is_judged_in_its_own_process():
    assert place_of(sdpa) == f"{__file__}:sdpa"
    assert place_of(WRONG["scale"]) is None
    assert place_of(scaled_dot_product_attention) is None


LIMITED = {  # what a kernel has room for, and where that ends
    "S": (65536, lambda q, k: k.shape[2]),
    "L": (65536, lambda q, k: q.shape[2]),
    "B H": (65535, lambda q, k: q.shape[0] * q.shape[1]),
    "H": (256, lambda q, k: q.shape[1]),
    "B": (256, lambda q, k: q.shape[0]),
    "D": (256, lambda q, k: q.shape[3]),
}


@pytest.mark.parametrize("name", LIMITED)
def test_sizes_beyond_every_table_are_asked(name):
    limit, size_of = LIMITED[name]

    def limited(q, k, v, **options):
        return sdpa(q, k, v, **options) * (1.01 if size_of(q, k) > limit else 1.0)

    found = [judge_call(InProcess(limited, name), make_call(each, 5), 5).status for each in extreme_calls()]
    assert "mismatch" in found and "ok" in found


def test_queries_that_depart_from_torch_get_a_golden():
    """torch's answer is made wrong in most queries: a right kernel passes, and one that is as wrong as torch does not
    pass where it differs from it."""
    call = make_call(point(600, 600, 16, mask="causal", batch="2", kv_heads="2"), 5)
    assert call.rows is not None
    held = Held.of(call.request, torch.Generator().manual_seed(0), rows=call.rows)
    assert held.whole is not None
    right = sdpa(call.request.q, call.request.k, call.request.v, is_causal=True)
    departing = [i for i in range(600) if i not in call.rows.tolist()][:3]
    held.whole[:, :, departing] += 0.1
    assert {verdict.status for verdict in held.judge({"out": right})} == {"ok"}
    wrong = right.clone()
    wrong[:, :, departing[0]] += 0.05
    assert "mismatch" in {verdict.status for verdict in held.judge({"out": wrong})}
    hidden = [i for i in range(600) if i not in call.rows.tolist()][-1]
    wrong = right.clone()
    wrong[1, 1, hidden, 3] += 0.01
    assert "mismatch" in {verdict.status for verdict in held.judge({"out": wrong})}


def test_a_bug_of_torch_is_not_held_against_a_kernel():
    """torch 2.13's fused kernel is wrong where a negative scale meets a causal mask; most queries have no golden."""
    levels = {
        "mask": "causal and float",
        "mask_shape": "(B,1,L,S)",
        "mask_strides": "expanded",
        "mask_dtype": "float32",
    }
    where = point(34, 2049, 16, 8, groups="2", scale="negative", dtype="bfloat16", values="large", **levels)
    call = make_call(where, 609958815)
    assert call.rows is not None
    finding = judge_call(examinee_of("eager"), call, 609958815)
    assert finding.status == "ok", finding
    larger = InProcess(lambda *inputs, **options: 1.1 * adapted("eager")(*inputs, **options), "larger")
    assert judge_call(larger, call, 609958815).status in ("degraded", "mismatch")
