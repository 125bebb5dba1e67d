"""The history on a terminal: what changed and between which commits, then the cells as sparklines."""

import io
import math
import re
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from harness.gate.trend import Change, Trend, fewest_nights
from harness.report.terminal import say
from harness.text import ABSENT, condense, plain, plural, ratio, signed_percent, sparkline

CellChange = tuple[Trend, Change]
PAGE_WIDTH = 120


def print_trends(found: Sequence[Trend], console: Console, *, suite: str, metric: str, every: bool = False) -> None:
    machines = list(dict.fromkeys(trend.machine for trend in found))
    changes = [(trend, change) for trend in found for change in trend.changes]
    cells = plural(len({trend.case_id for trend in found}), "cell", "cells")
    nights = plural(max((len(trend.values) for trend in found), default=0), "night", "nights")
    needed = fewest_nights(metric, len(found))
    short = sum(0 < trend.known < needed for trend in found)
    can_tell = any(trend.known >= needed for trend in found)
    counted = plural(len(changes), "change", "changes") if changes else "no change"
    if not can_tell and not changes:  # silence would pass for an answer
        counted = f"too few nights to tell; a change in one cell alone needs {needed}"
    head = f"{cells}, up to {nights}, {plural(len(machines), 'machine', 'machines')}: {counted}"
    style = "bold" if changes else "green" if can_tell else "yellow"
    say(console, Text.assemble("trend ", plain(suite), " ", metric, ": ", (head, style)), whole=True)
    if short and can_tell:
        few = f"{short} of {len(found)} series have fewer than {needed} nights: too few to tell."
        say(console, few, style="yellow", whole=True)
    if len(machines) > 1:
        apart = "Each machine has series of its own: times of unlike machines are not compared."
        say(console, apart, style="dim", whole=True)
    for group in _by_commits(changes):
        console.print()
        _print_group(group, console, several=len(machines) > 1)
    if every:
        console.print()
        for trend in found:
            _print_series(trend, console, several=len(machines) > 1)


def trends_markdown(found: Sequence[Trend], *, suite: str, metric: str) -> str:
    """What the terminal shows, for a CI job's page."""
    file = io.StringIO()
    print_trends(found, Console(file=file, width=PAGE_WIDTH, color_system=None), suite=suite, metric=metric)
    shown = file.getvalue().rstrip()
    # Longer than any in the text, so that a cell's name cannot end the block.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"# Trend\n\n{fence}text\n{shown}\n{fence}\n"


def _by_commits(changes: Sequence[CellChange]) -> list[list[CellChange]]:
    """One commit range touches many cells; the newest range first, its largest change first."""
    groups: dict[tuple[object, ...], list[CellChange]] = {}
    for trend, change in changes:
        groups.setdefault((change.first, change.last, change.good, change.bad), []).append((trend, change))
    ordered = sorted(groups.items(), key=lambda item: item[0][:2], reverse=True)
    return [sorted(group, key=lambda pair: -abs(pair[1].relative)) for _, group in ordered]


def commit_range(change: Change) -> str:
    if change.good is None or change.bad is None:
        return "commits not known"
    uncommitted = "with changes that were not committed"
    if change.good == change.bad:
        why = uncommitted if change.dirty else "the code is the same, so the machine or its software changed"
        return f"{change.good[:12]} in both: {why}"
    return f"{change.good[:12]}..{change.bad[:12]}{f', {uncommitted}' if change.dirty else ''}"


def _print_group(group: Sequence[CellChange], console: Console, *, several: bool) -> None:
    _, one = group[0]
    when = f"{one.last:%Y-%m-%d %H:%M} and {one.first:%Y-%m-%d %H:%M}"
    say(console, Text.assemble((commit_range(one), "bold"), f"  between {when}"), whole=True)
    for also in dict.fromkeys(text for _, change in group for text in change.also):
        say(console, f"  also changed: {plain(also)}", style="yellow", whole=True)
    for trend, change in group:
        style = "red" if change.kind == "worse" else "green"
        share = "from 0" if math.isinf(change.relative) else signed_percent(change.relative)
        sure = "exact" if change.p_value is None else f"p {change.p_value:.2g}"
        numbers = f"{ratio(change.before)} -> {ratio(change.after)}"
        place = f"  on {plain(trend.machine)}" if several else ""
        say(console, Text.assemble("  ", (f"{share:>9}", style), f"  {plain(trend.case_id)}"), whole=True)
        _print_below(console, f"{sparkline(condense(trend.values))}  {numbers}  {sure}{place}")


def _print_series(trend: Trend, console: Console, *, several: bool) -> None:
    known = [value for value in trend.values if math.isfinite(value)]
    latest = ratio(known[-1]) if known else ABSENT
    place = f"  on {plain(trend.machine)}" if several else ""
    say(console, f"  {latest:>9}  {plain(trend.case_id)}{place}", whole=True)
    _print_below(console, sparkline(condense(trend.values)))


def _print_below(console: Console, text: str) -> None:
    """Under a cell's name."""
    console.print(Padding(Text(text, "dim", overflow="fold"), (0, 0, 0, 13), expand=False), highlight=False)
