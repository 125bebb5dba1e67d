"""`harness run`: measure every cell of a grid."""

import argparse
import os
import time
from pathlib import Path

from harness.arguments import shard
from harness.console import terminal
from harness.exits import EQUAL, NOT_EQUAL

HELP = "measure every cell of a grid"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="YAML file with the grid")
    parser.add_argument("--out", metavar="DIR", type=Path, help="the run's folder (default: a new one under results/)")
    parser.add_argument(
        "--kernel",
        metavar="NAME|FILE.py:FUNCTION",
        action="append",
        default=[],
        help="judge this kernel instead of the config's; repeat for several",
    )
    parser.add_argument("--shard", metavar="I/N", type=shard, help="only every N-th case, from the I-th on")
    parser.add_argument("--strict", action="store_true", help="a degraded cell fails the run too")
    parser.add_argument("--dry-run", action="store_true", help="show what would run, and stop")


def execute(options: argparse.Namespace) -> int:
    # Must be set before torch is loaded. Threads that spin at every barrier make a run on a busy machine 20 times
    # slower, because each barrier then waits for the scheduler; these spin for microseconds, then sleep.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    if options.dry_run:
        from harness.config import load_suite
        from harness.report.plan import print_plan
        from harness.runner import take_shard

        suite = load_suite(options.config, kernels=options.kernel)
        print_plan(suite, take_shard(suite.cases, options.shard), terminal(), every=options.verbose)
        return EQUAL

    from harness.report.summary import judge
    from harness.report.terminal import print_summary
    from harness.runner import run

    frame = run(
        options.config,
        options.out,
        kernels=options.kernel,
        shard=options.shard,
        quiet=options.quiet,
        started=_process_start(),
    )
    if not options.quiet:
        print_summary(
            frame,
            terminal(),
            folder=Path(frame.attrs["folder"]),
            measured_share=frame.attrs["measured_share"],
            elapsed=frame.attrs["elapsed"],
        )
    verdict = judge(frame)
    degraded = options.strict and verdict.statuses.get("degraded", 0)
    return EQUAL if verdict.passed and not degraded else NOT_EQUAL


def _process_start() -> float:
    """The wall time of a run includes the interpreter's start and torch's import."""
    import psutil

    created: float = psutil.Process().create_time()
    return min(created, time.time())
