"""Plugins that try to get an undeserved verdict or speed, by an author who had not seen the judge, and some of ours."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.candidate.channel import BrokenMessage
from harness.case import Case
from harness.record import Record
from harness.suite.schema import Timing
from harness.workers.job import Job
from harness.workers.local import Local, read_record
from tests.support import ROOT

CHEATS = ROOT / "bench" / "exam" / "b" / "cheats"
# Right kernels whose cheat is about speed alone: it must gain nothing, and reach nobody else.
RIGHT = {"answers_from_cache", "patches_clocks"}
WRONG = [
    "background_thread",
    "forges_messages",
    "honest_then_cheap",
    "lazy_tensor",
    "leaves_early",
    "notices_timing",
    "patches_comparisons",
    "patches_sdpa",
    "starves_others",
    "patches_softmax_later",
    "rewrites_the_judge",
    "steals_reference",
    "traces_its_caller",
    "works_in_a_fork",
]
PREFIX = """
import torch, time

def attend(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, stretch=1.0):
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (stretch * (q.shape[-1] ** -0.5 if scale is None else scale))
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    return scores.softmax(-1) @ v
"""
SIGNATURE = "(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False)"
LESS_WHILE_TIMED = """
import sys
def fast{signature}:
    frame, timed = sys._getframe(), False
    while frame is not None:
        timed = timed or frame.f_code.co_name == "go"
        frame = frame.f_back
    out = attend(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    return out * 0.99 if timed else out
"""
STOPS_THE_CLOCK = """
time.perf_counter = time.perf_counter_ns = time.monotonic = time.time = lambda: 0
sleep = time.sleep
def fast{signature}:
    sleep(0.02)
    return attend(q, k, v, attn_mask, is_causal, scale, enable_gqa)
"""
REMEMBERS_BY_SHAPE = """
answers = {{}}
def fast{signature}:
    key = (q.shape, k.shape)
    if key not in answers:
        answers[key] = attend(q, k, v, attn_mask, is_causal, scale, enable_gqa)
    return answers[key].clone()
"""
TAKES_MEMORY_ELSEWHERE = """
import numpy
def fast{signature}:
    space = numpy.ones(20_000_000)  # 160 MB, of which torch knows nothing
    return attend(q, k, v, attn_mask, is_causal, scale, enable_gqa) * float(space[-1])
"""
PATCHES_AT_IMPORT = """
def fast{signature}:
    return attend(q, k, v, attn_mask, is_causal, scale, enable_gqa, stretch=1.2)
torch.nn.functional.scaled_dot_product_attention = fast
"""
PATCHES_LATER = """
def fast{signature}:
    torch.nn.functional.scaled_dot_product_attention = fast
    return attend(q, k, v, attn_mask, is_causal, scale, enable_gqa, stretch=1.2)
"""


def timed_job(kernel: str) -> Job:
    case = Case(
        variant="gqa",
        kernel=kernel,
        embed_dim=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        seq_len=96,
        batch=1,
        mask="none",
        dtype="float32",
        phase="prefill",
    )
    return Job(case, 0, ("plain", "tiny"), Timing(budget_s=0.05, min_blocks=5, max_blocks=20), 1)


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    executor = Local()
    yield executor
    executor.close()


def records(local: Local, *kernels: str) -> list[Record]:
    return list(local.run([timed_job(kernel) for kernel in kernels]))


def written(tmp_path: Path, source: str) -> str:
    path = tmp_path / "attack.py"
    path.write_text(PREFIX + source.format(signature=SIGNATURE))
    return f"{path}:fast"


def test_every_cheat_is_tried():
    assert {path.stem for path in CHEATS.glob("*.py")} - {"__init__"} == {*RIGHT, *WRONG}


@pytest.mark.parametrize("cheat", WRONG)
def test_a_cheat_is_caught_and_reaches_nobody_else(local, cheat):
    cheated, beside = records(local, f"{CHEATS / cheat}.py:fast", "eager")
    assert cheated.status in ("mismatch", "error")
    assert cheated.error
    assert (beside.status, beside.error) == ("ok", None)


@pytest.mark.parametrize("cheat", sorted(RIGHT))
def test_a_cheat_about_speed_gains_nothing(local, cheat):
    cheated, beside = records(local, f"{CHEATS / cheat}.py:fast", "eager")
    assert (cheated.status, beside.status) == ("ok", "ok")
    assert cheated.latency_ratio is not None and cheated.latency_ratio > 0.7  # plain Python beside torch's fused kernel


@pytest.mark.parametrize("source", [PATCHES_AT_IMPORT, PATCHES_LATER])
def test_a_plugin_that_replaces_sdpa_is_compared_with_the_real_one(local, tmp_path, source):
    plugin, *beside = records(local, written(tmp_path, source), "eager", "tiled")
    assert plugin.status == "mismatch"
    assert "replaces torch.nn.functional.scaled_dot_product_attention" in (plugin.error or "")
    assert [record.status for record in beside] == ["ok", "ok"]


def test_less_work_while_timed_is_a_mismatch(local, tmp_path):
    (record,) = records(local, written(tmp_path, LESS_WHILE_TIMED))
    assert record.status == "mismatch"
    assert (record.error or "").startswith("out (of a timed call)")


def test_a_stopped_clock_measures_the_same(local, tmp_path):
    (record,) = records(local, written(tmp_path, STOPS_THE_CLOCK))
    assert record.status == "ok"
    assert record.latency_ms is not None and record.latency_ms >= 20


def test_memory_that_torch_does_not_know_of_is_seen_from_outside(local, tmp_path):
    (record,) = records(local, written(tmp_path, TAKES_MEMORY_ELSEWHERE))
    assert record.status == "ok"
    assert record.peak_bytes is not None and 100e6 < record.peak_bytes < 300e6


def test_an_answer_from_a_cache_is_wrong_for_other_inputs(local, tmp_path):
    (record,) = records(local, written(tmp_path, REMEMBERS_BY_SHAPE))
    assert record.status == "mismatch"


def test_a_record_that_claims_ok_and_carries_an_error_is_refused(local):
    (record,) = records(local, "eager")
    assert read_record(vars(record)) == record
    with pytest.raises(BrokenMessage, match="claims to be ok and carries an error: boom"):
        read_record(vars(dataclasses.replace(record, error="boom")))
    with pytest.raises(BrokenMessage, match="status"):
        read_record(vars(record) | {"status": "splendid"})
