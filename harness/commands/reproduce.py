"""`harness reproduce`: the run of a folder once more, and whether it says the same."""

import argparse
from pathlib import Path

from harness.errors import EQUAL, NOT_EQUAL
from harness.text import plain, terminal

HELP = "run a folder's run again, with the kernels it keeps, and compare"
DESCRIPTION = """\
Every run's folder keeps its whole config, the source of your kernels and of the modules of yours that they import, and
the versions of all packages. This runs it again from that alone: the repository, the config and the kernel files need
not be there. First it says what is another than it was then; then it runs, and compares every cell's verdict.

It runs the code in DIR: only do this to a folder that you trust.
"""
EPILOG = """\
exit codes:  0 every cell has the verdict that it had   1 one has not   2 bad input, or a source is not in the folder

examples:
  harness reproduce results/latest
  harness reproduce sent/by/mail --out results/again --no-timing
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--out", metavar="DIR", type=Path, help="the new run's folder (default: one under results/)")
    parser.add_argument("--no-timing", action="store_true", help="verdicts only: much faster")


def execute(options: argparse.Namespace) -> int:
    from harness.report.terminal import say
    from harness.reproduction import reproduce, unlike

    console = terminal()
    console.quiet = options.quiet
    changes = unlike(options.folder)
    say(console, "another environment than then:" if changes else "the same environment as then", whole=True)
    say(console, *(f"  {plain(change)}" for change in changes), whole=True)
    found = reproduce(options.folder, options.out, timing=not options.no_timing, quiet=options.quiet)
    same = sum(pair.same_verdict for pair in found.pairs)
    exact = sum(pair.same_numbers for pair in found.pairs)
    for pair in found.pairs:
        if not pair.same_verdict:
            was, now = (("no such cell" if r is None else r.status) for r in (pair.before, pair.after))
            say(console, f"{plain(pair.case_id)}: {was} -> {now}", style="red", whole=True)
    word = "REPRODUCED" if found.passed else "NOT REPRODUCED"
    say(console, f"{word}  {same} of {len(found.pairs)} cells with the same verdict, {exact} with the same numbers")
    say(console, f"{found.folder}", whole=True)
    return EQUAL if found.passed else NOT_EQUAL
