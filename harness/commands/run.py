"""`harness run`: measure every cell of a grid, or go on with a run that was cut short."""

import argparse
import os
import sys
import time
from pathlib import Path

from harness.commands import positive, shard
from harness.errors import EQUAL
from harness.text import terminal
from harness.workers import NAMES

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
    parser.add_argument(
        "--strict",
        action="store_true",
        help="exit 1, not 0, where cells are degraded and none fails: ROUNDED WORSE, the same function, worse rounded",
    )
    parser.add_argument("--profile", action="store_true", help="say at the end where the time went, part by part")
    parser.add_argument("--dry-run", action="store_true", help="show what would run, and stop")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="say which kernel `auto` takes in each cell, and which form of latent attention, by what counts; and stop",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in --out (default: results/latest); skip what is done"
    )
    parser.add_argument(
        "--retry", action="store_true", help="with --resume: repeat cells with an error, timeout or oom"
    )
    parser.add_argument(
        "--retime", action="store_true", help="with --resume: time cells anew that others disturbed meanwhile"
    )
    parser.add_argument(
        "--even-if-changed", action="store_true", help="with --resume: whatever changed since; the report will say so"
    )
    parser.add_argument(
        "--executor",
        choices=NAMES,
        default="local",
        help="where cells are measured: in worker processes (default), in this one, or on a Ray cluster",
    )
    parser.add_argument(
        "--jobs", metavar="N", type=positive, default=1, help="worker processes (local, and only without timing)"
    )


def execute(options: argparse.Namespace) -> int:
    # Must be set before torch is loaded. Threads that spin at every barrier make a run on a busy machine 20 times
    # slower, because each barrier then waits for the scheduler; these spin for microseconds, then sleep.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    if options.dry_run or options.explain:
        return _show_plan(options)

    import psutil

    from harness.report.show import finish
    from harness.runner import Interrupted, run

    created: float = psutil.Process().create_time()
    try:
        frame = run(
            options.config,
            options.out,
            kernels=options.kernel,
            shard=options.shard,
            resume=options.resume,
            retry=options.retry,
            retime=options.retime,
            even_if_changed=options.even_if_changed,
            executor=options.executor,
            jobs=options.jobs,
            quiet=options.quiet,
            # The wall time of a run includes the interpreter's start and torch's import.
            started=min(created, time.time()),
            command=command_line(options),
        )
    except Interrupted as interrupted:
        print(f"harness: {interrupted}", file=sys.stderr)
        return interrupted.exit_code
    folder = Path(frame.attrs["folder"])
    code = finish(frame, folder, quiet=options.quiet, strict=options.strict)
    if options.profile:
        from harness import store
        from harness.report.profile import print_profile

        print_profile(store.read_records(folder), terminal())
    return code


def _show_plan(options: argparse.Namespace) -> int:
    from harness import store
    from harness.report.plan import print_explanations, print_plan
    from harness.runner import RESULTS, left_to_do
    from harness.suite.config import load_suite

    suite = load_suite(options.config, kernels=options.kernel)
    cases = store.take_shard(suite.cases, options.shard)
    folder = options.out or RESULTS / store.LATEST
    if options.resume and (folder / store.RECORDS).exists():
        planned = {case.case_id for case in cases}
        finished = [record for record in store.read_records(folder) if record.case_id in planned]
        left = left_to_do(cases, finished, retry=options.retry)
        cases = tuple(case for case in cases if case.case_id in left)
    if options.explain:
        print_explanations(cases, terminal())
    else:
        print_plan(suite, cases, terminal(), every=options.verbose)
    return EQUAL


def command_line(options: argparse.Namespace) -> list[str]:
    """The same run again, without what belongs to one session of it: the folder, and how it goes on."""
    words = ["run", options.config]
    for kernel in options.kernel:
        words += ["--kernel", kernel]
    if options.shard is not None:
        words += ["--shard", "{}/{}".format(*options.shard)]
    if options.executor != "local":
        words += ["--executor", options.executor]
    if options.jobs != 1:
        words += ["--jobs", str(options.jobs)]
    return [*words, *(flag for flag in ("--strict", "--quiet", "--verbose") if getattr(options, flag[2:]))]
