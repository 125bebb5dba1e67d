"""`harness demo`: swap the attention of a small model, show what was replaced, and prove that it is equal."""

import argparse

from harness.errors import EQUAL, NOT_EQUAL

HELP = "swap the attention of a small model and prove that it is the same"


def execute(options: argparse.Namespace) -> int:
    import logging

    import torch

    from harness.cell.build import randomise
    from harness.cell.check import check
    from harness.models.demo import SimpleModel
    from harness.report.verification import print_swap
    from harness.swaps import swap

    if not options.quiet:
        logging.getLogger("harness").setLevel(logging.INFO)  # one line for each module replaced
    model = SimpleModel()
    randomise(model, torch.Generator().manual_seed(0))
    memory, tokens = torch.randn(2, 7, 32), torch.randint(50, (2, 10))
    passed = True
    for use_in_proj in (False, True):
        swapped, report = swap(model, use_in_proj=use_in_proj)
        found = check(swapped.eval(), model.eval(), (memory, tokens), gradients=True)
        print_swap(report, found)
        passed = passed and found.passed and not report.uncalled
    return EQUAL if passed else NOT_EQUAL
