"""The study of the timer: what it counts, and that it would see a timer that does not know when it was disturbed."""

import math
from pathlib import Path

import pytest

from bench import timing_study as study
from bench.timing_study import Found, Trial

GOOD = Found(off=0.01, covers=True, disturbed=False)


def trials(*found: Found) -> list[Trial]:
    return [Trial(now=each, before=GOOD, others=0.0) for each in found]


def test_the_table_counts_what_is_not_marked():
    wild = Found(off=math.log(3), covers=False, disturbed=True)
    off = Found(off=-math.log(1.2), covers=False, disturbed=False)
    lines = study.table(trials(*[GOOD] * 6, wild, off))
    assert lines[2].startswith("| as it is | 8 | 12% | 85.7% | 1 |")
    assert lines[3] == "| before | 8 | 0% | 100.0% | 0 | ±1.0% |"


@pytest.mark.parametrize(
    ("bad", "reached"),
    [
        (Found(off=math.log(7), covers=False, disturbed=True), True),  # it knows
        (Found(off=math.log(1.11), covers=True, disturbed=False), False),
        (Found(off=0.01, covers=False, disturbed=False), False),  # two of ten intervals that do not hold 1
    ],
)
def test_a_timer_that_does_not_know_fails_the_study(bad: Found, reached: bool):
    assert study.reached(trials(*[GOOD] * 8, bad, bad)) is reached


def test_nothing_undisturbed_is_no_success():
    assert not study.reached(trials(Found(off=0.0, covers=True, disturbed=True)))


def test_each_state_has_its_place_on_the_page(tmp_path: Path):
    page = tmp_path / "timing.md"
    page.write_text(study.PAGE.read_text())
    study.write("busy", "BUSY\n", page)
    study.write("quiet", "QUIET\n", page)
    study.write("busy", "AGAIN\n", page)
    text = page.read_text()
    assert text.index("Quiet:") < text.index("QUIET\n") < text.index("Busy:") < text.index("AGAIN\n")
    assert "BUSY\n" not in text


def test_a_trial_times_two_builds_of_each_cell():
    found = study.study(trials=1, minutes=1.0, threads=1)
    assert len(found) == 1
    assert math.isfinite(found[0].now.off) and math.isfinite(found[0].before.off)
