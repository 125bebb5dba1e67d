"""`harness gate`: did anything get worse than the accepted baseline?"""

import argparse
import contextlib
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import EQUAL, INTERRUPTED, NOT_EQUAL, TERMINATED, BadInput
from harness.text import terminal

if TYPE_CHECKING:
    from harness.gate.cells import ChosenCells
    from harness.gate.findings import GateOutcome

KERNEL_GRID = "kernel"  # the config that a kernel alone is timed over
HELP = "compare a run with the accepted baseline, and its speed with a commit's"
DESCRIPTION = """\
Did anything get worse? Two parts, each with its own answer.

Exact: statuses, errors, parameters, cache bytes, FLOPs and missing cells of the run in DIR against results/baseline.
These do not change by chance, on any machine.

Timing (with --base): an older commit is checked out beside the working tree, and both versions are timed in turn, call
by call, on this machine and in the same minutes; stored times of another night would be noise. The base runs twice, and
what it differs from itself is the run's own measure of noise. Every cell ends as one of

  regression    slower by more than --min-effect, beyond chance, and again when measured again: fails
  pass          a slowdown of --must-see would have been seen, and is ruled out
  inconclusive  neither: the machine was too noisy, or the base has no such cell. Said in the last line; --strict fails,
                and so does a night in which every cell ends so: nothing was shown
  improvement   faster by more than --min-effect, beyond chance

In a git repository of your own, the kernels of that repository are timed, both with the harness that is installed:
`--base main --kernel mine.py:f` needs neither a run nor a baseline. A file that both sides would run is refused.

Written to DIR: gate.md (for a CI job's summary), gate.xml (JUnit), gate.json. With --timing-only, or --kernel and no
DIR, to the folder of --out, if there is one.
"""
EPILOG = """\
exit codes:  0 nothing got worse   1 something did (with --strict: or may have), or no timed cell could be decided
             2 bad input   3 a bug in harness   130 stopped by Ctrl-C   143 stopped by SIGTERM

examples:
  harness gate                                        the latest run against results/baseline
  harness gate --base                                 and in time against the commit that the baseline came from
  harness gate --base v1.2 --cells '*-decode-*'       in time against a tag, decode cells only
  harness gate --base HEAD --timing-only smoke   are my uncommitted changes slower?
  harness gate --base main --kernel mine.py:f         is the kernel of this repository slower than on main?
  harness gate --accept                               make the latest run the baseline; commit what it shows
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, nargs="?", help="the run (default: results/latest)")
    parser.add_argument(
        "--baseline", metavar="DIR", type=Path, default=Path("results/baseline"), help="default: results/baseline"
    )
    parser.add_argument("--accept", action="store_true", help="make this run the baseline and show what changes")
    parser.add_argument("--strict", action="store_true", help="an inconclusive cell fails too")
    timing = parser.add_argument_group("timing")
    base = timing.add_mutually_exclusive_group()
    base.add_argument(
        "--base",
        metavar="REV",
        nargs="?",
        const="",
        help="time the run's cells against this revision (without REV: the commit of the suite's baseline)",
    )
    base.add_argument("--base-dir", metavar="DIR", type=Path, help="the same against the version in a folder")
    timing.add_argument(
        "--timing-only", metavar="CONFIG", type=Path, help="no run, no exact part: time the cells of this grid"
    )
    timing.add_argument("--out", metavar="DIR", type=Path, help="where to write, with --timing-only or --kernel alone")
    timing.add_argument("--cells", metavar="GLOB", help="only cells whose name is like this, as '*-decode-*'")
    timing.add_argument(
        "--kernel",
        metavar="NAME|FILE.py:FUNCTION",
        action="append",
        default=[],
        help="this kernel instead of the cells' own; a file or module of this repository is each version's own",
    )
    timing.add_argument(
        "--trust-kernels",
        action="store_true",
        help="run the files and modules that the run's records name as kernels; without it only those of --kernel",
    )
    timing.add_argument(
        "--seed", metavar="N", type=int, help="of the orders drawn, as gate.json has it: the same again"
    )
    timing.add_argument("--min-effect", metavar="PERCENT", type=_percent, default=0.02, help="default: 2")
    timing.add_argument("--must-see", metavar="PERCENT", type=_percent, default=0.05, help="default: 5")
    timing.add_argument(
        "--seconds", metavar="S", type=_seconds, default=5.0, help="at most, for a cell (default: 5; most take 1 or 2)"
    )


def execute(options: argparse.Namespace) -> int:
    wants_timing = options.base is not None or options.base_dir is not None
    if wants_timing and options.kernel and options.folder is None and options.timing_only is None:
        options.timing_only = Path(KERNEL_GRID)  # of a kernel alone there need be no run
    if not wants_timing and (options.timing_only or options.cells or options.kernel or options.seed is not None):
        raise BadInput("--timing-only, --cells, --kernel and --seed are about timing: add --base REV or --base-dir DIR")
    if options.timing_only is not None and options.folder is not None:
        raise BadInput(f"--timing-only judges no run: leave out {options.folder}, or give it without --timing-only")
    options.folder = options.folder or Path("results/latest")
    if options.accept and wants_timing:
        raise BadInput("--accept judges nothing: leave out --base, and gate the run first")
    if not options.min_effect < options.must_see:
        raise BadInput(f"--must-see ({options.must_see:.2%}) must be more than --min-effect ({options.min_effect:.2%})")
    if options.accept:
        from harness.gate.baseline import accept

        difference = accept(options.folder, options.baseline)
        if not options.quiet:
            print(difference)
        return EQUAL
    try:
        outcome = _judge(options, wants_timing=wants_timing)
    except KeyboardInterrupt as stop:
        from harness.workers.interrupts import Terminated

        terminated = isinstance(stop, Terminated)
        how = "stopped by SIGTERM or SIGHUP" if terminated else "interrupted"
        print(f"harness: {how}; the gate is not finished: times are not judged", file=sys.stderr)
        return TERMINATED if terminated else INTERRUPTED
    return EQUAL if outcome.passed else NOT_EQUAL


def _judge(options: argparse.Namespace, *, wants_timing: bool) -> "GateOutcome":
    if wants_timing:  # before torch is loaded anywhere, as `harness run` does; the processes inherit it
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    from harness.gate.baseline import read_gated_run
    from harness.gate.cells import cells_of_config, cells_of_run
    from harness.gate.exact import gate
    from harness.gate.findings import GateOutcome
    from harness.report.gate_files import remove_outputs, write_outputs
    from harness.report.gate_text import print_timing
    from harness.report.terminal import print_findings

    console = terminal()
    alone = options.timing_only is not None
    if alone:
        cells = cells_of_config(options.timing_only)
        outcome = GateOutcome(cells.suite, (), (), strict=options.strict)
    else:
        if options.folder.is_dir():
            remove_outputs(options.folder)
        run = read_gated_run(options.folder)
        ids = tuple(record.case_id for record in run.stored.records)
        outcome = GateOutcome(run.suite, ids, gate(run, options.baseline), strict=options.strict)
        if not options.quiet:
            print_findings(outcome.findings, console, suite=run.suite)
        # Failures before anything is timed: should that fail, too, they are on the job's page all the same.
        if not wants_timing or outcome.failing:
            write_outputs(options.folder, outcome)
        if not wants_timing:
            return outcome
        cells = cells_of_run(run)
    outcome = _time(options, cells, outcome)
    target = options.out if alone else options.folder
    if target is not None:
        target.mkdir(parents=True, exist_ok=True)
        write_outputs(target, outcome)
    if not options.quiet:
        print_timing(outcome, console, written=target is not None)
    return outcome


def _time(options: argparse.Namespace, cells: "ChosenCells", outcome: "GateOutcome") -> "GateOutcome":
    """The outcome of the exact part with what timing says of the chosen cells."""
    from rich.console import Console

    from harness.gate.baseline import read_baseline
    from harness.gate.cells import choose, refuse_foreign
    from harness.gate.findings import TimingSettings
    from harness.gate.timing import judge_times
    from harness.gate.versions import (
        INSTALLED,
        baseline_commit,
        checked_out,
        folder_version,
        own_repository,
        working_tree,
    )
    from harness.kernels.names import is_plugin
    from harness.text import plural, progress

    cells = choose(cells, glob=options.cells, kernels=options.kernel)
    if not (options.trust_kernels or options.kernel or options.timing_only):
        refuse_foreign(cells, options.folder)
    settings = TimingSettings(
        min_effect=options.min_effect,
        must_see=options.must_see,
        seconds=options.seconds,
        threads=cells.threads,
        suite_seed=cells.seed,
        # Drawn here, so that it can be told: the same night once more.
        seed=random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed,
    )
    # In somebody's own repository harness comes from where it is installed, and both kernels are timed with it.
    own = own_repository()
    if own is not None and not any(map(is_plugin, (case.kernel for case in cells.cases))):
        raise BadInput(f"{own} is your own repository: name its kernel to be timed, --kernel FILE.py:FUNCTION")
    installed = None if own is None else INSTALLED
    head = working_tree(own, installed=installed)
    with contextlib.ExitStack() as stack:
        if options.base_dir is not None:
            base = folder_version(options.base_dir, installed=installed)
        else:
            unsaid = not options.base and options.timing_only is not None  # else the exact part has said so
            if unsaid and (warning := read_baseline(cells.suite, options.baseline)[1].warning):
                print(f"harness: {warning}", file=sys.stderr)
            revision = options.base or baseline_commit(cells.suite, options.baseline)
            base = stack.enter_context(checked_out(revision, head.root, installed=installed))
        report = stack.enter_context(progress(len(cells.cases), Console(stderr=True, quiet=options.quiet)))
        verdicts = judge_times(base, head, cells.cases, settings, progress=report)
    left_out = (
        (cells.left_out, "failed or unsupported in the run: not timed"),
        (cells.not_chosen, f"not like --cells {options.cells}: not timed"),
    )
    return replace(
        outcome,
        timing=verdicts,
        base=base.name,
        head=head.name,
        settings=settings,
        left_out=tuple(f"{plural(number, 'cell', 'cells')} {why}" for number, why in left_out if number),
    )


def _percent(text: str) -> float:
    return _below(100, text, text.removesuffix("%")) / 100


def _seconds(text: str) -> float:
    return _below(3600, text, text)


def _below(limit: int, text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{number!r} is no number") from None
    if not 0 < value < limit:
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0 and less than {limit}")
    return value
