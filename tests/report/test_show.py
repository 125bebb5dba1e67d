"""`harness show`: the story on a terminal, from stored records alone."""

import math
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from harness import store
from harness.__main__ import main
from harness.report.page import StoredRun
from harness.report.page.rows import combine, on_front
from harness.report.show import curves, largest_choice, print_run
from harness.text import BLOCKS, condense, sparkline
from tests.support import printed
from tests.support.page_runs import HOSTILE, hostile_run, large_run, record, run, small_run
from tests.support.records import HERE


def shown(told: StoredRun, width: int = 80, **attrs: float) -> str:
    told.frame.attrs |= attrs
    return printed(lambda console: print_run(told, console), width)


# ---- sparklines ------------------------------------------------------------------------------------------------------


def test_a_sparkline_rises_with_its_numbers():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7, 8]) == BLOCKS + BLOCKS[-1]
    assert sparkline([8, 0]) == "█▁"


def test_a_fixed_range_and_what_lies_beyond():
    assert sparkline([0, 1, 2, 240, math.inf, -1], low=0, high=2) == "▁▅███▁"


def test_one_number_is_low_and_a_gap_is_a_gap():
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([1.0, math.nan, 2.0]) == "▁ █"
    assert sparkline([]) == ""


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60))
def test_every_number_is_one_character(values):
    drawn = sparkline(values)
    assert len(drawn) == len(values)
    assert set(drawn) <= set(BLOCKS) | {" "}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_condensing_loses_no_peak(values, width):
    short = condense(values, width)
    assert len(short) == min(width, len(values))
    assert max(short) == max(values)


# ---- sections --------------------------------------------------------------------------------------------------------


def test_the_front_is_what_has_no_smaller_and_faster_cell():
    cells = [record("mha", phase="decode", latency_ms=1.0), record("gqa", phase="decode", latency_ms=2.0),
             record("mqa", phase="decode", latency_ms=1.5)]  # fmt: skip
    marked = on_front(combine([run(*cells)]))
    assert dict(zip(marked["variant"], marked["front"], strict=True)) == {"mqa": True, "gqa": False, "mha": True}


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12))
@settings(max_examples=40)
def test_the_front_is_the_one_by_definition(points):
    import pandas as pd

    frame = pd.DataFrame(points, columns=["kv_bytes_per_token", "latency_ms"]).astype(float)
    marked = on_front(frame).drop_duplicates(["kv_bytes_per_token", "latency_ms"])
    for row in marked.to_dict("records"):
        a, b = row["kv_bytes_per_token"], row["latency_ms"]
        beaten = any(x <= a and y <= b and (x, y) != (a, b) for x, y in points)
        assert row["front"] == (not beaten)


def test_a_curve_is_over_length_alone():
    """Cells that differ in anything but the length are not joined; one length is no curve."""
    frame = combine([run(*(record(seq_len=n, mask=mask) for n in (128, 256) for mask in ("none", "causal")))])
    table = curves(frame)
    assert len(table.rows) == 2
    assert not curves(combine([run(record(), record(mask="none"))])).rows
    twice = combine([run(record(seq_len=128), record(seq_len=128), record(seq_len=256))])
    assert not curves(twice).rows  # of two cells with one length neither is the point


def test_a_wrong_cell_has_no_speed_to_show():
    frame = combine([run(record(seq_len=128), record(seq_len=256, status="mismatch"))])
    assert not curves(frame).rows
    assert largest_choice(combine([run(record(phase="decode", status="mismatch"))]))[1].empty


def test_the_story_is_told_in_eighty_columns():
    text = shown(small_run(), measured_share=0.5, elapsed=3.0)
    lines = text.splitlines()
    assert lines[0].startswith("NOT EQUAL  22 cells")
    for word in ("Is it the same?", "Latency over sequence length", "Error/N over cells", "Where and how",
                 "KV cache against decode latency, E 256", "Slowest beside the reference", "Largest errors",
                 "harness run config.yaml", "CPU 9", "50 % of 3 s"):  # fmt: skip
        assert word in text, word
    assert max(map(len, lines)) <= 80
    assert "▁█" in text or "▁▃█" in text or "▁▂█" in text


def test_the_worst_and_the_slowest_come_first():
    text = shown(run(record(err_ratio=0.1, latency_ratio=1.0), record("mqa", err_ratio=1.9, latency_ratio=3.0)))
    for section in ("Slowest beside", "Largest errors"):
        rows = [line for line in text.partition(section)[2].splitlines() if "-e256-" in line]
        assert "mqa-e256" in rows[0] and "mha-e256" in rows[1], section


def test_a_run_without_numbers_is_shown_too():
    none: dict[str, Any] = dict.fromkeys(
        ("err_ratio", "latency_ms", "latency_ratio", "latency_ratio_lo", "latency_ratio_hi")
    )
    text = shown(run(record(status="error", error="boom", **none), environment=None, command=None))
    assert "boom" in text and "Largest errors" not in text and "Slowest" not in text
    assert "NOTHING COMPARED" in shown(run())


def test_hostile_text_stays_text():
    text = shown(hostile_run(), width=200)
    assert "\u2028" not in text and "\\u2028" in text
    assert HOSTILE[0] in text
    escape = run(record(kernel="\x1b[31mred"), record(kernel="[bold]x[/]"), command="\x1b]0;title\x07")
    assert "\x1b" not in shown(escape) and "\x07" not in shown(escape)
    assert "[bold]x[/]" in shown(escape, width=200)


def test_thousands_of_cells_stay_short():
    lines = shown(large_run(600)).splitlines()
    assert len(lines) < 160
    assert max(map(len, lines)) <= 80 + len("  degraded    ") + 60  # ids stand unbroken


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_stored_run_is_shown_and_left_alone(tmp_path: Path, capsys):
    with store.RunFolder.create(tmp_path / "run", "smoke") as folder:
        folder.append(record(phase="decode"), record("gqa", phase="decode", seconds=2.0, measured_seconds=1.0))
    store.write_environment(folder.path, HERE)
    before = sorted(path.name for path in folder.path.iterdir())
    assert main(["show", str(folder.path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("EQUAL  2 cells: 2 ok") and "50 % of 2 s" in printed and "CPU 9" in printed
    assert sorted(path.name for path in folder.path.iterdir()) == before
    assert main(["show", str(folder.path), "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_a_folder_without_records_is_bad_input(tmp_path: Path, capsys):
    assert main(["show", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_environment_is_shown_as_on_the_page():
    assert "1.0 GiB" in shown(run(record(), environment=HERE))
