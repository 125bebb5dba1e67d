"""Others' work on the machine is seen, ours is not, and a timed run that was disturbed says so."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from harness import environment as machine_load
from harness import runner
from harness.environment import Others

SPIN = "while True: pass"
UNTIMED = {
    "name": "tiny",
    "timing": {"enabled": False},
    "grid": {"variant": "mha", "embed_dim": 16, "heads": 2, "seq_len": 4},
}
TIMED = UNTIMED | {"timing": {"budget_s": 0.01, "min_blocks": 3}}


@pytest.fixture
def spinning() -> Iterator[int]:
    """Nobody's child: whoever started it is gone."""
    script = f"{sys.executable} -c '{SPIN}' > /dev/null 2>&1 & echo $!"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    try:
        yield int(done.stdout)
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


@pytest.fixture
def child() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """The machine's busy seconds, set by hand: what else runs here is not known."""
    busy = [0.0]
    monkeypatch.setattr(machine_load, "_busy", lambda: busy[0])
    return lambda seconds: busy.__setitem__(0, seconds)


def test_the_work_of_another_process_is_seen(spinning: int) -> None:
    others = Others()
    time.sleep(0.5)
    assert others.stop()[1] > 0.2


def test_our_own_work_is_not_others(clock: Callable[[float], None]) -> None:
    others = Others()
    began = sum(os.times()[:2])
    while sum(os.times()[:2]) < began + 0.3:
        pass
    clock(0.3)
    assert others.stop()[1] < 0.1


def test_the_work_of_a_child_that_still_runs_is_not_others(clock: Callable[[float], None], child: int) -> None:
    others = Others()
    began = sum(psutil.Process(child).cpu_times()[:2])
    while sum(psutil.Process(child).cpu_times()[:2]) < began + 0.3:
        time.sleep(0.01)
    clock(0.3)
    assert others.stop()[1] < 0.1


def test_the_work_of_own_processes_is_not_others(clock: Callable[[float], None], spinning: int) -> None:
    others, all_others = Others([spinning]), Others()
    time.sleep(0.5)
    used = sum(psutil.Process(spinning).cpu_times()[:2])
    clock(used)
    assert others.stop()[1] < all_others.stop()[1]


@pytest.mark.parametrize(("config", "others", "told"), [(TIMED, 1.0, True), (TIMED, 0.1, False), (UNTIMED, 1.0, False)])
def test_a_timed_run_on_a_busy_machine_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, object],
    others: float,
    told: bool,
) -> None:
    cores = os.cpu_count() or 1
    monkeypatch.setattr(Others, "stop", lambda self: (9.0, others * cores))
    with caplog.at_level(logging.WARNING):
        frame = runner.run(config, tmp_path / "run", executor="here")
    assert list(frame["status"]) == ["ok"]
    assert (f"other programs kept {others * cores:.1f} of {cores} cores busy in these 9 s" in caplog.text) is told
