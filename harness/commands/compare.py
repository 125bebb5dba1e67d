"""`harness compare`: what changed from one run to another, cell by cell."""

import argparse
import sys
from pathlib import Path

from harness.errors import EQUAL, NOT_EQUAL, BadInput
from harness.text import terminal

HELP = "what changed from run A to run B, cell by cell, the largest first"
DESCRIPTION = """\
Lists the cells of two runs that differ: status, errors, parameters, cache bytes, and speed as a ratio to the reference.
Cells are matched by their id; where A and B ran one kernel each, and not the same, by all of it but the kernel.
Environments that differ are named. Without torch, from the stored records.
"""
EPILOG = """\
exit codes:  0 no cell of both runs has a worse status in B   1 one has   2 bad input, or no cell is in both
             An approximate kernel whose relative L1 grew by more than rounding counts as worse, too.
             Other errors, sizes, speeds and cells of one run alone are shown, not judged: `harness gate` judges.

examples:
  harness compare results/before results/after
  harness compare results/before results/after --format csv > changes.csv
  harness compare results/eager results/mine           two runs of one config with --kernel eager and --kernel mine.py:f
"""
FORMATS = ("table", "md", "csv")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", type=Path)
    parser.add_argument("after", metavar="B", type=Path)
    parser.add_argument("--all", action="store_true", help="every cell, also those without a difference")
    parser.add_argument("--format", choices=FORMATS, default="table", help="default: table")


def execute(options: argparse.Namespace) -> int:
    from harness.gate.difference import compare_runs
    from harness.report import difference
    from harness.report.page import read_run
    from harness.store.reading import labels

    folders = (options.before, options.after)
    before, after = (read_run(one, label=label) for one, label in zip(folders, labels(folders), strict=True))
    runs = (before, after)
    cells = compare_runs(before.frame, after.frame)
    if not any(cell.in_both for cell in cells):
        raise BadInput(
            f"{options.before} and {options.after} have nothing in common: no cell is in both, "
            f"as {next(iter(before.frame['case_id']), 'no cell')} and {next(iter(after.frame['case_id']), 'no cell')}"
        )
    if not options.quiet:
        if options.format == "table":
            difference.print_differences(runs, cells, terminal(), everything=options.all)
        elif options.format == "md":
            sys.stdout.write(difference.markdown(runs, cells, everything=options.all))
        else:
            sys.stdout.write(difference.csv(cells, everything=options.all))
    return NOT_EQUAL if any(cell.worse for cell in cells) else EQUAL
