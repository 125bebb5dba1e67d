"""`harness trend`: what changed over the nights, and between which commits?"""

import argparse
from pathlib import Path

from harness.errors import EQUAL
from harness.text import terminal

HELP = "find the nights, and the commits, at which a cell changed for good"
DESCRIPTION = """\
Reads the history, one Parquet file a night under results/history/SUITE, and finds the nights at which a cell stepped to
another level: x ref (the latency over that of the reference in the same run) by default, because it alone is
comparable from night to night. One bad night is no step; how many it takes is said. Machines are not mixed. Exits 0
whatever it finds; `harness gate` judges. docs/gate.md has the method.
"""
EPILOG = """\
examples:
  harness trend --add results/latest         keep a run as a night of the history
  harness trend                              what changed, in every suite
  harness trend nightly --cells 'mla*' --all its MLA cells, as sparklines
  harness trend nightly --metric peak_bytes  every night at which peak memory changed
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("suite", metavar="SUITE", nargs="?", help="by default every suite that has nights")
    parser.add_argument("--add", metavar="DIR", type=Path, help="add this run to the history, and do no more")
    parser.add_argument("--history", metavar="DIR", type=Path, default=Path("results/history"))
    parser.add_argument("--metric", metavar="NAME", default="latency_ratio", help="a column of the history")
    parser.add_argument("--cells", metavar="GLOB", default="*", help="only cells whose id is like this")
    parser.add_argument("--out", metavar="FILE.md", type=Path, help="write it as Markdown too, for a CI job's page")
    parser.add_argument("--all", action="store_true", help="show every cell's history, changed or not")


def execute(options: argparse.Namespace) -> int:
    from harness.gate import nights
    from harness.gate.trend import trends
    from harness.report.trend import print_trends, trends_markdown
    from harness.store import write_atomically

    if options.add is not None:
        path, is_new = nights.add(options.add, options.history)
        if not options.quiet:
            print(f"{'added' if is_new else 'already there:'} {path}")
        return EQUAL
    if options.out is not None:
        options.out.unlink(missing_ok=True)  # if the history cannot be read, an older answer must not stand for it
    names = [options.suite] if options.suite else list(nights.suites(options.history))
    if not names:
        raise nights.HistoryError(f"{options.history} has no nights; add one with: harness trend --add results/latest")
    pages = []
    for name in names:
        found = trends(nights.read(name, options.history), metric=options.metric, cells=options.cells)
        if not options.quiet:
            print_trends(found, terminal(), suite=name, metric=options.metric, every=options.all)
        if options.out is not None:
            pages.append(trends_markdown(found, suite=name, metric=options.metric))
    if options.out is not None:
        write_atomically(options.out, "\n".join(pages).encode())
    return EQUAL
