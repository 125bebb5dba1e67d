"""`harness sensitivity`: would the comparison see a wrong kernel?"""

import argparse
from pathlib import Path

from harness.commands import positive, shard
from harness.errors import EQUAL, NOT_EQUAL
from harness.text import terminal

HELP = "judge wrong attentions: does the comparison see every one of them?"
DESCRIPTION = """\
Puts wrong attentions on purpose (harness/mutants/saboteurs/, each the likeness of a real bug) in the place of the right
one, in every cell in which the bug exists, and asks whether the comparison sees them: killed, survived or not
applicable. Also the smallest relative error of the scale that each cell still sees, from 1e-1 down to 1e-8.

Written to results/sensitivity-<time>/: sensitivity.md, sensitivity.csv (a row for each saboteur and cell), cells.csv.
"""
EPILOG = """\
exit codes:  0 all seen in float32 and float64 but for what arithmetic explains, and 95 % in half types
             1 less than that, or the right attention itself is not ok in some cell   2 bad input   3 a bug in harness

examples:
  harness sensitivity                                      every saboteur over the default grid
  harness sensitivity smoke                                the same over a small grid
  harness sensitivity --only softmax_over_queries --jobs 1
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="CONFIG",
        nargs="?",
        default="default",
        help="a file, or a name (default: default)",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="the study's folder (default: a new one under results/)"
    )
    parser.add_argument(
        "--only", metavar="SABOTEUR", action="append", default=[], help="try this saboteur alone; repeat for several"
    )
    parser.add_argument("--shard", metavar="I/N", type=shard, help="only every N-th cell, from the I-th on")
    parser.add_argument("--jobs", metavar="N", type=positive, default=2, help="worker processes (default: 2)")


def execute(options: argparse.Namespace) -> int:
    from rich.console import Console

    from harness import store
    from harness.mutants.result import judge
    from harness.mutants.run import run
    from harness.report.sensitivity import print_study, sensitivity_markdown

    study, folder = run(
        options.config,
        options.out,
        only=options.only,
        shard=options.shard,
        jobs=options.jobs,
        console=Console(stderr=True, quiet=options.quiet),
    )
    text = sensitivity_markdown(study, store.read_environment(folder))
    store.write_atomically(folder / "sensitivity.md", text.encode())
    if not options.quiet:
        print_study(study, terminal(), folder=folder)
    return EQUAL if judge(study).passed else NOT_EQUAL
