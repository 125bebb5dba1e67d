"""The judge's end of a kernel in a process of its own: an Examinee, restarted after a crash."""

import contextlib
import io
import logging
import os
import pickle
import select
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from harness.candidate.channel import BrokenMessage, Inbox, pack
from harness.candidate.child import Child, resident_since
from harness.candidate.request import Failure, Reply, Request
from harness.candidate.wire import Arena, BrokenLayout, Place, collect, lay_out, put, spoilt
from harness.candidate.zygote import Zygote
from harness.kernels.call import Kernel
from harness.kernels.domain import Domain
from harness.kernels.plugin import PluginError
from harness.text import plain

log = logging.getLogger(__name__)
P = TypeVar("P")
R = TypeVar("R")

START_S = 120.0
CHUNK = 1 << 16
UNTOLD_BYTES = 64 << 20  # by which a process may grow in a call beyond what it says: code, the events of a profiler
SERVER = "harness.candidate.server"


class Died(Exception):
    """The kernel's process ended, or was ended because it did not answer; `kind` is that of a Failure."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Broken(Exception):
    """The kernel's process sent what ours would not send."""


class Process:
    """One kernel, `file.py:function` or `module:function`; None: no kernel, for a reference beside it.

    `allowed` bytes of memory, `timeout_s` for each answer; `echo`: what it said last goes to this process' own stderr
    when it dies, for whoever watches this one; `zygote`: what it is forked from, if there is one.
    """

    def __init__(
        self,
        kernel: str | None,
        *,
        allowed: int | None = None,
        timeout_s: float | None = None,
        echo: bool = False,
        zygote: Zygote | None = None,
    ) -> None:
        self.name = kernel or "reference"
        self._kernel, self._allowed, self._timeout_s, self._echo = kernel, allowed, timeout_s, echo
        self._zygote = zygote
        self._running: _Running | None = None
        self.served = self.cases = 0  # questions and cases since it was started
        self.origin, self.domain = "", Domain()
        self._released: list[int] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Process":
        return self  # a copied module asks the same process

    def start(self) -> None:
        """Loads the kernel. PluginError if that cannot be done."""
        if self._running is not None:
            return
        self._running, self._released = _Running(self._allowed, self._zygote), []
        self.served = self.cases = 0
        try:
            answer = self._exchange("load", timeout_s=START_S, kernel=self._kernel)
        except (Died, Broken) as failure:
            raise PluginError(f"{self.name}: importing it failed: {failure}") from failure
        if "failure" in answer:
            self.stop()
            raise PluginError(plain(answer["failure"].get("message")))  # its own words
        self.origin, self.domain = str(answer["origin"]), Domain.from_json(answer["domain"])

    def stop(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None

    @property
    def is_fresh(self) -> bool:
        """It has worked for no case yet."""
        return self.cases == 0

    @property
    def is_dead(self) -> bool:
        return self._running is None

    @property
    def pid(self) -> int:
        return self._running_now.child.pid

    def begin(self, threads: int) -> None:
        """A new case: what is held is forgotten."""
        self.start()
        if left := _words(self._exchange("begin", threads=threads), "left"):
            log.info("%s starts anew, because %s could not be put back", self.name, " and ".join(left))
            self.stop()
            self.start()
            self._exchange("begin", threads=threads)
        self.cases += 1

    def patched(self) -> tuple[str, ...]:
        """What the kernel's code replaced in torch, numpy or time, by dotted name; nothing once it is dead."""
        if self._running is None:
            return ()
        try:
            return _words(self._exchange("look"), "patched")
        except (Died, Broken):
            return ()

    def ask(self, request: Request) -> Reply:
        return self.post(request)()

    def post(self, request: Request) -> Callable[[], Reply]:
        """Asks; what it gives waits for the answer, so that both processes can work at once."""
        try:
            self.start()
            assert self._running is not None
            tensors = dict(request.tensors)
            tensors |= {} if request.cotangent is None else {"cotangent": request.cotangent}
            tensors |= {f"direction {i}": t for i, t in enumerate(request.directions)}
            region = self._running.place(tensors)
            released, self._released = self._released, []
            answer = self._post("ask", words=request.words, places=region.places, released=released)
        except Died as death:
            reply = Reply(failure=Failure(death.kind, str(death)))
            return lambda: reply
        return lambda: self._reply(request, region, released, answer)

    def _reply(
        self, request: Request, region: "Region", released: list[int], wait: Callable[[], dict[str, Any]]
    ) -> Reply:
        try:
            answer = wait()
            assert self._running is not None
            written = tuple(name for name in region.spoilt() if name in request.tensors)
            if "failure" in answer:
                return Reply(failure=_failure(answer), written=written, changed=_words(answer, "changed"))
            ticket = answer.get("ticket") if request.hold else None
            if request.hold and type(ticket) is not int:
                raise Broken(f"ticket {ticket!r:.20}")
            for each in released:
                self._running.taken.pop(each, None)
            if ticket is not None:
                self._running.taken[ticket] = (region.start, region.end)
            return Reply(
                tensors=collect(self._running.outputs, answer.get("places")),
                written=written,
                shares=_words(answer, "shares"),
                changed=_words(answer, "changed"),
                ticket=ticket,
            )
        except Died as death:
            return Reply(failure=Failure(death.kind, str(death)))
        except (Broken, BrokenLayout) as broken:
            self.stop()
            return Reply(failure=Failure("contract", f"its process sent a broken answer: {broken}"))

    def reread(self, ticket: int) -> Tensor:
        return self._collected("reread", ticket=ticket)["out"]

    def differentiate(self, ticket: int, cotangent: Tensor) -> dict[str, Tensor] | Failure:
        try:
            assert self._running is not None
            region = self._running.place({"cotangent": cotangent})
            answer = self._exchange("differentiate", ticket=ticket, places=region.places)
            if "failure" in answer:
                return _failure(answer)
            return collect(self._running.outputs, answer.get("places"))
        except Died as death:
            return Failure(death.kind, str(death))
        except (Broken, BrokenLayout) as broken:
            self.stop()
            return Failure("contract", f"its process sent a broken answer: {broken}")

    def release(self, ticket: int) -> None:
        """Told with the next question: a collected graph may call this in the middle of another."""
        self._released.append(ticket)

    # ---- what is timed: a whole module around the kernel, called by this process' clock -----------------------------

    def install(self, subject: object) -> None:
        """Sends it pickled, every Kernel in it replaced by the process' own. Raises as `failed` does."""
        self.start()
        assert self._running is not None
        file = io.BytesIO()
        _Pickler(file).dump(subject)
        region = self._running.place({"data": torch.frombuffer(file.getbuffer(), dtype=torch.uint8)})
        answer = self._exchange("install", place=region.places["data"])
        if "failure" in answer:
            raise_failure(_failure(answer))

    def go(self, xs: list[Tensor]) -> tuple[float, dict[str, Tensor]]:
        """One call of the installed subject for each input: seconds by this process' clock, and all results."""
        assert self._running is not None
        places = list(self._running.place({str(i): x for i, x in enumerate(xs)}).places.values())
        start = time.perf_counter()
        answer = self._exchange("go", places=places)
        seconds = time.perf_counter() - start
        if "failure" in answer:
            raise_failure(_failure(answer))
        return seconds, collect(self._running.outputs, answer.get("places"))

    def peak(self, x: Tensor) -> int:
        """The most that one call held at once: what torch took, by the process' own count, which is exact; where the
        process grew by far more, as seen from here, that: not all memory is torch's, nor every count true."""
        assert self._running is not None
        place = self._running.place({"x": x}).places["x"]
        grown = resident_since(self._running.child.pid)
        told = int(self._exchange("peak", place=place)["bytes"])
        return max(told, seen) if (seen := grown()) > 2 * told + UNTOLD_BYTES else told

    def _collected(self, do: str, **message: Any) -> dict[str, Tensor]:
        assert self._running is not None
        answer = self._exchange(do, **message)
        if "failure" in answer:
            raise_failure(_failure(answer))
        return collect(self._running.outputs, answer.get("places"))

    def _exchange(self, do: str, *, timeout_s: float | None = None, **message: Any) -> dict[str, Any]:
        return self._post(do, timeout_s=timeout_s, **message)()

    def _post(self, do: str, *, timeout_s: float | None = None, **message: Any) -> Callable[[], dict[str, Any]]:
        """Sends one message; what it gives waits for the answer to it."""
        self.served += 1
        wait = self._told_of_death(self._running_now.post, {"do": do, "number": self.served, **message})
        return lambda: self._told_of_death(wait, timeout_s or self._timeout_s)

    @property
    def _running_now(self) -> "_Running":
        assert self._running is not None
        return self._running

    def _told_of_death(self, part: Callable[[P], R], argument: P) -> R:
        """Ends with the process, if that is what happens."""
        try:
            return part(argument)
        except (Died, Broken) as failure:
            if self._echo:
                print(self._running_now.child.last_words(), file=sys.stderr, flush=True)
            self.stop()
            raise failure


class _Running:
    """The process while it lives: its channel, its arenas, and which part of the inputs' arena is taken."""

    def __init__(self, allowed: int | None, zygote: Zygote | None) -> None:
        self.inputs, self.outputs = Arena.make(), Arena.make()
        ours, theirs = socket.socketpair()
        copies = [os.dup(arena.handle) for arena in (self.inputs, self.outputs)]
        handles = (theirs.detach(), *copies)
        for handle in handles:
            os.set_inheritable(handle, True)
        self.child = Child(SERVER, handles, zygote)
        self._channel, self._inbox = ours, Inbox()
        self.taken: dict[int, tuple[int, int]] = {}  # ticket -> its part of the inputs' arena
        self.end = weakref.finalize(self, _end, self.child, ours, self.inputs, self.outputs)  # also if nobody says so
        hello = {"path": sys.path, "python_path": self.child.python_path, "allowed": allowed}
        with contextlib.suppress(OSError):  # already dead: the first exchange will see
            self._channel.sendall(pack(hello))

    def place(self, tensors: Mapping[str, Tensor]) -> "Region":
        """Puts them where no held input lies."""
        start = 0
        while True:
            laid, end = lay_out(tensors, start)
            blocking = [stop for first, stop in self.taken.values() if first < end and start < stop]
            if not blocking:
                break
            start = max(blocking)
        put(self.inputs, tensors, laid, start, end)
        return Region(self.inputs, tensors, laid, start, end)

    def post(self, message: dict[str, Any]) -> Callable[[float | None], dict[str, Any]]:
        """Sends it; what it gives waits for the answer to it, and to no other, for so many seconds at most."""
        self.child.begin()
        try:
            self._channel.sendall(pack(message))
        except OSError:
            raise self._death() from None
        return partial(self._wait, message["number"])

    def _wait(self, number: int, timeout_s: float | None) -> dict[str, Any]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            answer = self._answer(deadline)
        except TimeoutError:
            self.child.abort()
            raise Died("timeout", f"no answer within {timeout_s:g} s; last words: {self.child.last_words()}") from None
        except (OSError, EOFError):
            raise self._death() from None
        except BrokenMessage as broken:
            raise Broken(str(broken)) from None
        if answer.get("number") != number:
            raise Broken(f"an answer to {answer.get('number')!r:.20} instead of {number}")
        return answer

    def _death(self) -> Died:
        kind, reason = self.child.death()
        said = f"; last words: {words}" if (words := self.child.last_words()) else ""
        return Died("oom" if kind == "oom" else "died", f"{reason}{said}")

    def _answer(self, deadline: float | None) -> dict[str, Any]:
        watched = [self._channel.fileno(), self.child.output]
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select(watched, (), (), left)
            if not ready:
                raise TimeoutError
            if self.child.output in ready and not self.child.read_output():
                watched = watched[:1]
            if self._channel.fileno() in ready:
                data = self._channel.recv(CHUNK)
                if not data:
                    raise EOFError
                messages = list(self._inbox.feed(data))
                if len(messages) > 1:
                    raise Broken(f"{len(messages)} answers to one question")
                if messages:
                    return messages[0]


def _end(child: Child, channel: socket.socket, *arenas: Arena) -> None:
    child.kill()
    channel.close()
    for arena in arenas:
        arena.close()


@dataclass(frozen=True)
class Region:
    """Inputs of one question where they lie."""

    arena: Arena
    tensors: Mapping[str, Tensor]
    laid: Mapping[str, Place]
    start: int
    end: int

    @property
    def places(self) -> dict[str, dict[str, Any]]:
        return {name: vars(place) for name, place in self.laid.items()}

    def spoilt(self) -> list[str]:
        return spoilt(self.arena, self.tensors, self.laid, self.start, self.end)


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> str | None:
        return "kernel" if isinstance(value, Kernel) else None


def _failure(answer: dict[str, Any]) -> Failure:
    fields = answer["failure"]
    kinds = ("refused", "contract", "oom", "error")
    if not (isinstance(fields, dict) and fields.get("kind") in kinds and isinstance(fields.get("message"), str)):
        raise Broken(f"no failure: {fields!r:.200}")
    return Failure(fields["kind"], fields["message"])


def _words(answer: dict[str, Any], key: str) -> tuple[str, ...]:
    values = answer.get(key, [])
    if not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        raise Broken(f"{key}: {values!r:.200}")
    return tuple(values)


def raise_failure(failure: Failure) -> None:
    """As the exception that the rest of harness knows it by."""
    from harness.candidate.isolated import exception_of

    raise exception_of(failure)
