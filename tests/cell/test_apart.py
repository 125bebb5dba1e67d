"""A kernel in a layout of its own: packing is timed beside it, where nobody's code is, and taken off."""

from pathlib import Path
from typing import Any

import pytest

from harness.candidate.isolated import judged_kernel
from harness.case import Case
from harness.cell import apart
from harness.cell.apart import Packing, without
from harness.cell.build import build_pair
from harness.cell.measure import measure, subject_of
from harness.cell.timing import Samples
from harness.kernels.layouts import find_layout
from harness.suite.schema import Timing

KERNELS = Path(__file__).parents[1] / "layout_kernels.py"
BRIEF = Timing(budget_s=1e-3, min_blocks=3, max_blocks=3)


def a_case(phase: str) -> Case:
    return Case(
        variant="gqa", kernel="eager", embed_dim=32, heads=4, kv_heads=2, head_dim=8, seq_len=20, batch=2, mask="none",
        dtype="float32", phase=phase,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "phase"), [("paged", "paged", "decode"), ("packed", "varlen", "train")])
def test_it_packs_what_the_side_calls_and_never_the_kernel(monkeypatch, name: str, layout: str, phase: str):
    pair = build_pair(a_case(phase), judged_kernel(f"{KERNELS}:{name}"), 0)
    packing = Packing.of(pair, subject_of(pair, pair.candidate, 0), layout)
    assert len(packing.calls) == 1
    call = packing.calls[0]
    assert call.q.shape[2] == (1 if phase == "decode" else 20) and call.k.shape[2] == 20
    before = pair.calls
    done: list[str] = []
    whole = find_layout(layout)

    class Watched:
        @staticmethod
        def prepare(call: Any) -> Any:
            done.append("prepare")
            return whole.prepare(call)

        @staticmethod
        def restore(result: Any, memo: Any) -> Any:
            done.append("restore")
            return whole.restore(result, memo)

    monkeypatch.setattr(apart, "find_layout", lambda name: Watched)
    packing.call(packing.example)
    assert done == ["prepare", "restore"] and pair.calls == before
    assert packing.differentiates == (phase == "train")


def test_a_record_keeps_the_packing_beside_the_kernels_own_time():
    found = measure(a_case("decode"), judged_kernel(f"{KERNELS}:paged"), seed=0, regimes=["plain"], timing=BRIEF)
    assert found.status == "ok", found.error
    assert set(found.samples_s) == {"candidate", "reference", "packing"}
    assert all(seconds > 0 for samples in found.samples_s.values() for seconds in samples)
    plain = Path(__file__).parents[1] / "wrong_kernels.py"
    found = measure(a_case("decode"), judged_kernel(f"{plain}:textbook"), seed=0, regimes=["plain"], timing=BRIEF)
    assert set(found.samples_s) == {"candidate", "reference"}


def test_what_packing_takes_is_taken_off_block_by_block():
    packing, own = Samples([1.0, 2.0], [0.0, 0.3]), Samples([5.0, 7.0], [0.2, 0.1])
    assert without(packing, own) == Samples([4.0, 5.0], [0.2, 0.3])  # as disturbed as the more disturbed of the two
    found = without(Samples([9.0], [0.0]), Samples([5.0], [0.0]))
    assert found.seconds == [pytest.approx(0.05)]  # never nothing: a ratio is a logarithm
