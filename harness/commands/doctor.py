"""`harness doctor`: is this machine fit to run, and how far can its timings be trusted?"""

import argparse
import json
import os

from harness.errors import EQUAL, NOT_EQUAL
from harness.text import terminal

HELP = "how far this machine's timings can be trusted, and what to fix first"
DESCRIPTION = """\
Looks at versions, processor, threads, load, memory and disk, then times one attention call against itself for about a
minute: what differs then is the machine. Exits 1 only if runs are impossible here.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="about 5 seconds of timing instead of a minute")
    parser.add_argument("--json", action="store_true", help="everything as JSON, for machines")


def execute(options: argparse.Namespace) -> int:
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as `harness run` sets it, before torch is loaded

    from rich.console import Console

    from harness.doctor.examine import examine
    from harness.doctor.noise import MINUTE_S, QUICK_S

    seconds = QUICK_S if options.quick else MINUTE_S
    with Console(stderr=True, quiet=options.quiet).status(f"timing an attention call against itself, {seconds:.0f} s"):
        found = examine(seconds=seconds)
    if options.json:
        print(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    elif not options.quiet:
        from harness.report.doctor import print_examination

        print_examination(found, terminal())
    return EQUAL if found.can_run else NOT_EQUAL
