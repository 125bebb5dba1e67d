"""What `harness doctor` shows: a line or two for each finding, the noise by size, and the verdict last."""

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from harness.doctor.examine import Examination
from harness.doctor.noise import NoiseStudy
from harness.report.table import Column, Table
from harness.report.terminal import say
from harness.text import percent, plain

STYLES = {"ok": "green", "warn": "yellow", "bad": "bold red"}


def print_examination(found: Examination, console: Console) -> None:
    table = Grid.grid(padding=(0, 1))
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
    say(console, found.verdict, style="bold green" if fit else "bold red")


def noise_table(noise: NoiseStudy) -> Table:
    columns = [
        Column("attention", str, left=True),
        Column("as pairs", lambda size: f"±{percent(noise.paired(size), 1)}"),
        Column("one after the other", lambda size: f"±{percent(noise.sequential(size), 1)}"),
    ]
    return Table(columns, noise.sizes, "95 % of the ratios of a call to itself are within")
