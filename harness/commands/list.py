"""`harness list`: all names that a config may use."""

import argparse

from harness.errors import EQUAL
from harness.text import terminal

HELP = "variants, masks, kernels, phases, dtypes, regimes"


def execute(options: argparse.Namespace) -> int:
    from harness.report.plan import print_names

    print_names(terminal())
    return EQUAL
