"""The end of a run, measured or merged: its page, its summary on the terminal, its exit code."""

from pathlib import Path

import pandas as pd

from harness.console import terminal
from harness.exits import EQUAL, NOT_EQUAL
from harness.report.page import write_own_page
from harness.report.sparsity import is_approximate, print_sparsity
from harness.report.summary import judge
from harness.report.terminal import print_summary


def finish(frame: pd.DataFrame, folder: Path, *, quiet: bool, strict: bool) -> int:
    write_own_page(folder, frame)
    if not quiet:
        share, elapsed = frame.attrs["measured_share"], frame.attrs["elapsed"]
        print_summary(frame, terminal(), folder=folder, measured_share=share, elapsed=elapsed)
        if is_approximate(frame):
            print_sparsity(folder, terminal())
    verdict = judge(frame)
    degraded = strict and verdict.statuses.get("degraded", 0)
    return EQUAL if verdict.passed and not degraded else NOT_EQUAL
