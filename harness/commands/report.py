"""`harness report`: tables, summary and pictures, rebuilt from a run's records."""

import argparse
from pathlib import Path

from harness.console import terminal
from harness.exits import EQUAL

HELP = "rebuild tables and summary.md from a run's records"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", default=Path("results/latest"))
    parser.add_argument("--figure", metavar="FILE", type=Path, help="also draw the trade-offs (.png, .svg or .html)")


def execute(options: argparse.Namespace) -> int:
    from harness.report import rebuild
    from harness.report.terminal import print_summary

    frame = rebuild(options.folder)
    if options.figure is not None:
        from harness.report.figure import save

        save(frame, options.figure)
    if not options.quiet:
        share, elapsed = frame.attrs["measured_share"], frame.attrs["elapsed"]
        print_summary(frame, terminal(), folder=options.folder, measured_share=share, elapsed=elapsed)
    return EQUAL
