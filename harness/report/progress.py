"""Progress of a run: a bar on a terminal, a line now and then in a log file."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LOG_EVERY_S = 15.0

Report = Callable[[int, str], None]  # how many are done, and what runs now


@contextmanager
def progress(total: int, console: Console) -> Iterator[Report]:
    if not console.is_terminal:
        yield _line_reporter(total, console)
        return
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, running: bar.update(task, completed=done, description=escape(running))


def _line_reporter(total: int, console: Console) -> Report:
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
