"""Ctrl-C while workers run: the first lets the running cases finish, a second (or SIGTERM) stops at once."""

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

CALM = "\nstopping after the running case; Ctrl-C again stops at once"
HASTY = "\nstopping at once: SIGTERM"


class Terminated(KeyboardInterrupt):
    """SIGTERM (or, in the gate, SIGHUP) instead of Ctrl-C."""


class Interrupts:
    """Only flags are set when a signal arrives: a record that is being written is written to its end."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike
        self._before: dict[int, Any] = {}
        self._is_announced = False
        self.no_more = False
        self.at_once = False
        self.is_terminated = False

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.getsignal(number)
                # None: not Python's to put back. Ignored: whoever started us (nohup) wants it so.
                if before not in (None, signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *failure: object) -> None:
        self._put_back()

    def announce(self) -> None:
        """Not from the handler: the interrupted code may be in the middle of a line on the same stream."""
        if self.no_more and not self._is_announced:
            self._is_announced = True
            print(HASTY if self.is_terminated else CALM, file=sys.stderr, flush=True)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.is_terminated |= number == signal.SIGTERM
        if self.is_terminated or self.no_more:
            self.at_once = True
            self._strike()
            self._put_back()  # a third Ctrl-C is Python's own
        self.no_more = True

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
