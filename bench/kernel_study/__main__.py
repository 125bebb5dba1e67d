"""How fast each kernel is beside SDPA, nn.MultiheadAttention and transformers: `make bench-kernels`.

    python -m bench.kernel_study --quick             the targets' points alone, about 90 s
    python -m bench.kernel_study --only decode       one study: prefill, decode, mla or mha

Written to results/kernels-<time>/. Exit codes: 0 all targets reached, 1 not all, 2 bad input. See docs/kernels.md.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.commands import positive
from harness.errors import BAD_INPUT, EQUAL, NOT_EQUAL, BadInput
from harness.text import terminal

STUDIES = ("prefill", "decode", "mla", "mha")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    # Threads that wait between two short regions spin a little instead of sleeping; read when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    from rich.console import Console

    from bench.kernel_study.report import print_study
    from bench.kernel_study.run import Plan, run
    from bench.kernel_study.targets import all_reached

    plan = Plan(
        only=tuple(dict.fromkeys(options.only)) or STUDIES,
        quick=options.quick,
        all_kernels=options.all_kernels,
        minutes=options.minutes,
        memory_cap=int(options.memory_gib * 2**30),
        point_s=options.point_seconds,
        threads=options.threads,
    )
    try:
        study, folder = run(plan, options.out, console=Console(stderr=True))
    except BadInput as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    print_study(study, terminal(), folder=folder)
    return EQUAL if all_reached(study.verdicts) and not study.interrupted else NOT_EQUAL


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernel_study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only the targets' points and the sides they need")
    parser.add_argument("--only", action="append", default=[], choices=STUDIES, help="repeat for several")
    parser.add_argument("--all-kernels", action="store_true", help="also flex and compiled, at a few points")
    parser.add_argument("--minutes", type=float, default=10.0, help="0: no limit (default: 10); targets come first")
    parser.add_argument("--memory-gib", type=float, default=4.0, help="for all scores of one call (default: 4)")
    parser.add_argument("--point-seconds", type=float, default=20.0, help="for one point (default: 20)")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: a new folder under results/")
    return parser


if __name__ == "__main__":
    sys.exit(main())
