"""`harness merge`: shards of one suite into one folder."""

import argparse
from pathlib import Path

HELP = "put the shards of a run together"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", type=Path, help="the new folder")
    parser.add_argument("folders", metavar="DIR", type=Path, nargs="+", help="a folder of `harness run --shard I/N`")
    parser.add_argument("--partial", action="store_true", help="although cells are missing")
    parser.add_argument(
        "--even-if-changed", action="store_true", help="although config, code, kernels or environment differ"
    )
    parser.add_argument("--strict", action="store_true", help="a degraded cell fails it too")


def execute(options: argparse.Namespace) -> int:
    from harness.report import rebuild
    from harness.report.show import finish
    from harness.store.merge import merge

    merge(options.out, options.folders, partial=options.partial, even_if_changed=options.even_if_changed)
    return finish(rebuild(options.out), options.out, quiet=options.quiet, strict=options.strict)
