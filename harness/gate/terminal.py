"""The timing part on a terminal: the counts, and the cells worth reading, worst first."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.gate.outcome import Outcome
from harness.gate.verdicts import TimingVerdict
from harness.report.format import ABSENT, plain

SHOWN = 15  # of each verdict
STYLES = {"regression": "red", "inconclusive": "yellow", "improvement": "cyan", "pass": "green"}


def print_timing(outcome: Outcome, console: Console) -> None:
    interesting = outcome.timed("regression", "improvement", "inconclusive")
    title = Text.assemble("timing ", plain(outcome.suite), f": {outcome.base} -> {outcome.head}, cell by cell in turn")
    console.print(title, highlight=False, soft_wrap=True)
    for name in STYLES:
        if name != "pass" and (found := [one for one in interesting if one.verdict == name]):
            console.print(_table(found[:SHOWN]), highlight=False)
            if len(found) > SHOWN:
                console.print(Text(f"  +{len(found) - SHOWN} more of {name}: see gate.md and gate.json"))
    passed = outcome.timed("pass")
    if passed:
        largest = max(one.smallest for one in passed if one.smallest is not None)
        seconds = sum(one.seconds for one in outcome.timing) / len(outcome.timing)
        line = f"{len(passed)} pass: in each a slowdown of {largest:.1%} would have been seen; {seconds:.1f} s a cell"
        console.print(Text(line, "dim"), highlight=False, soft_wrap=True)
    console.print(_last_line(outcome), highlight=False, soft_wrap=True)


def _table(verdicts: Sequence[TimingVerdict]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("change", "interval", "sees from", "base ms", "head ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("cell, and why", overflow="fold")
    for one in verdicts:
        cell = Text.assemble(
            (f"{one.verdict} ", STYLES[one.verdict]), plain(one.case_id), "\n", (plain(one.reason), "dim")
        )
        interval = ABSENT if one.lo is None else f"{_percent(one.lo)} … {_percent(one.hi)}"
        times = [ABSENT if each is None else f"{each:.3g}" for each in (one.base_ms, one.head_ms)]
        table.add_row(_percent(one.change), interval, _percent(one.smallest), *times, cell)
    return table


def _last_line(outcome: Outcome) -> Text:
    """What is not known is said in the last line, where nobody misses it."""
    counts = outcome.counts
    told = ", ".join(f"{counts[name]} {name}" for name in STYLES if counts[name])
    failed = any(outcome.fails(one) for one in outcome.timing)
    word = Text("FAIL", "bold red") if failed else Text("PASS", "bold green")
    line = Text.assemble("timing: ", word, f"  {len(outcome.timing)} cells: {told}")
    if unknown := counts["inconclusive"]:
        says = "which fails by --strict" if outcome.strict else "--strict would fail"
        line.append(f"  {unknown} of {len(outcome.timing)} NOT SHOWN TO BE AS FAST AS BEFORE ({says})", "bold yellow")
    return line


def _percent(change: float | None) -> str:
    return ABSENT if change is None else f"{100 * change:+.1f} %"
