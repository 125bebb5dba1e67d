"""One version's process: builds cells and times calls of them, one request at a time, until its parent is gone.

Run by path from its own tree, `python -P ROOT/harness/gate/worker.py ROOT REQUESTS ANSWERS PARENT`: the two numbers are
handles to read from and to write to, PARENT is a process id. Nothing but these messages passes between versions, each a
length of 8 bytes and then JSON (harness/candidate/channel.py), and each answered once:

    {"protocol": 1, "threads": 2, "allowed": BYTES or null, "path": [...]}  hello: -> {"ready": PID, "protocol": 1}
    {"do": "build", "cell": {"fields": {...}, "seed": 0, "shift": 7}}       a Case's fields: -> {"built": true}
    {"do": "sources", "kernel": "mine.py:f"}       the user's own files of it: -> {"files": [...]}
    {"do": "time", "sample": {"side": "candidate", "calls": 6, "warm": 1}}  or "reference": -> {"seconds": 0.001}

What cannot be done is answered by {"refused": "ValueError: why"}, a hello by that with "protocol" as well. A hello and
its answer have "protocol" in every version to come: where the numbers differ, the versions cannot be timed together.
PROTOCOL changes with any of this, but for a new field of a Case: while it is null, older workers leave it out.
"""

import ctypes
import dataclasses
import faulthandler
import gc
import math
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

PROTOCOL = 1
PR_SET_PDEATHSIG = 1
MOST_TOLD = 500  # characters of a reason
SHIFTS = 64  # pieces of memory taken before a cell is built, so that it lies elsewhere each time
SHIFT_BYTES = 1 << 16
PATIENCE = 3


class TimedCell:
    """A case as it is built in this version; `calls` are its sides."""

    def __init__(self, fields: dict[str, Any], *, seed: int, shift: int) -> None:
        Case, find_kernel, build_pair, timed_call = cell_tools()
        case = _case(Case, fields)
        # Two builds one after the other get the same addresses from the allocator: not so with holes between.
        chance = random.Random(shift)
        self._shifts = [bytearray(chance.randrange(16, SHIFT_BYTES)) for _ in range(chance.randrange(SHIFTS))]
        pair = build_pair(case, find_kernel(case.kernel), case.seed(seed))
        pair.watch.checking = False
        # Both in every process, though the reference is timed in one: else they would not be alike.
        sides = {"candidate": pair.candidate, "reference": pair.reference}
        self.calls = {name: timed_call(pair, side, case.seed(seed)) for name, side in sides.items()}
        for call in self.calls.values():
            call()

    def time(self, side: str, calls: int, *, warm: int) -> float:
        """Seconds of the shortest of some calls.

        The shortest: a busy neighbour lengthens some calls, but hardly all in a row. A call that the scheduler
        interrupted tells how busy the machine is and is made again, up to PATIENCE times as many.
        """
        call, clock, usage, us = self.calls[side], time.perf_counter, resource.getrusage, resource.RUSAGE_SELF
        for _ in range(warm):
            call()
        shortest = shortest_disturbed = math.inf
        for _ in range(PATIENCE * calls):
            before = usage(us).ru_nivcsw
            start = clock()
            call()
            seconds = clock() - start
            if usage(us).ru_nivcsw == before:
                shortest = min(shortest, seconds)
                calls -= 1
                if not calls:
                    break
            else:
                shortest_disturbed = min(shortest_disturbed, seconds)
        return shortest if shortest < math.inf else shortest_disturbed


def cell_tools() -> tuple[Any, Any, Any, Any]:
    """What a cell is built and called with. In a function: torch takes seconds, and the parent imports this module."""
    from harness.case import Case
    from harness.cell.build import build_pair
    from harness.cell.measure import timed_call
    from harness.kernels.front import find_kernel

    return Case, find_kernel, build_pair, timed_call


def _case(kind: type, fields: dict[str, Any]) -> Any:
    """A field that this version does not know may be left out only where it says nothing."""
    known = {field.name for field in dataclasses.fields(kind)}
    strange = {name: value for name, value in fields.items() if name not in known and value is not None}
    if strange:
        raise LookupError(f"its cells have no {', '.join(sorted(strange))}")
    return kind(**{name: value for name, value in fields.items() if name in known})


class Server:
    """Answers one request after another; the cell that was built last is the one that is timed."""

    def __init__(self) -> None:
        self.cell: TimedCell | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if request["do"] == "build":
                self.cell = None
                gc.collect()
                self.cell = TimedCell(**request["cell"])
                return {"built": True}
            if request["do"] == "sources":
                return {"files": _files_of(request["kernel"])}
            assert self.cell is not None, "nothing is built"
            return {"seconds": self.cell.time(**request["sample"])}
        except BaseException as failure:  # someone's unfinished code: whatever it raises is the reason
            return {"refused": _reason(failure)}


def _files_of(kernel: str) -> list[str]:
    """Of the user's own code that the kernel is, the kernel's own file first; it is loaded for that."""
    from harness.kernels.front import find_kernel
    from harness.kernels.sources import is_local, sources_of

    find_kernel(kernel)
    loaded = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    files = [str(each.path.resolve()) for each in sources_of(kernel)]
    own = (file for file in loaded if file and os.path.isabs(file) and is_local(Path(file)))  # torch has relative ones
    return [*files, *(file for file in own if file not in files)]


def _reason(failure: BaseException) -> str:
    try:
        text = f"{type(failure).__name__}: {failure}"
    except Exception:  # its own way to say it may raise too
        text = type(failure).__name__
    return text[:MOST_TOLD]


def answer_hello(root: Path, hello: dict[str, Any]) -> dict[str, Any]:
    """Sets threads, limits and the rest of the path; nothing but its number is read of a hello of another protocol."""
    try:
        if hello.get("protocol") != PROTOCOL:
            raise LookupError(f"timing protocol {hello.get('protocol')}, where this version speaks {PROTOCOL}")
        sys.path[:] = [str(root), *hello["path"]]
        import torch

        import harness

        if not (found := Path(harness.__file__ or "").resolve()).is_relative_to(root):
            raise ImportError(f"harness came from {found}, not from {root}")
        cell_tools()  # a version that is broken is told of once, not in every cell
        torch.set_num_threads(hello["threads"])
        if hello["allowed"] is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (hello["allowed"], resource.RLIM_INFINITY))
    except BaseException as failure:
        return {"refused": _reason(failure), "protocol": PROTOCOL}
    return {"ready": os.getpid(), "protocol": PROTOCOL}


def main() -> None:
    root, (requests, answers, parent) = Path(sys.argv[1]).resolve(), map(int, sys.argv[2:])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is the parent's business
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    for handle in (requests, answers):
        os.set_inheritable(handle, False)
    sys.path.insert(0, str(root))
    try:
        from harness.candidate.channel import receive, send
    except BaseException as failure:  # no way to answer: the parent shows what is printed
        sys.exit(_reason(failure))
    hello = receive(requests)
    if hello is None:
        return
    greeting = answer_hello(root, hello)
    if "ready" in greeting:
        gc.collect()
        gc.freeze()
        gc.disable()  # a collection within a sample is noise; `build` collects
    send(answers, greeting)
    server = Server()
    while "ready" in greeting and (request := receive(requests)) is not None:
        send(answers, server.answer(request))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
