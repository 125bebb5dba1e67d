"""Where the time of a run went: seconds of the processor, by part of a cell's work, and by cell."""

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter

from rich.console import Console

from harness.record import Record
from harness.report.table import Column, Table
from harness.report.terminal import say
from harness.text import percent

DEAREST = 5


def print_profile(records: Sequence[Record], console: Console) -> None:
    console.print()
    console.print(by_part(records))
    console.print()
    console.print(by_cell(records))
    of_cells = [sum(record.parts_s.values()) for record in records if record.parts_s]
    total = f"{sum(of_cells):.1f} seconds of the processor in {len(of_cells)} cells"
    say(console, f"{total}, less what processes of kernels took", style="dim")


def by_part(records: Sequence[Record]) -> Table:
    """The dearest first."""
    seconds = Counter[str]()
    for record in records:
        seconds.update(record.parts_s)  # a Counter adds
    whole = seconds.total()
    columns = [
        Column("part", itemgetter(0), left=True),
        Column("seconds", lambda row: f"{row[1]:.2f}"),
        Column("share", lambda row: percent(row[1] / whole)),
    ]
    return Table(columns, seconds.most_common(), "Where the time went")


def by_cell(records: Sequence[Record]) -> Table:
    cells = sorted(((sum(r.parts_s.values()), r) for r in records if r.parts_s), key=itemgetter(0), reverse=True)
    columns = [
        Column("seconds", lambda row: f"{row[0]:.2f}"),
        Column("most of it", lambda row: max(row[1].parts_s, key=row[1].parts_s.__getitem__), left=True),
        Column("cell", lambda row: row[1].case_id, left=True),
    ]
    return Table(columns, cells[:DEAREST], "The dearest cells")
