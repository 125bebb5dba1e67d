"""Which cells hold a contest, and configs that ask for none that could be held."""

from typing import Any

import pytest

from harness.suite.config import ConfigError, load_suite
from harness.suite.contest import Contest, contests
from harness.workers.job import Job, decode_job

GRID: dict[str, Any] = {
    "variant": ["mha", "gqa", "mqa", "mla"], "embed_dim": 32, "heads": 4, "kv_heads": [1, 2], "kv_lora_rank": [8, 16],
    "seq_len": [8, 16], "phase": "decode",
}  # fmt: skip


def suite(**values: Any) -> Any:
    return load_suite({"name": "c", "contest": "variant", "against": "mha", "grid": GRID} | values)


def test_cells_that_differ_in_the_variant_and_its_own_sizes_compete():
    held = contests(suite().cases, Contest("variant", "mha"))
    assert [len(group) for group in held] == [6, 6]  # mha, gqa of 1 and 2 heads, mqa, mla of two ranks
    assert [group[0].variant for group in held] == ["mha", "mha"]
    assert [{case.seq_len for case in group} for group in held] == [{8}, {16}]


def test_any_axis_and_any_of_its_values():
    cases = suite(
        grid={**GRID, "variant": "gqa", "kernel": ["eager", "tiled"]}, contest="kernel", against="tiled"
    ).cases
    held = contests(cases, Contest("kernel", "tiled"))
    assert [[case.kernel for case in group] for group in held] == [["tiled", "eager"]] * 4
    assert all(len({case.kv_heads for case in group}) == 1 for group in held)
    held = contests(cases, Contest("kv_heads", 2))
    assert [[case.kv_heads for case in group] for group in held] == [[2, 1]] * 4


def test_two_that_could_be_held_to_are_none():
    cases = suite().cases
    assert contests(cases, Contest("variant", "gqa")) == []


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"contest": "variants"}, "unknown axis"),
        ({"against": None}, "needs `against`"),
        ({"against": "mah"}, "no two cells differ in variant alone"),
        ({"contest": None}, "only with contest"),
        ({"contest": None, "against": None, "judge_len": 64}, "only with contest"),
        ({"grid": {**GRID, "variant": ["mha"]}}, "no two cells differ"),
        ({"include": [{"variant": "mha", "embed_dim": 64, "heads": 4, "seq_len": 8}]}, "1 cells are in no contest"),
    ],
)
def test_a_contest_that_cannot_be_held_is_refused(values: dict[str, Any], told: str):
    with pytest.raises(ConfigError, match=told):
        suite(**values)


def test_kernels_of_ones_own_are_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def f(*a, **b): ...\n")
    with pytest.raises(ConfigError, match="timed beside their reference"):
        suite(contest="kernel", against="eager", grid={**GRID, "kernel": ["eager", f"{path}:f"]})


def test_a_job_of_a_contest_survives_its_way_to_a_worker():
    from dataclasses import asdict, replace

    found = suite(judge_len=64)
    job = Job.of(found.cases[0], found, threads=1)
    assert (job.timing.enabled, job.judge_len) == (False, 64)  # its cells are timed together, and only there
    job = replace(job, rivals=found.cases[1:3], timing=found.timing)
    assert decode_job(asdict(job)) == job
