"""`harness tune-sparse`: how much attention can each layer and head of a model leave out?"""

import argparse
import sys
from pathlib import Path

from harness.commands.verify import model_arguments, stay_offline
from harness.errors import EQUAL, INTERRUPTED, BadInput
from harness.models.families.names import family_names
from harness.text import terminal

HELP = "find how much attention each layer and head of a model can leave out"
VERBOSE = "show every head's thresholds"
DESCRIPTION = """\
Searches, layer by layer and head by head, for the sparsest thresholds of block-sparse attention whose relative L1
against dense attention stays within a budget on the model's inputs, as SpargeAttn tunes: first the threshold that
chooses blocks, within --l1, then the one that leaves out products with the values, within --pv-l1. Each threshold is
found by bisection; a head whose error is no monotone function of it is reported. The result is plain YAML.

Nothing is downloaded, and the same model, inputs and seed give the same file.
"""
EPILOG = """\
exit codes:  0 tuned   2 bad input   3 a bug in harness

examples:
  harness tune-sparse llama --kernel 'sparse?block_q=4&block_k=4'   blocks small enough for a tiny model
  harness tune-sparse my_model.py:build_model --l1 0.05 --pv-l1 0.06 --out mine.yaml
  harness verify llama --tuned tuned.yaml                           is the model still what it was, within the budget?
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="FAMILY|FILE.py:FUNCTION",
        help=f"one of {', '.join(family_names())}; or your own model and its inputs, as for `harness verify`",
    )
    parser.add_argument(
        "--kernel", default="sparse", help="with what holds for all heads: sparse?block_q=64&block_k=64"
    )
    parser.add_argument(
        "--by", choices=("topk", "cdf"), default="topk", help="choose blocks by their number, or by their share (topk)"
    )
    parser.add_argument("--l1", type=float, default=0.07, help="limit of a head's relative L1 by the blocks (0.07)")
    parser.add_argument("--pv-l1", type=float, default=0.08, help="limit with a PV threshold on top (0.08)")
    parser.add_argument("--no-pv", action="store_true", help="look for no PV threshold")
    model_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the calibration inputs (0)")
    parser.add_argument("--out", metavar="FILE", type=Path, default=Path("tuned.yaml"), help="default: tuned.yaml")


def execute(options: argparse.Namespace) -> int:
    if options.out.exists():
        raise BadInput(f"{options.out} exists already; give another --out or move it")
    stay_offline(quiet=options.quiet)
    from harness.models.tuning import file
    from harness.models.tuning.search import tune
    from harness.report.verification import print_layer, print_tuned

    console = terminal()
    console.quiet = options.quiet
    try:
        found = tune(
            options.target,
            kernel=options.kernel,
            by=options.by,
            l1=options.l1,
            pv_l1=None if options.no_pv else options.pv_l1,
            config=dict(options.config),
            path=options.path,
            seed=options.seed,
            on_layer=lambda layer: print_layer(layer, console, every_head=options.verbose),
        )
    except KeyboardInterrupt:
        print(f"harness: interrupted; {options.out} was not written: only a whole model is", file=sys.stderr)
        return INTERRUPTED
    file.save(found, options.out)
    print_tuned(found, options.out, console)
    return EQUAL
