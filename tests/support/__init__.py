"""What several test files share: places, processes and the command line here; records, runs and attention beside it."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from harness.__main__ import main

ROOT = Path(__file__).resolve().parent.parent.parent  # of the project


@dataclass(frozen=True)
class Result:
    """What a command left: its exit code and what it wrote to both streams."""

    code: int
    out: str
    err: str


Command = Callable[..., Result]


def called(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Result:
    """`harness WORDS...` in this process: torch is imported once for all tests."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as left:  # argparse's own
        code = int(str(left.code))
    captured = capsys.readouterr()
    return Result(code, captured.out, captured.err)


def python(*words: str | Path, cwd: Path | None = None, timeout: float = 120) -> Result:
    """`python WORDS...` in a process of its own, which finds this harness from any folder."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    return Result(done.returncode, done.stdout, done.stderr)


def git(where: Path, *words: str) -> str:
    """`git WORDS...` in a folder, by somebody whose settings do not matter; what it printed."""
    somebody = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *somebody, *words], cwd=where, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def printed(write: Callable[[Console], object], width: int = 80) -> str:
    """What `write` prints on a terminal without colours."""
    text = io.StringIO()
    write(Console(file=text, width=width, color_system=None))
    return text.getvalue()
