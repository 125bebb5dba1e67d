"""The parent's side of one version's process: start it, ask it, and say what became of it."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.candidate.channel import BrokenMessage, Inbox, send
from harness.errors import BadInput
from harness.gate.versions import Version
from harness.gate.worker import PROTOCOL

WORKER = Path("harness", "gate", "worker.py")  # in each version's own tree
START_S = 120.0  # torch's import from a cold disk
CHUNK = 1 << 16
LAST_WORDS = 300


class Died(Exception):
    """It ended, hung or lost its pipe; the message says how, as far as is known."""


class Hung(Died):
    """It did not answer in time."""


class Refused(Exception):
    """It lives, but cannot do what it was asked for; the message is its own."""


class ProtocolError(BadInput):
    """It cannot be spoken to: it speaks no timing protocol, or another than this version."""

    def __init__(self, version: Version, number: object) -> None:
        spoken = "no timing protocol" if number is None else f"timing protocol {number}"
        super().__init__(
            f"{version.name} speaks {spoken}; this version speaks {PROTOCOL}: name a later commit with --base REV, or "
            "accept a baseline of this version (harness gate DIR --accept)"
        )


class Process:
    """One request at a time: `ask` blocks until the answer, the time limit or the end of the process."""

    def __init__(self, version: Version, *, threads: int, allowed: int | None, path: Sequence[str]) -> None:
        self._version = version
        worker = version.harness / WORKER
        if not worker.is_file():
            raise ProtocolError(version, None)
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._output, printed = os.pipe()
        try:
            command = [sys.executable, "-P", str(worker), str(version.harness), str(requests), str(answers)]
            self._process = subprocess.Popen(
                # -P: its folder holds a statistics.py, which would hide Python's own.
                [*command, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
                pass_fds=(requests, answers),
                # Equal in all: a hash seed changes the order of sets for as long as a process lives.
                env={**os.environ, "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        finally:
            for handle in (requests, answers, printed):
                os.close(handle)
        for handle in (self._answers, self._output):
            os.set_blocking(handle, False)
        self._inbox, self._said = Inbox(), bytearray()
        self._hello = {"protocol": PROTOCOL, "threads": threads, "allowed": allowed, "path": list(path)}

    def greet(self) -> None:
        """Waits until it is ready. Apart from the start, so that several start at once."""
        answer = self._answer(self._hello, START_S)
        if answer.get("protocol") != PROTOCOL:  # refused or not
            raise ProtocolError(self._version, answer.get("protocol"))
        _accepted(answer)

    def ask(self, do: str, timeout_s: float, **what: Any) -> dict[str, Any]:
        return _accepted(self._answer({"do": do, **what}, timeout_s))

    def _answer(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            send(self._requests, message)
        except BrokenPipeError:
            raise Died(self._end()) from None
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            readable, _, _ = select.select([self._answers, self._output], [], [], max(left, 0.0))
            if self._output in readable:
                self._listen()
            if self._answers in readable:
                data = os.read(self._answers, CHUNK)
                if not data:
                    raise Died(self._end())
                try:
                    for message in self._inbox.feed(data):
                        return message  # it answers once to each request
                except BrokenMessage as broken:
                    raise Died(f"sent a broken message: {broken}") from None
            elif left <= 0:
                raise Hung(f"no answer within {timeout_s:g} s")

    def _listen(self) -> None:
        """Keeps the end of what it prints, and only that."""
        try:
            data = os.read(self._output, CHUNK)
        except BlockingIOError:
            return
        if not data:  # closed: asked again it would be readable for ever
            os.close(self._output)
            self._output = os.open(os.devnull, os.O_RDONLY | os.O_NONBLOCK)
        self._said += data
        del self._said[:-CHUNK]

    def _end(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        self._listen()
        names = {number.value: number.name for number in signal.Signals}
        how = f"exit code {code}" if code >= 0 else f"killed by {names.get(-code, f'signal {-code}')}"
        words = " ".join(self._said.decode(errors="replace").split())
        return f"{how}; it said: {words[:LAST_WORDS]}" if words else how

    def kill(self) -> None:
        """With what it has started; may be called again."""
        if self._requests < 0:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for handle in (self._requests, self._answers, self._output):
            os.close(handle)
        self._requests = -1


def _accepted(answer: dict[str, Any]) -> dict[str, Any]:
    if "refused" in answer:
        raise Refused(answer["refused"])
    return answer
