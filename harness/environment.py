"""Where a run happened: versions, machine, commit; and how busy others keep the machine meanwhile.

Numbers from unlike environments are not compared blindly, and those from a busy machine are not trusted blindly.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil

GIT_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Environment:
    """A version is None where the package is not installed; `commit` and `dirty` where there is no git tree."""

    python: str
    torch: str | None
    numpy: str | None
    pandas: str | None
    harness: str | None
    platform: str
    cpu: str
    cores: int
    threads: int
    memory_bytes: int
    commit: str | None
    dirty: bool | None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Environment":
        data = json.loads(text)
        known = [field.name for field in fields(cls)]
        if not isinstance(data, dict) or not {"python", "platform", "cpu"} <= data.keys():
            found = sorted(data) if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"not an environment: fields {found}, expected {sorted(known)}")
        # Of an older version: what it did not note is not known. Of a newer one: what is new is left out.
        noted: dict[str, Any] = {name: data.get(name) for name in known}
        return cls(**noted)

    def differences(self, other: "Environment") -> dict[str, tuple[object, object]]:
        """The keys that differ, with both values, so that a message can name them."""
        mine, theirs = asdict(self), asdict(other)
        return {key: (mine[key], theirs[key]) for key in mine if mine[key] != theirs[key]}


def collect(threads: int, *, tree: Path | None = None) -> Environment:
    """`tree` is where git is asked; by default the current folder, which holds the configs and kernels being run."""
    commit, dirty = _git_state(tree or Path.cwd())
    return Environment(
        python=platform.python_version(),
        torch=_version("torch"),
        numpy=_version("numpy"),
        pandas=_version("pandas"),
        harness=_version("attention-harness"),
        platform=platform.platform(),
        cpu=_cpu_model(),
        cores=os.cpu_count() or 1,
        threads=threads,
        memory_bytes=psutil.virtual_memory().total,
        commit=commit,
        dirty=dirty,
    )


def packages() -> dict[str, str]:
    """Everything that is installed, by name."""
    found = ((each.metadata["Name"], each.version) for each in importlib.metadata.distributions())
    return dict(sorted((name, version) for name, version in found if name))


def _version(distribution: str) -> str | None:
    # From the package's metadata: importing torch for its version would cost a second.
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    # platform.processor() is empty on many Linux systems; /proc knows the marketing name.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().lower() in ("model name", "hardware") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def _git_state(tree: Path) -> tuple[str | None, bool | None]:
    status = _git(tree, "status", "--porcelain")
    if status is None:
        return None, None
    # A tree without a first commit has a status but no HEAD.
    return _git(tree, "rev-parse", "--verify", "HEAD"), status != ""


def _git(tree: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=tree, capture_output=True, text=True, errors="replace", timeout=GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


class Others:
    """Cores' worth of time of all work on the machine but ours: this process, its children, and `own`.

    Another user's job, a browser, a neighbour: time that the host gave to other machines (steal) counts, too.
    """

    def __init__(self, own: Sequence[int] = ()) -> None:
        self._own = [psutil.Process(pid) for pid in own]
        self._wall, self._busy, self._before = time.perf_counter(), _busy(), self._used()

    def stop(self) -> tuple[float, float]:
        """The seconds since the start, and the cores."""
        seconds = time.perf_counter() - self._wall
        others = (_busy() - self._busy - (self._used() - self._before)) / seconds
        return seconds, max(0.0, others)

    def _used(self) -> float:
        mine = os.times()
        family = {*self._own, *psutil.Process().children(recursive=True)}
        return sum(mine[:4]) + sum(map(_seconds_of, family))


def waited(pids: Iterable[int]) -> float:
    """Seconds that the threads of these processes have stood in line for a processor that others had, so far.

    Linux alone tells; elsewhere 0, and how busy others were is all there is to go by.
    """
    nanoseconds = 0
    for pid in pids:
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
                    nanoseconds += int(file.read().split()[1])
            except OSError:  # it has just ended
                continue
    return nanoseconds / 1e9


def _seconds_of(process: psutil.Process) -> float:
    """Its own processor time and that of its finished children."""
    try:
        return float(sum(process.cpu_times()[:4]))
    except psutil.Error:  # it has just ended: then its time is among that of its parent's finished children
        return 0.0


def _busy() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
