"""`harness judge`: is this kernel right, over everything that it can be asked?"""

import argparse
import json
from pathlib import Path

from harness.errors import EQUAL, NOT_EQUAL
from harness.text import progress, strict_json, terminal

HELP = "is this kernel right? a battery of direct calls over all it can be asked"
DESCRIPTION = """\
Calls a kernel directly, without modules around it, over the space of what SDPA's signature can be asked: sizes, heads,
groups, head dims, masks with their extremes, dtypes, threads, modes, strides, gradients, kinds of numbers. A pairwise
covering design chooses the calls; each answer is held to a float64 golden by the rule of docs/acceptance-rule.md. A
kernel of yours runs in a process of its own: what it writes into its inputs or beside them, or leaves changed, is seen.

Of a wrong kernel it says what is wrong (docs/diagnosis.md), where, and the smallest call that shows it, which is
written to repro_FUNCTION.py: a script that ends with 1, and a test for pytest.

A NotImplementedError is a refusal, never an error. Numbers are new in every run; the seed that is printed repeats them.
"""
EPILOG = """\
exit codes:  0 right   1 wrong, or it refuses everything   2 bad input   3 a bug in harness

examples:
  harness judge my_kernels.py:fast
  harness judge my_package.kernels:fast --minutes 5        five designs instead of one
  harness judge my_kernels.py:fast --seed 1234 --all       the same calls again, all failures
  harness judge tiled --json tiled.json                    a kernel of ours; every finding in a file
"""


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < 1e4:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive number of minutes")
    return value


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 0")
    return int(text)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", metavar="KERNEL", help="a name, FILE.py:FUNCTION or package.module:function")
    parser.add_argument("--minutes", metavar="M", type=_minutes, default=1.0, help="at most (default: 1)")
    parser.add_argument("--seed", metavar="N", type=_seed, help="repeat the calls of an earlier run")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every finding to a file")
    parser.add_argument("--all", action="store_true", help="go on after failures")
    parser.add_argument(
        "--repro", metavar="DIR", type=Path, default=Path(), help="where to write repro_FUNCTION.py (here)"
    )
    parser.add_argument("--no-diagnosis", action="store_true", help="only whether it is right, not what is wrong")
    parser.add_argument("--strict", action="store_true", help="rounded worse than the reference is a failure")


def execute(options: argparse.Namespace) -> int:
    from rich.console import Console

    from harness import store
    from harness.battery.session import ABOUT, judge
    from harness.battery.subject import examinee_of
    from harness.candidate.client import Process
    from harness.candidate.zygote import Zygote
    from harness.diagnosis.session import diagnose
    from harness.report.judgement import print_judgement

    with Zygote() as zygote:  # before torch has made a thread
        examinee = examinee_of(options.kernel, zygote=zygote)
        try:
            with progress(ABOUT, Console(stderr=True, quiet=options.quiet)) as report:
                found = judge(
                    examinee,
                    minutes=options.minutes,
                    seed=options.seed,
                    go_on=options.all,
                    strict=options.strict,
                    on_finding=lambda done, planned, finding: report(done, f"{finding.group}: {finding.call[:60]}"),
                )
            diagnosis = None if options.no_diagnosis else diagnose(examinee, found)
        finally:
            if isinstance(examinee, Process):
                examinee.stop()
    if diagnosis is not None and diagnosis.shrunk is not None and diagnosis.shrunk.script:
        options.repro.mkdir(parents=True, exist_ok=True)
        (options.repro / diagnosis.file_name).write_text(diagnosis.shrunk.script)
    if options.json is not None:
        whole = {
            "kernel": found.kernel,
            "status": found.status,
            "passed": found.passed,
            "seed": found.seed,
            "design": found.design,
            "seconds": found.seconds,
            "planned": found.planned,
            "refused": found.refused,
            "replaced": list(found.replaced),
            "diagnosis": None if diagnosis is None else diagnosis.row(),
            "findings": found.table().to_dict("records"),
        }
        store.write_atomically(options.json, (json.dumps(strict_json(whole), indent=1) + "\n").encode())
    if not options.quiet:
        print_judgement(found, terminal(), diagnosis)
    return EQUAL if found.passed else NOT_EQUAL
