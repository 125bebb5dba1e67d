"""A process of ours that runs others' code: start it, watch it, end it, and say what became of it."""

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

import harness
from harness.candidate.zygote import Forked, Zygote

LOOK_FOR_CHILDREN_S = 1.0  # it reads every process of the machine, some ms: too much for each look
VMSTAT = Path("/proc/vmstat")
CHUNK = 1 << 16
KEPT_OUTPUT = 1 << 16
LAST_WORDS = 2000
ABORT_S = 0.5  # for the traceback of one that hangs
PR_SET_PDEATHSIG = 1


def resident_since(pid: int) -> Callable[[], int]:
    """From now on: by how many bytes the process has grown at its largest, as the kernel of the machine counts it; 0
    where that does not say."""
    status = Path(f"/proc/{pid}/status")
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high water mark falls to what is held now
        before = _status(status, "VmRSS")
    except OSError:
        return lambda: 0
    return lambda: max(0, _status(status, "VmHWM") - before)


def _status(path: Path, name: str) -> int:
    """Bytes; raises OSError where the system does not say."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"{path} has no {name}")


def killed_for_memory() -> int:
    """How often the kernel has killed a process of this machine for want of memory; 0 where it does not say."""
    if not VMSTAT.exists():
        return 0
    return sum(int(line.split()[1]) for line in VMSTAT.read_text().splitlines() if line.startswith("oom_kill "))


class Gauge:
    """A process and its children: whether it lives, what they hold in memory, their end."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._children: list[psutil.Process] = []
        self._looked = time.monotonic()

    def read(self, limit: int) -> int:
        """Bytes. Beyond `limit` what several of them share is counted once: that takes long to see."""
        if time.monotonic() - self._looked > LOOK_FOR_CHILDREN_S:
            self.look()
        family = (self._process, *self._children)
        resident = sum(map(_resident, family))
        return resident if resident <= limit else sum(map(_proportional, family))

    def look(self) -> None:
        """For children. Those once seen stay known, even when their parent is gone."""
        self._looked = time.monotonic()
        with contextlib.suppress(psutil.Error):
            found = {*self._children, *self._process.children(recursive=True)}
            self._children = [child for child in found if child.is_running()]

    def leaves(self) -> list[int]:
        """Those of the children that have none themselves."""
        parents = set()
        for child in self._children:
            with contextlib.suppress(psutil.Error):
                parents.add(child.ppid())
        return [child.pid for child in self._children if child.pid not in parents]

    def kill_children(self) -> None:
        for child in self._children:
            with contextlib.suppress(psutil.Error):
                child.kill()  # psutil's, and not by the number alone: that may be another's by now

    def is_alive(self) -> bool:
        try:
            return bool(self._process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


def _proportional(process: psutil.Process) -> int:
    """Each page divided by how many processes have it: forks share most of theirs, and all share torch's files."""
    try:
        held = process.memory_full_info()
        return int(getattr(held, "pss", held.rss))
    except psutil.Error:
        return 0


class Child:
    """`output` is a handle to wait on; whoever waits calls `read_output`."""

    kind = "the kernel's process"

    def __init__(self, module: str, handles: Sequence[int], zygote: Zygote | None = None) -> None:
        """Runs `python -m module HANDLES… PID`, or a fork of the zygote; the handles are closed here."""
        self.output, printed = os.pipe()
        self.python_path = os.environ.get("PYTHONPATH")
        self._process: subprocess.Popen[bytes] | Forked
        try:
            if zygote is None:
                self._process = self._open(module, handles, printed)
            else:
                self._process = zygote.spawn(handles, printed)
        finally:
            for handle in (*handles, printed):
                os.close(handle)
        os.set_blocking(self.output, False)
        self._said, self._is_ended = bytearray(), False
        self._gauge = Gauge(self._process.pid)
        self._kills_before = killed_for_memory()
        self.started = time.monotonic()

    def _open(self, module: str, handles: Sequence[int], printed: int) -> "subprocess.Popen[bytes]":
        root = str(Path(harness.__file__).resolve().parent.parent)
        return subprocess.Popen(
            # -P: a user's folder may hold a queue.py. The module is found by PYTHONPATH, wherever harness lies.
            [sys.executable, "-P", "-m", module, *map(str, handles), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=tuple(handles),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, self.python_path)))},
            start_new_session=True,  # Ctrl-C in the terminal is the parent's business alone
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        # Not by poll(): that would reap it, and its pid and group might be another's by the time we kill them.
        return self._gauge.is_alive()

    def read_output(self) -> bool:
        """Keeps the end of what it prints, and only that. False when it has closed its output."""
        data = read_some(self.output)
        self._said += data or b""
        del self._said[:-KEPT_OUTPUT]
        return data != b""

    def memory(self, limit: int) -> int:
        return self._gauge.read(limit)

    def abort(self) -> None:
        """For one that hangs: SIGABRT makes it write down where, even in C code. Then the end.

        Where it waits for a kernel in a process of its own, that one is asked.
        """
        self._gauge.look()
        for pid in self._gauge.leaves() or [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        self._wait(ABORT_S)
        self.kill()

    def strike(self) -> None:
        """SIGKILL for it and all that it has started. Nothing else, so that a signal handler may call it anywhere."""
        if self._process.returncode is not None:
            return  # reaped: its pid may be another's by now
        self._gauge.look()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # also after its own end: the group lives on in what it started
        self._gauge.kill_children()  # those that made groups of their own

    def kill(self) -> None:
        """With all that it has started. Afterwards only what it said is left."""
        if self._is_ended:
            return
        self.strike()
        self._process.wait()
        for _ in range(KEPT_OUTPUT // CHUNK + 1):  # not for ever: a process that escaped may still write
            if not self.read_output():
                break
        os.close(self.output)
        self._is_ended = True

    def begin(self) -> None:
        """What it says and suffers from now on belongs to one question."""
        self._said.clear()
        self._kills_before = killed_for_memory()

    def death(self) -> tuple[str, str]:
        """Status and reason of one that ended by itself, or whose pipe did."""
        if not self._wait(ABORT_S):
            return "error", f"{self.kind} closed its pipe"
        self.strike()
        code = self._process.wait()
        if code >= 0:
            return "error", f"{self.kind} left with exit code {code}"
        known = {number.value: number.name for number in signal.Signals}
        if -code == signal.SIGKILL and killed_for_memory() > self._kills_before:
            return "oom", "killed by SIGKILL: the machine ran out of memory"
        return "error", f"killed by {known.get(-code, f'signal {-code}')}"

    def _wait(self, seconds: float) -> bool:
        """Whether it ends within that time; it is not reaped yet."""
        deadline = time.monotonic() + seconds
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self.is_alive

    def last_words(self) -> str:
        """The end of what it printed; of a crash's traceback the beginning, where the crash is."""
        text = self._said.decode(errors="replace")
        before, marker, trace = text.rpartition("Fatal Python error: ")
        if marker:
            trace = trace.partition("\nExtension modules: ")[0]
            text = before[-LAST_WORDS // 4 :] + "\n" + marker + trace[: LAST_WORDS * 3 // 4]
        lines = (re.sub(r"[^\S\n]+|[^\w\s!-~]", " ", line).strip() for line in text[-LAST_WORDS:].splitlines())
        return "; ".join(line for line in lines if line and not line.startswith('File "<frozen '))


def read_some(handle: int) -> bytes | None:
    """b"" at the end, None if there is nothing now."""
    try:
        return os.read(handle, CHUNK)
    except BlockingIOError:
        return None


# ---- in the process itself -------------------------------------------------------------------------------------------


def die_with_parent(parent: int) -> None:
    """Also while a kernel hangs in C code, where nothing of ours runs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def settle(path: Sequence[str], python_path: str | None) -> None:
    """Import what the parent can import, from where it would; and let last words out before a crash."""
    sys.path[:] = path
    os.environ.pop("PYTHONPATH", None)
    if python_path is not None:
        os.environ["PYTHONPATH"] = python_path
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]


def limit_memory(allowed: int) -> int:
    """So that one huge allocation fails inside, as an exception of that case alone. Gives what is already in use.

    RLIMIT_DATA and not RLIMIT_AS: it does not count mapped files and reserved addresses, of which torch has plenty.
    """
    import psutil

    used = psutil.Process().memory_info()
    files = getattr(used, "shared", 0)  # resident, but no data: it counts for the parent's look from outside
    if allowed > used.rss:
        resource.setrlimit(resource.RLIMIT_DATA, (allowed - files, resource.RLIM_INFINITY))
    return int(used.rss)


def mend_streams(output: int) -> list[str]:
    """Standard output and error as they were, should a kernel have closed or moved them."""
    for handle in (1, 2):
        try:
            is_same = os.path.sameopenfile(handle, output)
        except OSError:
            is_same = False
        if not is_same:
            os.dup2(output, handle)
    closed = sys.stdout.closed or sys.stderr.closed
    return ["closed standard streams"] if closed else []
