"""The timing part on a terminal: the counts, and the cells worth reading, worst first."""

from rich.console import Console
from rich.text import Text

from harness.gate.outcome import Outcome
from harness.gate.verdicts import TimingVerdict
from harness.report.format import ABSENT, plain, plural

SHOWN = 15  # of each verdict
STYLES = {"regression": "red", "inconclusive": "yellow", "improvement": "cyan", "pass": "green"}
WORDS = {"FAIL": "bold red", "INCONCLUSIVE": "bold yellow", "PASS": "bold green"}


def print_timing(outcome: Outcome, console: Console, *, written: bool) -> None:
    """All cells where nothing is `written` that has the others."""
    interesting = outcome.timed("regression", "improvement", "inconclusive")
    versions = f"{plain(outcome.base)} -> {plain(outcome.head)}"
    title = Text(f"timing {plain(outcome.suite)}: {versions}, cell by cell in turn")
    console.print(title, highlight=False, soft_wrap=True)
    for name in STYLES:
        if name != "pass" and (found := [one for one in interesting if one.verdict == name]):
            for one in found[:SHOWN] if written else found:
                for line in _lines(one):
                    console.print(line, highlight=False, soft_wrap=True)
            if written and len(found) > SHOWN:
                console.print(Text(f"  +{len(found) - SHOWN} more of {name}: see gate.md and gate.json"))
    passed = outcome.timed("pass")
    if passed:
        largest = max(one.smallest for one in passed if one.smallest is not None)
        seconds = sum(one.seconds for one in outcome.timing) / len(outcome.timing)
        seen = f"{len(passed)} pass: in each a slowdown of {largest:.1%} would have been seen; {seconds:.1f} s a cell"
        console.print(Text(seen, "dim"), highlight=False, soft_wrap=True)
    for told in outcome.left_out:
        console.print(Text(plain(told), "dim"), highlight=False, soft_wrap=True)
    console.print(_last_line(outcome), highlight=False, soft_wrap=True)


def _lines(one: TimingVerdict) -> list[Text]:
    """A name may have sixty letters: on a line of its own it can be copied, also from 80 columns."""
    interval = ABSENT if one.lo is None else f"{_percent(one.lo)} … {_percent(one.hi)}"
    base, head = (ABSENT if each is None else f"{each:.3g}" for each in (one.base_ms, one.head_ms))
    numbers = f"{_percent(one.change)} ({interval}), sees from {_percent(one.smallest)}, {base} -> {head} ms"
    measured = [] if one.change is None else [Text(f"  {numbers}")]
    return [
        Text.assemble((one.verdict, STYLES[one.verdict]), " ", plain(one.case_id)),
        *measured,
        Text(f"  {plain(one.reason)}", "dim"),
    ]


def _last_line(outcome: Outcome) -> Text:
    """What is not known is said in the last line, where nobody misses it."""
    counts = outcome.counts
    told = ", ".join(f"{counts[name]} {name}" for name in STYLES if counts[name])
    word = Text(outcome.timing_word, WORDS[outcome.timing_word])
    line = Text.assemble("timing: ", word, f"  {plural(len(outcome.timing), 'cell', 'cells')}: {told}")
    if unknown := counts["inconclusive"]:
        says = "which fails by --strict" if outcome.strict else "--strict would fail"
        if outcome.timing_word == "INCONCLUSIVE":
            says = "nothing was decided, which is no pass"
        line.append(f"  {unknown} of {len(outcome.timing)} NOT SHOWN TO BE AS FAST AS BEFORE ({says})", "bold yellow")
    return line


def _percent(change: float | None) -> str:
    return ABSENT if change is None else f"{100 * change:+.1f} %"
