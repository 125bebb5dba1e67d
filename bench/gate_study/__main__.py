"""The gate beside pytest-benchmark, asv and pyperf: false alarms without a change, detection of real slowdowns.

    python -m bench.gate_study --quick                              does it work? under 2 minutes, proves nothing
    python -m bench.gate_study --mode quiet --tools ours --out DIR  one part; others are added to the same folder later
    python -m bench.gate_study --report DIR                         the tables and the picture of what is there

Every night is kept as soon as it is over: a killed study goes on where it stopped when it is started again with the
same --out. Exit codes: 0 all targets reached, 1 not all (they are named), 2 bad input. See docs/gate-study.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.commands import positive
from harness.errors import BAD_INPUT, EQUAL, NOT_EQUAL, BadInput
from harness.text import terminal

TOOLS = ("ours", "pytest-benchmark", "asv", "pyperf")
MODES = ("quiet", "noisy")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    from rich.console import Console

    from bench.gate_study import report
    from bench.gate_study.run import Plan, run
    from bench.gate_study.targets import all_reached
    from harness import store

    try:
        folder = options.report or options.out or store.new_folder(Path("results"), "gate-study")
        if options.report is None:
            run(_quick(Plan, options) if options.quick else _plan(Plan, options), folder, console=Console(stderr=True))
        study = report.study_of(folder)
    except BadInput as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"interrupted; go on with: python -m bench.gate_study --out {folder}", file=sys.stderr)
        return 130
    report.write(study, folder)
    report.print_study(study, terminal(), folder=folder)
    return EQUAL if all_reached(study.verdicts) else NOT_EQUAL


def _plan(kind, options):
    return kind(
        config=options.config,
        tools=tuple(dict.fromkeys(options.tools)),
        modes=MODES if options.mode == "both" else (options.mode,),
        same=options.nights,
        slowed=options.slowed_nights,
        rival_same=min(options.nights, options.rival_nights),
        rival_slowed=min(options.slowed_nights, options.rival_slowed_nights),
        seconds=options.seconds,
        rival_seconds=options.rival_seconds or options.seconds,
    )


def _quick(kind, options):
    """Two cells, one night of each kind, all tools: whether everything works."""
    return kind(
        config=options.config,
        tools=tuple(dict.fromkeys(options.tools)),
        modes=("quiet",) if options.mode == "both" else (options.mode,),
        same=1,
        slowed=1,
        rival_same=1,
        rival_slowed=1,
        seconds=min(options.seconds, 1.0),
        rival_seconds=min(options.rival_seconds or options.seconds, 1.0),
        cells=2,
        calibration_s=0.5,
    )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gate_study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=(*MODES, "both"), default="both", help="without or with noisy neighbours")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="default: all")
    parser.add_argument("--nights", type=_count, default=35, help="of unchanged code, in each mode (default: 35)")
    parser.add_argument("--slowed-nights", type=_count, default=28, help="in which half the cells are slowed (28)")
    parser.add_argument("--rival-nights", type=_count, default=4, help="of them for the other tools (4)")
    parser.add_argument("--rival-slowed-nights", type=_count, default=4, help="of them for the other tools (4)")
    parser.add_argument("--seconds", type=_seconds, default=5.0, help="the gate's budget for a cell (5)")
    parser.add_argument("--rival-seconds", type=_seconds, help="the other tools' for a cell, both sides (the same)")
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[2] / "configs" / "gate_study.yaml")
    parser.add_argument("--quick", action="store_true", help="two cells, one night of each kind")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, metavar="DIR", help="new, or of a study to go on with (default: new)")
    where.add_argument("--report", type=Path, metavar="DIR", help="measure nothing, report what is there")
    return parser


def _count(text: str) -> int:
    return 0 if text == "0" else positive(text)


def _seconds(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
