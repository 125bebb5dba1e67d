"""`harness report`: tables, summary, page and pictures, rebuilt from the records of one run or several."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import EQUAL, BadInput
from harness.text import terminal

if TYPE_CHECKING:
    from harness.report.page import StoredRun

log = logging.getLogger(__name__)

HELP = "rebuild report.html, tables and summary.md from a run's records"
DESCRIPTION = """\
Rebuilds from the stored records, without torch, what people read: results.csv, results.parquet and summary.md in each
run's folder, and report.html: one file that opens offline, with the verdict, trade-offs, errors, speed and all cells.
Several folders are shown side by side in one page.
"""
EPILOG = """\
examples:
  harness report                                           results/latest/report.html
  harness report results/a results/b --out both.html       two runs side by side
  harness report --format png --out docs/tradeoffs.png     the trade-offs as a picture
  harness report --baseline results/baseline --sensitivity results/sensitivity-20261116T151138Z
"""
# The file that each format becomes in its folder, unless --out names another.
FILES = {
    "html": "report.html",
    "md": "summary.md",
    "csv": "results.csv",
    "png": "tradeoffs.png",
    "svg": "tradeoffs.svg",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", metavar="DIR", type=Path, nargs="*", default=[Path("results/latest")])
    parser.add_argument(
        "--format", action="append", choices=tuple(FILES), help="what to write; repeat for several (default: html)"
    )
    parser.add_argument(
        "--out",
        metavar="PATH",
        type=Path,
        help="the file to write, or for several formats their folder (default: the run's folder; "
        "for several runs the current one)",
    )
    parser.add_argument("--baseline", metavar="DIR", type=Path, help="show what the gate says against this baseline")
    parser.add_argument("--sensitivity", metavar="DIR", type=Path, help="show the tables of this sensitivity study")


def execute(options: argparse.Namespace) -> int:
    from harness.report import rebuild
    from harness.report.page import read_run
    from harness.report.terminal import print_summary
    from harness.store.reading import labels, refuse_twice

    refuse_twice(options.folders)
    frames = [rebuild(folder) for folder in options.folders]
    runs = [
        # A study belongs to no run: one table of it is enough.
        read_run(folder, label=label, baseline=options.baseline, sensitivity=None if number else options.sensitivity)
        for number, (folder, label) in enumerate(zip(options.folders, labels(options.folders), strict=True))
    ]
    formats = list(dict.fromkeys(options.format or _default_formats()))
    # A single run's own tables and summary are written already, by `rebuild`.
    own = ("md", "csv") if options.out is None and len(runs) == 1 else ()
    written = [_write(each, runs, _target(options, formats, each)) for each in formats if each not in own]
    if not options.quiet:
        for folder, frame in zip(options.folders, frames, strict=True):
            print_summary(frame, terminal(), folder=folder)
        for path in written:
            terminal().print(str(path), highlight=False, markup=False, soft_wrap=True)
    return EQUAL


def _default_formats() -> list[str]:
    """The page, where it can be made; asked for by name it is an error instead."""
    from harness.report.page import missing_packages

    if lost := missing_packages():
        log.warning("no report.html: it needs %s (the `report` extra)", ", ".join(lost))
        return []
    return ["html"]


def _target(options: argparse.Namespace, formats: Sequence[str], wanted: str) -> Path:
    if options.out is None:
        return (options.folders[0] if len(options.folders) == 1 else Path()) / FILES[wanted]
    return Path(options.out) if len(formats) == 1 and not options.out.is_dir() else options.out / FILES[wanted]


def _write(wanted: str, runs: "Sequence[StoredRun]", path: Path) -> Path:
    from harness import store
    from harness.report.markdown import summary_markdown

    path.parent.mkdir(parents=True, exist_ok=True)
    if wanted == "html":
        from harness.report.page import write_page

        write_page(runs, path)
    elif wanted in ("png", "svg"):
        from harness.report.figure import save

        if path.suffix != f".{wanted}":
            raise BadInput(f"{path}: a {wanted} must end in .{wanted}")
        save(runs, path)
    elif wanted == "csv":
        import pandas as pd

        several = [run.frame.assign(run=run.label) if len(runs) > 1 else run.frame for run in runs]
        text = store.csv_text(pd.concat(several, ignore_index=True))
        store.write_atomically(path, text.encode())
    else:
        texts = [summary_markdown(run.frame, run.environment, suite=run.label) for run in runs]
        store.write_atomically(path, "\n".join(texts).encode())
    return path
