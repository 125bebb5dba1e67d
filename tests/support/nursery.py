"""Python processes that need not import torch: forks of one that has, each there in milliseconds instead of seconds.

In a test process `popen` takes the place of subprocess.Popen where the harness starts processes of its own. All else is
as it would be: arguments, environment, folder, handles and session are the caller's, the process is this one's child,
and it imports harness for itself. Run as a script this file is the process that is forked.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NUMBER = 8
POLL_S = 1e-3
# Read when an interpreter or a library starts: a process that differs in these is started afresh.
AT_START = ("OMP_", "MKL_", "GOMP_", "KMP_", "OPENBLAS_", "TORCH", "PYTORCH_", "PYTHON", "LD_", "MALLOC_", "CUDA_")
SET_LATER = ("PYTHONPATH", "PYTHONHASHSEED")  # by the fork for itself; and all forks have one hash seed
# What torch imports at its first use as a worker uses it; pandas and the like are not for every process.
IMPORTS = ("torch", "torch._dynamo", "numpy.random", "psutil", "pydantic", "pydantic.dataclasses", "yaml", "statistics")


class Nursery:
    """This process' end of it."""

    def __init__(self) -> None:
        self.channel, theirs = socket.socketpair()
        with theirs:
            handle = theirs.fileno()
            self._environment = dict(os.environ)
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(handle), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # as the forks' streams are pipes: a file could be sought in
                stderr=subprocess.STDOUT,
                pass_fds=[handle],
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                cwd="/",
                start_new_session=True,
            )
        atexit.register(self.close)

    def close(self) -> None:
        self.channel.close()
        self._process.communicate()

    def serves(self, environment: Mapping[str, str]) -> bool:
        def early(all_of: Mapping[str, str]) -> dict[str, str]:
            return {n: value for n, value in all_of.items() if n.startswith(AT_START) and n not in SET_LATER}

        return early(environment) == early(self._environment)

    def fork(self, request: Mapping[str, object], handles: Sequence[int]) -> int:
        """Its pid: a child of this process, as the one in between leaves at once and orphans come to us."""
        letter = os.memfd_create("request")
        try:
            os.write(letter, json.dumps(request).encode())
            _prctl(PR_SET_CHILD_SUBREAPER, 1)
            socket.send_fds(self.channel, [b"F"], [letter, *handles])
            answer = self.channel.recv(NUMBER, socket.MSG_WAITALL)
        finally:
            _prctl(PR_SET_CHILD_SUBREAPER, 0)
            os.close(letter)
        if len(answer) < NUMBER:
            said, _ = self._process.communicate()
            raise OSError(f"the process that has torch imported is gone: {said.decode()}")
        return int.from_bytes(answer, "big")


class Started:
    """What the harness asks of a subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            time.sleep(POLL_S)
        return code


_NURSERY: list[Nursery] = []  # one for each process of the tests, made when it is first asked for


def popen(
    command: Sequence[str],
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int],
    env: Mapping[str, str],
    start_new_session: bool,
) -> "Started | subprocess.Popen[bytes]":
    """`python -P -m MODULE WORDS...` or `python -P SCRIPT WORDS...`."""
    if not _NURSERY:
        _NURSERY.append(Nursery())
    assert stdin == subprocess.DEVNULL and start_new_session
    assert list(command[:2]) == [sys.executable, "-P"]
    if not _NURSERY[0].serves(env):
        return subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds, env=env, start_new_session=True
        )
    request = {"words": command[2:], "cwd": os.getcwd(), "environment": dict(env), "numbers": [1, 2, *pass_fds],
               "parent": os.getpid()}  # fmt: skip
    return Started(_NURSERY[0].fork(request, [stdout, stderr, *pass_fds]))


SUBPROCESS = SimpleNamespace(**vars(subprocess) | {"Popen": popen})  # in the place of the module


# ---- in the process that is forked -----------------------------------------------------------------------------------


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def serve(channel: socket.socket) -> list[str] | None:
    """Returns in each fork what to run; None at the end, when the tests are over."""
    while True:
        data, handles, _, _ = socket.recv_fds(channel, 1, 64)
        if not data:
            return None
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(writer, pid.to_bytes(NUMBER, "big"))
                os._exit(0)
            channel.detach()  # its number may be one of the handles'
            return _become(handles)
        for handle in (*handles, writer):
            os.close(handle)
        os.waitpid(between, 0)  # from here on the fork is the child of whoever asked
        channel.sendall(os.read(reader, NUMBER))
        os.close(reader)


def _become(handles: list[int]) -> list[str]:
    letter, *given = handles
    with open(letter) as file:
        file.seek(0)
        request = json.load(file)
    os.setsid()
    numbers = request["numbers"]
    high = 1 + max(*numbers, *given)
    copies = range(high, high + len(given))
    for handle, copy in zip(given, copies, strict=True):  # none may lie where another is to go
        os.dup2(handle, copy)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
    for first, last in zip([2, *sorted(numbers[2:])], [*sorted(numbers[2:]), os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(first + 1, last)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    while os.getppid() != request["parent"]:
        time.sleep(POLL_S)
    words: list[str] = request["words"]
    return words


def main() -> None:
    handle, parent = map(int, sys.argv[1:])
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    gc.disable()
    for name in IMPORTS:
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # no page of it need be copied for the collector's sake
    words = serve(socket.socket(fileno=handle))
    if words is None:
        return
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        runpy.run_path(str(Path(words[0])), run_name="__main__")


if __name__ == "__main__":
    main()
