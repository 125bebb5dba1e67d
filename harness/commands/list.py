"""`harness list`: all names that a config may use, or all that it may say."""

import argparse
import sys

from harness.errors import EQUAL
from harness.text import terminal

HELP = "variants, masks, kernels, phases, dtypes, regimes, configs; --config: every key"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", action="store_true", help="every key of a config, what for, its rule and default, as Markdown"
    )


def execute(options: argparse.Namespace) -> int:
    if options.config:
        from harness.suite.reference import markdown

        sys.stdout.write(markdown())
        return EQUAL
    from harness.report.plan import print_names

    print_names(terminal())
    return EQUAL
