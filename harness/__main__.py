"""The `harness` command, also `python -m harness`: parse, call, exit code; nothing else.

Heavy imports wait until a command needs them.
"""

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from harness import commands
from harness.errors import BAD_INPUT, BUG, EQUAL, INTERRUPTED, BadInput
from harness.registry import nearest
from harness.text import configure, discard_output, harmless_lines

EPILOG = """\
exit codes:  0 all equal, or ROUNDED WORSE (with --strict 1)   1 a mismatch or a regression   2 bad input
             3 a bug in harness   130 stopped by Ctrl-C   143 stopped by SIGTERM

examples:
  harness init                                      a kernel, a config, a test and a workflow to start from
  harness run smoke                                 judge, weigh and time a small grid
  harness judge my_kernels.py:fast                  is your own kernel right?
  harness run smoke --kernel my_kernels.py:fast     the same inside modules, with cost and speed
  harness run nightly --dry-run                     see what would run
  harness run nightly --resume                      go on with a run that was cut short
  harness merge results/all shard1 shard2           put the shards of a run together
  harness gate results/latest                       did anything get worse since the accepted baseline?
  harness gate results/latest --base                ... or slower, timed beside the baseline's commit?
  harness gate --base main --kernel mine.py:f       is the kernel of this repository slower than on main?
  harness trend                                     between which commits did a cell change?
  harness doctor --quick                            how far can this machine's timings be trusted?
  harness show results/latest                       a run's story: curves, errors, worst cells
  harness reproduce DIR                             run a folder's run again, and compare
  harness advise --model llama-3-8b --memory 24GiB  which kind of attention fits, and how fast it would be
  harness verify llama                              swap a real model's attention, prove it is the same model
  harness tune-sparse llama                         how much attention can a model leave out?
  harness sensitivity                               would the comparison see a wrong kernel?
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    configure(quiet=options.quiet, verbose=options.verbose)
    try:
        result: int = options.execute(options)
        sys.stdout.flush()
        return result
    except KeyboardInterrupt:
        print(
            "harness: interrupted; finished cases are in the run's records.jsonl (verify: in its verify.csv)",
            file=sys.stderr,
        )
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return EQUAL
    except (BadInput, OSError) as error:
        # A folder that cannot be written, a full disk: not a mismatch, so not exit 1.
        print(harmless_lines(f"harness: {error}"), file=sys.stderr)
        return BAD_INPUT
    except Exception:
        traceback.print_exc()
        print("harness: this is a bug in harness, not a verdict; please report the lines above", file=sys.stderr)
        return BUG


class _Parser(argparse.ArgumentParser):
    """What was mistyped is answered with the nearest that there is."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += nearest(str(value), map(str, action.choices or ()))
            raise

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, strange = self.parse_known_args(args, namespace)
        if strange:
            parser: argparse.ArgumentParser = getattr(options, "parser", self)
            word = next((each for each in strange if each.startswith("-")), strange[0]).partition("=")[0]
            parser.error(f"unrecognized arguments: {' '.join(strange)}{nearest(word, parser._option_string_actions)}")
        return options


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *given: Any, **more: Any) -> None:
        from importlib.metadata import version

        print(f"harness {version('attention-harness')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="harness",
        description="Proves that an attention implementation equals its reference, and says what it costs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="the version of this harness")
    added = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in commands.NAMES:
        command = importlib.import_module(f"harness.commands.{name}")
        one = added.add_parser(
            name.replace("_", "-"),
            help=command.HELP,
            description=getattr(command, "DESCRIPTION", None),
            epilog=getattr(command, "EPILOG", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.add_argument("--quiet", action="store_true", help="no progress, no summary, errors only")
        one.add_argument("--verbose", action="store_true", help=getattr(command, "VERBOSE", "log every case"))
        getattr(command, "arguments", lambda parser: None)(one)
        one.set_defaults(execute=command.execute, parser=one)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
