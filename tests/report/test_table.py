"""One table, three renderings: the same cells, and foreign text stays text in each."""

import io

import pytest
from rich.console import Console

from harness.report.table import Code, Column, Table

HOSTILE = "a|b `c` <img> [bold]d[/] \x1b[31m"
TABLE = Table(
    [Column("cell", lambda row: Code(row[0]), left=True), Column("why", lambda row: row[1], left=True),
     Column("ms", lambda row: row[2])],
    [("mha-l128", HOSTILE, 1.5), ("gqa|x", None, 20)],
    title="Times",
)  # fmt: skip


def printed(table: Table, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system="truecolor", force_terminal=True, no_color=True)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_on_a_terminal_nothing_foreign_is_markup_or_an_escape_code() -> None:
    text = printed(TABLE)
    assert "a|b `c` <img> [bold]d[/] \\x1b[31m" in text
    assert "\x1b[31m" not in text


def test_in_markdown_nothing_foreign_is_markup_or_a_border() -> None:
    assert TABLE.markdown().splitlines() == [
        "| cell | why | ms |",
        "| :-- | :-- | --: |",
        "| `mha-l128` | a\\|b \\`c\\` &lt;img&gt; \\[bold\\]d\\[/\\] \\\\x1b\\[31m | 1.5 |",
        "| gqa\\|x |  | 20 |",
    ]


@pytest.mark.parametrize(("width", "titles"), [(80, ["cell", "why", "ms"]), (20, ["cell", "ms"]), (5, ["ms"])])
def test_columns_are_dropped_in_order_until_it_fits(width: int, titles: list[str]) -> None:
    fitted = TABLE.fitted(Console(width=width), ("why", "cell"))
    assert [column.title for column in fitted.columns] == titles
