"""`harness show`: a run's story on the terminal."""

import argparse
from pathlib import Path

from harness.errors import EQUAL
from harness.text import terminal

HELP = "read a run on the terminal: verdict, curves, trade-offs, worst cells"
DESCRIPTION = """\
Shows a run from its stored records, without torch and without writing anything: the summary that it ended with, then
how latency grows with the sequence, where the errors lie, cache against decode time, the slowest and the worst cells,
and where and how it was made. Exits 0 whatever the verdict; `harness run` and `harness gate` judge.
"""
EPILOG = """\
examples:
  harness show                     results/latest
  harness show results/a | less -R
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", default=Path("results/latest"))


def execute(options: argparse.Namespace) -> int:
    from harness import store
    from harness.report.folder import measured_share
    from harness.report.page import read_run
    from harness.report.show import print_run

    run = read_run(options.folder)
    run.frame.attrs |= measured_share(store.read(options.folder).records)
    if not options.quiet:
        print_run(run, terminal())
    return EQUAL
