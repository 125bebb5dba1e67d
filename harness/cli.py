"""The command line: parse, call, exit code; nothing else. Heavy imports wait until a command needs them."""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import BadInput
from harness.families.names import family_names

if TYPE_CHECKING:
    from rich.console import Console

EQUAL, NOT_EQUAL, BAD_INPUT, BUG, INTERRUPTED = 0, 1, 2, 3, 130

EPILOG = """\
exit codes:  0 all equal   1 a mismatch or a regression   2 bad input   3 a bug in harness

examples:
  harness run configs/smoke.yaml                        judge, weigh and time a small grid
  harness run configs/default.yaml --kernel my.py:fast  judge your own kernel over the whole grid
  harness run configs/nightly.yaml --dry-run            see what would run
  harness gate results/latest                           did anything get worse since the accepted baseline?
  harness verify llama                                  swap a real model's attention, prove it is the same model
  harness sensitivity                                   would the comparison see a wrong kernel?
"""

VERIFY = """\
Swaps the attention of a real model and proves, in five steps, that the model is still the same:

  load      a tiny random model of the family, a checkpoint of yours, or the model that your function builds
  inspect   layers, attention class, heads: what the swap is held to
  swap      every attention replaced, every weight the same bits
  forward   the same output at the model's end and at every swapped layer, within what rounding explains
            (docs/acceptance-rule.md); the first layer that departs is named, and a swap that is bypassed fails
  generate  the same tokens from a greedy decode through the KV cache, or the same latents after a few denoising steps

Nothing is downloaded. The verdict is written to results/verify-<time>/: verify.md, verify.csv and layers.csv.
"""
VERIFY_EPILOG = """\
exit codes:  0 all steps passed   1 a step failed   2 bad input   3 a bug in harness

examples:
  harness verify llama                                     a tiny random LLaMA, our eager kernel
  harness verify llama --kernel my_kernels.py:fast         the same, with your kernel (SDPA's signature)
  harness verify qwen3 --config num_hidden_layers=4 --config attention_bias=true
  harness verify llama --path ~/models/Llama-3.2-1B        a checkpoint on this disk
  harness verify my_model.py:build_model --verbose         your own model, every layer's row shown
  harness verify my_package.models:build_model
  harness verify --all                                     every family, and a table of them

your own model: a function without arguments that returns the model, or a pair of model and inputs: a tensor, a tuple of
positional arguments or a dict of keyword arguments. Causal language models of transformers, and models of the families,
need no inputs.
"""


SENSITIVITY = """\
Puts wrong attentions on purpose (harness/saboteurs/, each the likeness of a real bug) in the place of the right one, in
every cell in which the bug exists, and asks whether the comparison sees them: killed, survived or not applicable. Also
the smallest relative error of the scale that each cell still sees, from 1e-1 down to 1e-8.

Written to results/sensitivity-<time>/: sensitivity.md, sensitivity.csv (a row for each saboteur and cell), cells.csv.
"""
SENSITIVITY_EPILOG = """\
exit codes:  0 all seen in float32 and float64 but for what arithmetic explains, and 95 % in half types
             1 less than that, or the right attention itself is not ok in some cell   2 bad input   3 a bug in harness

examples:
  harness sensitivity                                      every saboteur over configs/default.yaml
  harness sensitivity configs/smoke.yaml                   the same over a small grid
  harness sensitivity --only softmax_over_queries --jobs 1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    from harness import logs

    logs.configure(quiet=options.quiet, verbose=options.verbose)
    try:
        result: int = options.command(options)
        sys.stdout.flush()
        return result
    except BadInput as error:
        print(f"harness: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(
            "harness: interrupted; finished cases are in the run's records.jsonl (verify: in its verify.csv)",
            file=sys.stderr,
        )
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return EQUAL
    except OSError as error:  # a folder that cannot be written, a full disk: not a mismatch, so not exit 1
        print(f"harness: {error}", file=sys.stderr)
        return BAD_INPUT
    except Exception:
        traceback.print_exc()
        print("harness: this is a bug in harness, not a verdict; please report the lines above", file=sys.stderr)
        return BUG


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harness",
        description="Proves that an attention implementation equals its reference, and says what it costs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    talk = _talk("log every case")

    run = commands.add_parser("run", parents=[talk], help="measure every cell of a grid")
    run.add_argument("config", metavar="CONFIG", help="YAML file with the grid")
    run.add_argument("--out", metavar="DIR", type=Path, help="the run's folder (default: a new one under results/)")
    run.add_argument(
        "--kernel",
        metavar="NAME|FILE.py:FUNCTION",
        action="append",
        default=[],
        help="judge this kernel instead of the config's; repeat for several",
    )
    run.add_argument("--shard", metavar="I/N", type=_shard, help="only every N-th case, from the I-th on")
    run.add_argument("--strict", action="store_true", help="a degraded cell fails the run too")
    run.add_argument("--dry-run", action="store_true", help="show what would run, and stop")
    run.set_defaults(command=_run)

    gate = commands.add_parser("gate", parents=[talk], help="compare a run with the accepted baseline")
    gate.add_argument("folder", metavar="DIR", type=Path, nargs="?", default=Path("results/latest"))
    gate.add_argument("--baseline", metavar="DIR", type=Path, default=Path("results/baseline"))
    gate.add_argument("--accept", action="store_true", help="make this run the baseline and show what changes")
    gate.set_defaults(command=_gate)

    report = commands.add_parser("report", parents=[talk], help="rebuild tables and summary.md from a run's records")
    report.add_argument("folder", metavar="DIR", type=Path, nargs="?", default=Path("results/latest"))
    report.add_argument("--figure", metavar="FILE", type=Path, help="also draw the trade-offs (.png, .svg or .html)")
    report.set_defaults(command=_report)

    verify = commands.add_parser(
        "verify",
        parents=[_talk("show every layer's row, log every module")],
        help="swap a real model's attention and prove that it is the same model",
        description=VERIFY,
        epilog=VERIFY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target = verify.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "target",
        metavar="FAMILY|FILE.py:FUNCTION",
        nargs="?",
        help=f"one of {', '.join(family_names())}; or your own model, as file.py:function or package.module:function",
    )
    target.add_argument("--all", action="store_true", help="every family, one after another")
    verify.add_argument("--kernel", metavar="NAME|FILE.py:FUNCTION", default="eager", help="default: eager")
    verify.add_argument(
        "--config",
        metavar="KEY=VALUE",
        type=_override,
        action="append",
        default=[],
        help="override a key of the family's tiny config; the value is YAML; repeat for several",
    )
    verify.add_argument("--path", metavar="DIR", type=Path, help="a local checkpoint folder of the family")
    verify.add_argument("--out", metavar="DIR", type=Path, help="the run's folder (default: a new one under results/)")
    verify.set_defaults(command=_verify)

    sensitivity = commands.add_parser(
        "sensitivity",
        parents=[talk],
        help="judge wrong attentions: does the comparison see every one of them?",
        description=SENSITIVITY,
        epilog=SENSITIVITY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sensitivity.add_argument(
        "config", metavar="CONFIG", nargs="?", default="configs/default.yaml", help="default: configs/default.yaml"
    )
    sensitivity.add_argument(
        "--out", metavar="DIR", type=Path, help="the study's folder (default: a new one under results/)"
    )
    sensitivity.add_argument(
        "--only", metavar="SABOTEUR", action="append", default=[], help="try this saboteur alone; repeat for several"
    )
    sensitivity.add_argument("--shard", metavar="I/N", type=_shard, help="only every N-th cell, from the I-th on")
    sensitivity.add_argument("--jobs", metavar="N", type=_jobs, default=2, help="worker processes (default: 2)")
    sensitivity.set_defaults(command=_sensitivity)

    listing = commands.add_parser("list", parents=[talk], help="variants, masks, kernels, phases, dtypes, regimes")
    listing.set_defaults(command=_list)
    return parser


def _talk(verbose: str) -> argparse.ArgumentParser:
    talk = argparse.ArgumentParser(add_help=False)
    talk.add_argument("--quiet", action="store_true", help="no progress, no summary, errors only")
    talk.add_argument("--verbose", action="store_true", help=verbose)
    return talk


def _override(text: str) -> tuple[str, Any]:
    import yaml

    key, equals, value = text.partition("=")
    if not (equals and key):
        raise argparse.ArgumentTypeError(f"{text!r}: must be KEY=VALUE, as in num_hidden_layers=4")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        problem = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text!r}: the value is not YAML: {problem}") from error


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}: must be I/N with 1 <= I <= N, as in 2/4")
    return int(index), int(count)


def _jobs(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a positive number of processes")
    return int(text)


def _run(options: argparse.Namespace) -> int:
    # Must be set before torch is loaded. Threads that spin at every barrier make a run on a busy machine 20 times
    # slower, because each barrier then waits for the scheduler; these spin for microseconds, then sleep.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    if options.dry_run:
        from harness.config import load_suite
        from harness.report.plan import print_plan
        from harness.runner import take_shard

        suite = load_suite(options.config, kernels=options.kernel)
        print_plan(suite, take_shard(suite.cases, options.shard), _console(), every=options.verbose)
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
            _console(),
            folder=Path(frame.attrs["folder"]),
            measured_share=frame.attrs["measured_share"],
            elapsed=frame.attrs["elapsed"],
        )
    verdict = judge(frame)
    degraded = options.strict and verdict.statuses.get("degraded", 0)
    return EQUAL if verdict.passed and not degraded else NOT_EQUAL


def _console() -> "Console":
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            """rich would exit 1; but `harness list | head` is no error, and a run's exit code is its verdict."""
            self.quiet = True
            _discard_output()

    return Terminal()


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _process_start() -> float:
    """The wall time of a run includes the interpreter's start and torch's import."""
    import psutil

    created: float = psutil.Process().create_time()
    return min(created, time.time())


def _gate(options: argparse.Namespace) -> int:
    from harness import gate
    from harness.report.terminal import print_findings

    if options.accept:
        difference = gate.accept(options.folder, options.baseline)
        if not options.quiet:
            print(difference)
        return EQUAL
    findings = gate.gate(options.folder, options.baseline)
    if not options.quiet:
        print_findings(findings, _console(), suite=gate.suite_name(options.folder))
    return NOT_EQUAL if any(finding.fails for finding in findings) else EQUAL


def _report(options: argparse.Namespace) -> int:
    from harness.report import rebuild
    from harness.report.terminal import print_summary

    frame = rebuild(options.folder)
    if options.figure is not None:
        from harness.report.figure import save

        save(frame, options.figure)
    if not options.quiet:
        share, elapsed = frame.attrs["measured_share"], frame.attrs["elapsed"]
        print_summary(frame, _console(), folder=options.folder, measured_share=share, elapsed=elapsed)
    return EQUAL


def _verify(options: argparse.Namespace) -> int:
    if options.all and (options.config or options.path):
        raise BadInput("--all takes no --config and no --path: they belong to one family")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is loaded: nothing is ever downloaded
    if options.quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from harness.verify.run import all_families, run

    console = _console()
    console.quiet = options.quiet
    found = run(
        all_families() if options.all else [options.target],
        kernel=options.kernel,
        config=dict(options.config),
        path=options.path,
        out=options.out,
        console=console,
        every_layer=options.verbose,
    )
    return EQUAL if all(each.passed for each in found) else NOT_EQUAL


def _sensitivity(options: argparse.Namespace) -> int:
    from rich.console import Console

    from harness.report.sensitivity import print_study
    from harness.sensitivity.run import run
    from harness.sensitivity.table import judge

    study, folder = run(
        options.config,
        options.out,
        only=options.only,
        shard=options.shard,
        jobs=options.jobs,
        console=Console(stderr=True, quiet=options.quiet),
    )
    if not options.quiet:
        print_study(study, _console(), folder=folder)
    return EQUAL if judge(study).passed else NOT_EQUAL


def _list(options: argparse.Namespace) -> int:
    from harness.report.plan import print_names

    print_names(_console())
    return EQUAL
