"""`harness gate`: did anything get worse than the accepted baseline?"""

import argparse
from pathlib import Path

from harness.console import terminal
from harness.exits import EQUAL, NOT_EQUAL

HELP = "compare a run with the accepted baseline"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", default=Path("results/latest"))
    parser.add_argument("--baseline", metavar="DIR", type=Path, default=Path("results/baseline"))
    parser.add_argument("--accept", action="store_true", help="make this run the baseline and show what changes")


def execute(options: argparse.Namespace) -> int:
    from harness.gate import exact as gate
    from harness.report.terminal import print_findings

    if options.accept:
        difference = gate.accept(options.folder, options.baseline)
        if not options.quiet:
            print(difference)
        return EQUAL
    findings = gate.gate(options.folder, options.baseline)
    if not options.quiet:
        print_findings(findings, terminal(), suite=gate.suite_name(options.folder))
    return NOT_EQUAL if any(finding.fails for finding in findings) else EQUAL
