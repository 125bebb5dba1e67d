"""What `harness doctor` shows: a line or two for each finding, the noise by size, and the verdict last."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.doctor.finding import Examination
from harness.doctor.noise import Noise
from harness.report.story import Column
from harness.report.terminal import table_of
from harness.text import plain

STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red"}


def print_examination(found: Examination, console: Console) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=4)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found.findings:
        table.add_row(Text(finding.level, STYLES[finding.level]), Text(finding.name), Text(plain(finding.found)))
        if finding.todo:
            table.add_row("", "", Text(f"-> {plain(finding.todo)}", "bold"))
    console.print(table)
    if found.noise is not None:
        console.print()
        console.print(noise_table(found.noise))
    console.print()
    fit = found.can_run and all(finding.level != "bad" for finding in found.findings)
    console.print(Text(found.verdict, "bold green" if fit else "bold red"), highlight=False)


def noise_table(noise: Noise) -> Table:
    def percent(value: float) -> str:
        return f"±{100 * value:.1f} %"

    sizes = noise.sizes
    columns = [
        Column("attention", list(sizes), left=True),
        Column("as pairs", [percent(noise.paired(size)) for size in sizes]),
        Column("one after the other", [percent(noise.sequential(size)) for size in sizes]),
    ]
    return table_of(columns, title="95 % of the ratios of a call to itself are within")
