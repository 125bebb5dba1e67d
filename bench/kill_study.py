"""`kill -9` at random moments of a run: is anything lost or doubled once it has been resumed to its end?

    python bench/kill_study.py [--kills 200] [--seed 0] [--spawned 10]

A small grid is run, killed with all its processes at a random moment (also before its first case and while its tables
are written), resumed, killed again, until it is finished; then the next one is begun, until there were as many kills as
asked for. Each finished run must have the table and the records of an uninterrupted one, timings aside. `--spawned` of
the kills hit the real command line with its workers (torch's import included); the others a forked copy of this
process, which has torch loaded.
"""

import argparse
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# Before torch is loaded, and for the command's processes too: a copy made by fork has no pool of threads.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

from harness import store
from harness.record import SPEEDS, Record
from harness.store.files import LOCK

CONFIG = """\
name: kills
threads: 1
regimes: [plain]
timing: {budget_s: 0.001, min_blocks: 3, max_blocks: 3}
grid:
  variant: [mha, mqa]
  embed_dim: 16
  heads: 2
  seq_len: [4, 6, 8, 10, 12]
  mask: [none, causal]
include:
  - {variant: mha, embed_dim: 16, heads: 2, seq_len: [4, 8], phase: [decode, train]}
"""
CELLS = 24
# What was disturbed is timed again, in a second attempt.
TIMED_FIELDS = frozenset({*SPEEDS, "seconds", "measured_seconds", "parts_s", "attempt"})
PATIENCE_S = 300.0
# What a run imports by and by.
LOADED_BEFORE = (
    "harness.cell.measure",
    "harness.candidate.state",
    "harness.kernels.front",
    "torch._dynamo",
    "pyarrow.parquet",
    "pyarrow.fs",
)

Start = Callable[[Path, Path], int]  # config, folder -> the id of a process that leads a group of its own


@dataclass(frozen=True)
class Run:
    config: Path
    folder: Path


@dataclass(frozen=True)
class Span:
    """Seconds that an uninterrupted run takes until it holds its folder, and from then on."""

    start: float
    work: float


@dataclass
class Findings:
    kills: int = 0
    finished: int = 0
    hit: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    doubled: int = 0
    torn: int = 0
    unequal: list[str] = field(default_factory=list)


def start_forked(config: Path, folder: Path) -> int:
    """A real process that writes real files, without the seconds that imports take."""
    for name in LOADED_BEFORE:
        importlib.import_module(name)
    from harness.runner import run

    if child := os.fork():
        return child
    try:
        os.setsid()
        run(config, folder, resume=True, executor="here")
        os._exit(0)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(70)


def start_command(config: Path, folder: Path) -> int:
    command = [sys.executable, "-m", "harness", "run", str(config), "--resume", "--out", str(folder), "--quiet"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.Popen(command, start_new_session=True, env=environment).pid


def wait(process: int, seconds: float) -> int | None:
    """Its exit code, or None if it still runs after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if (left := end - time.monotonic()) <= 0:
            return None
        time.sleep(min(left, 0.001))


def kill(process: int) -> None:
    """SIGKILL to the process and all of its group."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:  # killed before it led a group
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def lines_of(folder: Path) -> tuple[list[str], bool]:
    """Cell and attempt of all whole lines, and whether the last one is torn; read without the code under test."""
    path = folder / store.RECORDS
    *lines, rest = path.read_bytes().split(b"\n") if path.exists() else [b""]
    found = map(json.loads, lines)  # a cell that was disturbed has a second attempt, its timing anew
    return [f"{record['case_id']} {record['attempt']}" for record in found], bool(rest)


def where_hit(folder: Path, lines: list[str]) -> str:
    if not (folder / store.RECORDS).exists():
        return "before the first case"
    if len(lines) < CELLS:
        return "among the cases"
    return "while the tables were written" if not (folder / "summary.md").exists() else "at the very end"


def without_timings(folder: Path) -> tuple[str, list[dict[str, object]]]:
    """Table and records as texts: floats by repr, so that equal means equal bit by bit."""
    import pandas as pd

    frame = pd.read_parquet(folder / store.PARQUET).drop(columns=TIMED_FIELDS, errors="ignore")
    return frame.to_csv(), [_untimed(record) for record in store.read_records(folder)]


def _untimed(record: Record) -> dict[str, object]:
    return {name: repr(value) for name, value in vars(record).items() if name not in TIMED_FIELDS}


def lock_time(folder: Path) -> int:
    """Changes when a session takes the folder; a killed one leaves its lock file behind."""
    try:
        return (folder / LOCK).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def wait_for_session(process: int, folder: Path, before: int) -> int | None:
    """Until the process holds the folder; its exit code if it ended instead."""
    end = time.monotonic() + PATIENCE_S
    while lock_time(folder) in (before, 0) and time.monotonic() < end:
        if (code := wait(process, 0.002)) is not None:
            return code
    return None


def kill_and_resume(run: Run, start: Start, span: Span, chance: random.Random, limit: int, found: Findings) -> None:
    """One run to its end, with at most `limit` kills on the way."""
    config, folder = run.config, run.folder
    before: list[str] = []
    for attempt in range(limit + 1):
        lock = lock_time(folder)
        process = start(config, folder)
        if attempt == limit:
            code = wait(process, PATIENCE_S)
        elif chance.random() < 0.2:  # while it starts
            code = wait(process, chance.uniform(0, span.start))
        else:
            code = wait_for_session(process, folder, lock)
            code = wait(process, chance.uniform(0, span.work)) if code is None else code
        if code is not None or attempt == limit:
            if code is None:
                kill(process)
            if code != 0:
                found.unequal.append(f"{folder.name}: exit code {code}")
            return
        kill(process)
        found.kills += 1
        lines, torn = lines_of(folder)
        found.hit[where_hit(folder, lines)] += 1
        found.torn += torn
        found.lost += lines[: len(before)] != before
        before = lines


def uninterrupted(run: Run, start: Start) -> Span:
    began = time.monotonic()
    process = start(run.config, run.folder)
    assert wait_for_session(process, run.folder, 0) is None, "the uninterrupted run failed"
    opened = time.monotonic()
    assert wait(process, PATIENCE_S) == 0, "the uninterrupted run failed"
    return Span(start=opened - began, work=time.monotonic() - opened)


def study(kills: int, seed: int, folder: Path, start: Start = start_forked) -> Findings:
    chance, found = random.Random(seed), Findings()
    config = folder / "kills.yaml"
    config.write_text(CONFIG)
    whole = Run(config, folder / "whole")
    span = uninterrupted(whole, start)
    expected = without_timings(whole.folder)
    while found.kills < kills:
        run = Run(config, folder / f"run{found.finished}")
        kill_and_resume(run, start, span, chance, kills - found.kills, found)
        found.finished += 1
        cells = lines_of(run.folder)[0]
        found.doubled += len(cells) - len(set(cells))
        found.lost += CELLS - len({cell.partition(" ")[0] for cell in cells})
        if without_timings(run.folder) != expected:
            found.unequal.append(f"{run.folder.name}: its table or records differ from an uninterrupted run's")
    return found


def describe(found: Findings, kind: str) -> str:
    where = ", ".join(f"{count} {place}" for place, count in found.hit.most_common())
    return (
        f"{found.kills} kills of {kind} ({where}; {found.torn} left a torn line): {found.finished} runs finished, "
        f"{found.lost} records lost, {found.doubled} doubled, {len(found.unequal)} tables unequal"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spawned", type=int, default=10, help="of them through the command line")
    options = parser.parse_args()
    failed = False
    parts: tuple[tuple[str, Start, int], ...] = (
        ("the command", start_command, options.spawned),
        ("a forked run", start_forked, options.kills - options.spawned),
    )
    for kind, start, kills in parts:
        if kills <= 0:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            found = study(kills, options.seed, Path(temporary), start)
        print(describe(found, kind), *found.unequal, sep="\n  ", flush=True)
        failed |= bool(found.lost or found.doubled or found.unequal)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
