"""A table is one object with three renderings: `console.print(table)`, `table.markdown()`, and the page's template.

Cells may hold anybody's text. Each rendering shows it as itself: never as markup, escape codes, cell borders or HTML.
"""

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from harness.text import plain


class Code(str):
    """A cell that Markdown sets as code, such as an id."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Column:
    """`text` makes a row's cell; what is absent leaves it empty. Words stand `left`, numbers right."""

    title: str
    text: Callable[[Any], object]
    left: bool = False

    def cell(self, row: Any) -> str:
        return plain(self.text(row))

    def markdown(self, row: Any) -> str:
        value = self.text(row)
        return code(value) if isinstance(value, Code) else escaped(value)


@dataclass(frozen=True, slots=True)
class Table:
    """The same rows for each column. The last three are for the page: what the table is for those who hear it, a row's
    tone ("bad", "warn" or none), and titles that stand above several columns each."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    title: str = ""
    caption: str = ""
    tone: Callable[[Any], str] = lambda _: ""
    spans: tuple[tuple[str, int], ...] = ()

    def __rich__(self) -> RichTable:
        title = Text(self.title, "bold") if self.title else None
        table = RichTable(box=box.SIMPLE_HEAD, title=title, title_justify="left", show_edge=False, pad_edge=False)
        table.padding = (0, 0, 0, 1)
        for column in self.columns:
            header = Text(column.title.replace(" x ", "\nx "))
            table.add_column(header, justify="left" if column.left else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(column.cell(row)) for column in self.columns))
        return table

    def markdown(self) -> str:
        titles = [escaped(column.title) for column in self.columns]
        rule = [":--" if column.left else "--:" for column in self.columns]
        rows = ([column.markdown(row) for column in self.columns] for row in self.rows)
        return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, rule, *rows))

    def fits(self, console: Console) -> bool:
        # Measured in a room without walls: in the console's own the answer is cut to its width.
        return console.measure(self, options=console.options.update(width=10_000)).maximum <= console.width

    def without(self, *titles: str) -> "Table":
        return replace(self, columns=[column for column in self.columns if column.title not in titles])

    def fitted(self, console: Console, dropped: Sequence[str]) -> "Table":
        """Without as many of the columns `dropped`, in their order, as the console has no room for."""
        table = self
        for title in dropped:
            if not table.fits(console):
                table = table.without(title)
        return table


def escaped(value: object) -> str:
    """Foreign text in Markdown: no markup, no HTML, no cell border, no line break."""
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", html.escape(plain(value), quote=False))


def code(value: object) -> str:
    """An id as code in Markdown, unless it could end the code span or the cell."""
    shown = plain(value)
    return escaped(shown) if re.search(r"[`|\\]", shown) or not shown else f"`{shown}`"
