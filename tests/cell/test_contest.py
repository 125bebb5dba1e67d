"""Contests: what runs in them is what the cell is, and what they measured lands in the right rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.case import Case
from harness.cell import contested
from harness.cell.contest import compete, fill, full_cache, rival
from harness.cell.measure import measure_by_smaller
from harness.kernels.call import Kernel
from harness.kernels.eager import KERNEL as EAGER
from harness.kernels.front import find_kernel
from harness.suite.schema import Timing
from harness.variants.cache import KVCache, SlidingKVCache
from tests import wrong_kernels
from tests.support.records import record

BRIEF = Timing(budget_s=0.01, min_blocks=3, max_blocks=3)
SIZES: dict[str, dict[str, Any]] = {
    "mha": {"kv_heads": 4},
    "gqa": {"kv_heads": 2},
    "mla": {"kv_heads": None, "kv_lora_rank": 16, "rope_head_dim": 4, "v_head_dim": 8},
}


def case(variant: str = "mha", **axes: Any) -> Case:
    fixed: dict[str, Any] = {
        "variant": variant, "kernel": "eager", "embed_dim": 32, "heads": 4, "head_dim": 8, "seq_len": 40, "batch": 2,
        "mask": "causal", "dtype": "float32", "phase": "decode",
    }  # fmt: skip
    return Case(**(fixed | SIZES[variant] | axes))


def heard(case: Case) -> list[tuple[int, int]]:
    """Queries and keys of the kernel's calls in one timed call."""
    calls: list[tuple[int, int]] = []

    def listen(q, k, v, call):
        calls.append((q.shape[2], k.shape[2]))
        return EAGER.run(q, k, v, call)

    own = rival(case, replace(EAGER, run=listen), seed=0)
    own.warm_up()
    calls.clear()
    for _ in range(2):  # a step is undone before the next
        out = own.call(own.example)["out"]
        assert out.shape == (case.batch, own.example.shape[1], case.embed_dim)
        assert out.isfinite().all()
    first, second = calls
    assert first == second
    return calls[:1]


@pytest.mark.parametrize("variant", SIZES)
def test_a_decode_call_sees_one_query_and_every_key(variant: str):
    assert heard(case(variant)) == [(1, 40)]


def test_a_prefill_call_sees_all():
    assert heard(case(phase="prefill")) == [(40, 40)]


def test_a_filled_cache_is_as_large_as_the_formula_says_and_keeps_what_it_has():
    own = rival(case("gqa"), EAGER, seed=0)
    cache = full_cache(own)
    assert (cache.length, cache.allocated_bytes) == (1, 2 * 2 * 40 * 2 * 8 * 4)
    first = [stream.clone() for stream in cache.streams()]
    fill(cache, 39)
    assert cache.length == 39
    for before, stream in zip(first, cache.streams(), strict=True):
        torch.testing.assert_close(stream[:, :, :1], before, rtol=0, atol=0)
        assert 0.9 < stream[:, :, 1:].std() < 1.1


def test_a_sliding_cache_is_filled_as_far_as_it_reaches():
    cache = SlidingKVCache(3000, window=100)
    cache.append(torch.ones(1, 1, 1, 4))
    fill(cache, 2500)
    assert cache.length == 2500
    assert cache.streams()[0].shape == (1, 1, 100, 4)


def test_all_sides_are_sampled_in_the_same_blocks():
    cases = [case("mha"), case("gqa"), case("mla")]
    found = compete(cases, seed=0, timing=BRIEF)
    assert {name: len(seconds) for name, seconds in found.samples_s.items()} == {each.case_id: 3 for each in cases}
    assert found.case_id == cases[0].case_id
    assert found.measured_seconds is not None and 0 < found.measured_seconds <= (found.seconds or 0)


def test_what_a_contest_measured_lands_in_the_right_rows():
    samples = {"a": [1.0] * 12, "b": [3.0] * 12, "c": [0.5] * 12}
    waited = {"a": [0.0] * 12, "b": [0.0] * 12, "c": [0.9] * 12}
    found = record("a", samples_s=samples, waited=waited, threads=2, others_busy=0.25, seconds=9.0)
    before = {name: record(name, err_ratio=0.5, seconds=1.0) for name in samples}
    a, b, c = contested(before, found, seed=0)
    assert (a.against, a.ratio_to, a.ratio_lo, a.ratio_hi, a.latency_ms) == ("a", 1.0, 1.0, 1.0, 1000.0)
    assert (b.against, b.timing) == ("a", "ok")
    assert b.latency_ms == pytest.approx(3000.0)
    assert b.ratio_to == pytest.approx(3.0)
    assert b.ratio_lo is not None and b.ratio_hi is not None and 2.9 < b.ratio_lo < 3.0 < b.ratio_hi < 3.1
    assert (c.timing, a.timing) == ("disturbed", "ok")
    assert {(each.err_ratio, each.threads, each.others_busy, each.attempt) for each in (a, b, c)} == {(0.5, 2, 0.25, 2)}
    assert [each.seconds for each in (a, b, c)] == [10.0, 1.0, 1.0]
    assert b.samples_s == {"candidate": samples["b"]}
    assert a.latency_ratio is None  # no reference was timed


# Cells that are too long to be judged as they are


def large(kernel: Kernel, **axes: Any) -> Any:
    return measure_by_smaller(case(seq_len=400, **axes), kernel, seed=0, regimes=["plain"], judge_len=12)


@pytest.mark.parametrize("variant", SIZES)
def test_a_long_cell_is_judged_at_a_smaller_size_and_says_which(variant: str):
    found = large(find_kernel("eager"), variant=variant, **SIZES[variant])
    assert (found.status, found.seq_len) == ("ok", 400)
    assert found.judged_as == replace(case(variant), seq_len=12).case_id
    assert found.err_ratio is not None and found.calls
    assert found.kv_cache_bytes == found.kv_cache_bytes_formula  # of the real size, allocated
    assert found.kv_cache_bytes is not None and found.kv_cache_bytes > 400 * 2 * 4
    assert found.params == found.params_formula == found.ref_params


def test_a_wrong_kernel_is_seen_at_the_smaller_size():
    found = large(find_kernel(wrong_kernels.scale_off))
    assert found.status == "mismatch"
    assert found.timing == "none"


def test_a_cache_that_is_larger_than_its_formula_is_a_mismatch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(KVCache, "allocated_bytes", property(lambda self: 7))
    found = large(find_kernel("eager"), batch=1, embed_dim=64, head_dim=16)
    assert found.status == "mismatch"
    assert "kv_cache_bytes" in str(found.error)
