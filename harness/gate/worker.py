"""One version's process: builds cells and times calls of them, one request at a time, until its parent is gone.

Run by path, `python -P worker.py ROOT REQUESTS ANSWERS PARENT`, by whichever version is the head; `harness` itself is
ROOT's. So nothing may be used here but what an older version has too: Case, find_kernel, build_pair, timed_call.
"""

import ctypes
import dataclasses
import faulthandler
import gc
import json
import math
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
MOST_TOLD = 500  # characters of a reason
SHIFTS = 64  # pieces of memory taken before a cell is built, so that it lies elsewhere each time
SHIFT_BYTES = 1 << 16
PATIENCE = 3


def send(handle: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    left = memoryview(len(data).to_bytes(8, "big") + data)
    while left:
        left = left[os.write(handle, left) :]


def receive(handle: int) -> dict[str, Any] | None:
    """None when the other side is gone."""
    header = _exactly(handle, 8)
    body = None if header is None else _exactly(handle, int.from_bytes(header, "big"))
    return None if body is None else json.loads(body)


def _exactly(handle: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = os.read(handle, size - len(data))
        if not more:
            return None
        data += more
    return data


class Cell:
    """A case as it is built in this version; `calls` are its sides."""

    def __init__(self, fields: dict[str, Any], *, seed: int, shift: int) -> None:
        from harness.case import Case
        from harness.cell.build import build_pair
        from harness.cell.measure import timed_call
        from harness.kernels.front import find_kernel

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


def _case(kind: type, fields: dict[str, Any]) -> Any:
    """What this version does not know may be left out only where it says nothing."""
    known = {field.name for field in dataclasses.fields(kind)}
    strange = {name: value for name, value in fields.items() if name not in known and value is not None}
    if strange:
        raise LookupError(f"its cells have no {', '.join(sorted(strange))}")
    return kind(**{name: value for name, value in fields.items() if name in known})


def serve(requests: int, answers: int) -> None:
    cell: Cell | None = None
    while (message := receive(requests)) is not None:
        match message["do"]:
            case "build":
                cell = None
                gc.collect()
                try:
                    cell = Cell(**message["cell"])
                    answer: dict[str, Any] = {"built": True}
                except BaseException as failure:  # someone's unfinished code: whatever it raises is the reason
                    answer = {"refused": _told(failure)}
            case "time":
                assert cell is not None
                try:
                    answer = {"seconds": cell.time(**message["sample"])}
                except BaseException as failure:
                    answer = {"refused": _told(failure)}
        send(answers, answer)


def _told(failure: BaseException) -> str:
    try:
        text = f"{type(failure).__name__}: {failure}"
    except Exception:  # its own way to say it may raise too
        text = type(failure).__name__
    return text[:MOST_TOLD]


def settle(root: Path, hello: dict[str, Any]) -> None:
    """Threads, limits, and `harness` from ROOT and nowhere else."""
    sys.path[:] = [str(root), *hello["path"]]
    import torch

    import harness

    found = Path(harness.__file__ or "").resolve()
    if not found.is_relative_to(root):
        raise ImportError(f"harness came from {found}, not from {root}")
    try:  # all that a cell needs: a version that lacks some of it is told once, not in every cell
        from harness.case import Case  # noqa: F401
        from harness.cell.build import build_pair  # noqa: F401
        from harness.cell.measure import timed_call  # noqa: F401
        from harness.kernels.front import find_kernel  # noqa: F401
    except ImportError as error:
        raise ImportError(f"too old, or broken: {error}") from error
    torch.set_num_threads(hello["threads"])
    if hello["allowed"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (hello["allowed"], resource.RLIM_INFINITY))


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
    hello = receive(requests)
    if hello is None:
        return
    try:
        settle(root, hello)
    except BaseException as failure:
        send(answers, {"refused": _told(failure)})
        return
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection within a sample is noise; `build` collects
    send(answers, {"ready": os.getpid()})
    serve(requests, answers)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
