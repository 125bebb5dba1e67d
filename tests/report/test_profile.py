"""Where a run's time went."""

from pathlib import Path

import pytest

from harness import store
from harness.report.profile import print_profile
from tests.support import called, printed
from tests.support.records import record

CONFIG = """\
name: profiled
timing: {enabled: false}
grid: {variant: gqa, embed_dim: 16, heads: 2, kv_heads: 1, seq_len: 6, mask: causal, phase: [prefill, decode]}
"""


def test_parts_and_cells_stand_in_the_order_of_their_time() -> None:
    records = [
        record("a", parts_s={"golden": 3.0, "candidate": 1.0}),
        record("b", parts_s={"golden": 4.0}),
        record("c"),
    ]
    lines = [line.split() for line in printed(lambda console: print_profile(records, console)).splitlines()]
    assert ["golden", "7.00", "88", "%"] in lines
    assert ["candidate", "1.00", "12", "%"] in lines
    dearest = [line for line in lines if line[-1:] in (["a"], ["b"], ["c"])]
    assert dearest == [["4.00", "golden", "a"], ["4.00", "golden", "b"]]
    assert [
        "8.0",
        "seconds",
        "of",
        "the",
        "processor",
        "in",
        "2",
        "cells,",
        "less",
        "what",
        "processes",
        "of",
        "kernels",
        "took",
    ] in lines


def test_a_run_tells_where_its_time_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tmp_path / "profiled.yaml", tmp_path / "out"
    config.write_text(CONFIG)
    found = called(capsys, "run", config, "--out", out, "--executor", "here", "--profile")
    assert found.code == 0, found.err
    for part in ("golden", "reference", "candidate", "kernel against itself", "floors and verdicts"):
        assert part in found.out
    for each in store.read_records(out):
        assert each.parts_s["golden"] > 0
        assert min(each.parts_s.values()) >= 0
