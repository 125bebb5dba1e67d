"""A process that has imported torch and nobody's code: each kernel's process is a fork of it, there in milliseconds.

It is itself forked from a worker, before torch has started a thread there: after that, a fork may hang for ever in its
first parallel loop. Between the two go one byte and some handles, or a process id, and back a number of 8 bytes.
"""

import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence

FORK, ASK = b"F", b"A"
ALIVE = -(1 << 32)  # no exit code
NUMBER = 8
POLL_S = 2e-3


class Zygote:
    """The worker's end of it."""

    def __init__(self) -> None:
        """Forks here and now: to be made before torch computes anything."""
        self._channel, theirs = socket.socketpair()
        parent = os.getpid()
        gc.freeze()  # what is imported stays: no page of it need be copied for the collector's sake
        self._pid = os.fork()
        if self._pid == 0:
            try:
                serve(theirs, parent)
            finally:
                os._exit(1)
        theirs.close()

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(self, *_: object) -> None:
        """It ends when nobody asks it any more; what it forked is the kernels' processes' own affair."""
        self._channel.close()
        os.waitpid(self._pid, 0)

    def spawn(self, handles: Sequence[int], printed: int) -> "Forked":
        """A kernel's process with these handles, its standard streams going to `printed`."""
        socket.send_fds(self._channel, [FORK], [*handles, printed])
        return Forked(self, self._number())

    def exit_code(self, pid: int) -> int | None:
        """As subprocess has it, negative for a signal; None while it lives."""
        self._channel.sendall(ASK + pid.to_bytes(NUMBER, "big", signed=True))
        code = self._number()
        return None if code == ALIVE else code

    def _number(self) -> int:
        data = self._channel.recv(NUMBER, socket.MSG_WAITALL)
        if len(data) < NUMBER:
            raise OSError("the process that forks kernels' processes is gone")
        return int.from_bytes(data, "big", signed=True)


class Forked:
    """What a `Child` needs of subprocess.Popen."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid, self._zygote = pid, zygote
        self.returncode: int | None = None

    def wait(self) -> int:
        while self.returncode is None:
            self.returncode = self._zygote.exit_code(self.pid)
            if self.returncode is None:
                time.sleep(POLL_S)
        return self.returncode


def serve(channel: socket.socket, parent: int) -> None:
    """In the zygote: forks and tells exit codes, until the worker is gone."""
    from harness.candidate.child import die_with_parent

    die_with_parent(parent)
    me, own = os.getpid(), channel.fileno()
    os.closerange(3, own)  # a kernel must not inherit the worker's pipes
    os.closerange(own + 1, os.sysconf("SC_OPEN_MAX"))
    codes: dict[int, int] = {}
    while True:
        data, handles, _, _ = socket.recv_fds(channel, 1 + NUMBER, 8)
        if not data:
            os._exit(0)
        if data[:1] == FORK:
            pid = os.fork()
            if pid == 0:
                channel.close()
                _become_kernel(handles, me)
            for handle in handles:
                os.close(handle)
            channel.sendall(pid.to_bytes(NUMBER, "big", signed=True))
        else:
            pid = int.from_bytes(data[1:], "big", signed=True)
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
            channel.sendall(codes.get(pid, ALIVE).to_bytes(NUMBER, "big", signed=True))


def _become_kernel(handles: Sequence[int], parent: int) -> None:
    from harness.candidate.server import run

    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        channel, inputs, outputs, printed = handles
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.close(printed)
        # Of their own: those that were there may stand for a file, whose place in it a pipe has not.
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        run(channel, inputs, outputs, parent)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)
