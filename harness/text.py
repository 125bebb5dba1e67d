"""Numbers and foreign strings become text here, once for every rendering; and the ways that text reaches a person.

A missing value is `ABSENT`, never 0. In this order: formats of numbers, foreign text made harmless, numbers as a row of
blocks, the terminal that verdicts are printed on, logging (`[LEVEL][MODULE][FUNC] message`, to standard error), and the
progress of a run: a bar on a terminal, a line now and then in a log file.
"""

import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

ABSENT = "-"
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # of a row of blocks
LOG_FORMAT = "[%(levelname)s][%(module)s][%(funcName)s] %(message)s"
LOG_EVERY_S = 15.0

Report = Callable[[int, str], None]  # how many are done, and what runs now


def is_absent(value: Any) -> bool:
    import pandas as pd  # not at the top: `harness --help` must not wait for it

    return value is None or bool(pd.isna(value))


def count(value: Any) -> str:
    """Exact below 10,000, then three digits and a unit: 8,192 and 1.05M."""
    if is_absent(value):
        return ABSENT
    amount = float(value)
    if abs(amount) < 10_000:
        return f"{amount:,.0f}" if amount == int(amount) else f"{amount:,.1f}"
    for unit, size in (("k", 1e3), ("M", 1e6), ("G", 1e9)):
        if abs(amount) / size < 999.5:
            return f"{amount / size:.3g}{unit}"
    return f"{amount / 1e9:,.0f}G"


def plural(amount: int, one: str, several: str) -> str:
    return f"{amount:,} {one if amount == 1 else several}"


def number(value: Any, form: str, *, scale: float = 1) -> str:
    """By a format specification, such as `.3f`."""
    return ABSENT if is_absent(value) else format(value * scale, form)


def percent(share: Any, digits: int = 0) -> str:
    return ABSENT if is_absent(share) else f"{100 * share:.{digits}f} %"


def signed_percent(change: float | None) -> str:
    """A change that is no number is shown as such: it was measured."""
    return ABSENT if change is None else f"{100 * change:+.1f} %"


def span(low: Any, high: Any) -> str:
    """One number, or the range over cells of several sizes."""
    return count(low) if is_absent(low) or low == high else f"{count(low)}…{count(high)}"


def small(value: Any) -> str:
    """Errors: two digits, scientific."""
    return number(value, ".1e")


def ratio(value: Any) -> str:
    if is_absent(value):
        return ABSENT
    if abs(value) >= 1e4 and abs(value) != float("inf"):
        return f"{value:.1e}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.2f}"


def interval(low: Any, high: Any) -> str:
    return ABSENT if is_absent(low) or is_absent(high) else f"{ratio(low)}…{ratio(high)}"


def milliseconds(value: Any) -> str:
    return ABSENT if is_absent(value) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def strict_json(value: Any) -> Any:
    """JSON as JavaScript reads it has no NaN and no infinity, yet those are findings: as text, as in records.jsonl."""
    if isinstance(value, dict):
        return {key: strict_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def plain(text: Any) -> str:
    """Foreign text made visible: escape sequences and direction marks of a kernel's message stay letters."""
    if is_absent(text):
        return ""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text))


def harmless_lines(text: Any) -> str:
    """A message of several lines for a CI's log, too, where a line that begins with `::` or `##[` is a command."""
    lines = [plain(line) for line in str(text).split("\n")]
    return "\n".join(f"| {line}" if line.lstrip().startswith(("::", "##[")) else line for line in lines)


def first_line(text: Any, limit: int = 300) -> str:
    """Of a message that may be a whole traceback."""
    lines = [] if is_absent(text) else [line for line in str(text).splitlines() if line.strip()]
    line = plain(lines[0].strip()) if lines else ""
    return line if len(line) <= limit else line[: limit - 1] + "…"


def sparkline(values: Sequence[float], *, low: float | None = None, high: float | None = None) -> str:
    """Between `low` and `high`, by default their own range; beyond it they touch its ends, and what is not a number is
    a gap."""
    known = [value for value in values if math.isfinite(value)]
    bottom = min(known, default=0.0) if low is None else low
    top = max(known, default=0.0) if high is None else high
    return "".join(_block(value, bottom, top) for value in values)


def _block(value: float, bottom: float, top: float) -> str:
    if math.isnan(value):
        return " "
    if value >= top:  # also infinity, and a range of one number
        return BLOCKS[-1] if top > bottom else BLOCKS[0]
    # Halved first, or the range of two huge numbers would overflow; rounding may end at the top block's upper edge.
    share = max(0.0, (value / 2 - bottom / 2) / (top / 2 - bottom / 2))
    return BLOCKS[min(int(share * len(BLOCKS)), len(BLOCKS) - 1)]


def condense(values: Sequence[float], width: int = WIDTH) -> list[float]:
    """At most `width` numbers: the largest of each stretch, so that no peak is lost; a stretch without one is NaN."""
    if len(values) <= width:
        return list(values)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    stretches = (values[start:end] for start, end in itertools.pairwise(edges))
    return [max((value for value in part if not math.isnan(value)), default=math.nan) for part in stretches]


def terminal() -> "Console":
    """Standard output, for verdicts."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            """rich would exit 1; but `harness list | head` is no error, and a run's exit code is its verdict."""
            self.quiet = True
            discard_output()

    return Terminal()


def discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Formatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return plain(super().formatMessage(record))  # one line, whatever a kernel said


def configure(*, quiet: bool = False, verbose: bool = False) -> None:
    """Warnings by default, errors only when quiet, everything when verbose; safe to call again."""
    logger = logging.getLogger("harness")
    logger.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.WARNING)
    logger.propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(LOG_FORMAT))
    logger.handlers = [handler]


@contextmanager
def progress(total: int, console: "Console") -> Iterator[Report]:
    import rich.progress as bars
    from rich.markup import escape

    if not console.is_terminal:
        yield _line_reporter(total, console)
        return
    columns = (bars.BarColumn(20), bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), "left")
    ends = (bars.TimeRemainingColumn(), bars.TextColumn("{task.description}"))
    with bars.Progress(*columns, *ends, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, running: bar.update(task, completed=done, description=escape(running))


def _line_reporter(total: int, console: "Console") -> Report:
    started = time.perf_counter()
    last = started

    def report(done: int, running: str) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last < LOG_EVERY_S or not done:
            return
        last = now
        left = (now - started) / done * (total - done)
        console.print(f"{done}/{total}  {now - started:.0f} s, about {left:.0f} s left  {running}", markup=False)

    return report
