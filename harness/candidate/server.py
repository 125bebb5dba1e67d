"""The kernel's own process: loads it, computes what it is asked, and knows nothing of what the answers are for.

Started as `python -m harness.candidate.server CHANNEL INPUTS OUTPUTS PARENT`: a socket, two arenas and the judge's pid.
Each message is answered once; see `Server`.
"""

import faulthandler
import gc
import io
import os
import pickle
import resource
import sys
from dataclasses import asdict
from typing import Any

import torch

from harness.candidate import state
from harness.candidate.channel import receive, send
from harness.candidate.child import die_with_parent, limit_memory, mend_streams, settle
from harness.candidate.compute import Function, failure_of
from harness.candidate.examinee import Held, shared_memory
from harness.candidate.patches import Patches
from harness.candidate.request import Failure, Request
from harness.candidate.wire import GUARD, Arena, Place, publish
from harness.errors import BadInput
from harness.kernels import plugin
from harness.kernels.call import Kernel
from harness.kernels.domain import domain_of
from harness.kernels.prefill import PrefillByEager

# What torch itself changes when it imports its parts, what an import may set for itself, and what takes long to see.
UNTOLD = ("warnings", state.BUSY_THREAD, *state.IMPORTS)


class Server:
    """Answers one message after another; `do` names the method."""

    def __init__(self, inputs: Arena, outputs: Arena, output: int) -> None:
        """`output` is a handle of its standard output, which the kernel cannot close."""
        self.inputs, self.outputs, self.output = inputs, outputs, output
        self.held, self.patches = Held(), Patches()
        self.function: Function | None = None
        self.kernel: Kernel | None = None
        self.subject: Any = None
        self._state = state.read_all()  # as it is between two calls; reading it takes half a millisecond

    def load(self, kernel: str | None) -> dict[str, Any]:
        """The kernel by name; None: this process computes the reference, and loads nobody's code."""
        if kernel is None:
            return {"origin": "harness", "domain": {}}
        try:
            with state.preserved(keep=state.IMPORTS):
                self.function, origin = plugin.find_kernel_function(kernel)
        except BadInput as refusal:
            return {"failure": asdict(Failure("error", str(refusal)))}
        except BaseException as error:
            return {"failure": asdict(Failure("error", f"{kernel}: importing it raised {plugin.told(error)}"))}
        self.kernel = plugin.from_function(self.function, kernel, shielded=False, origin=origin)
        return {"origin": origin, "domain": domain_of(self.function).as_json()}

    def ask(self, words: dict[str, Any], places: dict[str, Any], released: list[int]) -> dict[str, Any]:
        """A Request whose tensors lie in the arena of inputs; what was `released` is no longer held."""
        for ticket in released:
            self.held.release(ticket)
        tensors: dict[str, Any] = {}
        for name, fields in places.items():
            tensors[name] = Place.read(fields).tensor(self.inputs, guard=GUARD)
        along = [tensors.pop(name) for name in list(tensors) if name.startswith("direction ")]
        words |= {name: tuple(words[name]) for name in ("gradients", "tied")}
        request = Request(**words, **tensors, directions=tuple(along))
        assert self.function is not None
        try:
            results, number = self.held.compute(self.function, request)
            shares = shared_memory(results["out"], request)
            placed = publish(self.outputs, results)
        except BaseException as error:  # someone's unfinished code: whatever it raises is the answer
            return {"failure": asdict(failure_of(error)), "changed": self._put_back(request)}
        changed = self._put_back(request)
        return {"places": placed, "ticket": number, "shares": shares, "changed": changed}

    def reread(self, ticket: int) -> dict[str, Any]:
        return {"places": publish(self.outputs, {"out": self.held.reread(ticket)})}

    def differentiate(self, ticket: int, places: dict[str, Any]) -> dict[str, Any]:
        cotangent = Place.read(places["cotangent"]).tensor(self.inputs).clone()
        try:
            return {"places": publish(self.outputs, self.held.differentiate(ticket, cotangent))}
        except BaseException as error:
            return {"failure": asdict(failure_of(error))}

    def begin(self, threads: int) -> dict[str, Any]:
        """A new case: what the one before left behind is gone, or told as `left`: that ends with the process."""
        self.held, self.subject = Held(), None
        gc.collect()
        if left := [*state.changed(self._state, keep=UNTOLD[:1]), *mend_streams(self.output)]:
            return {"left": left}
        torch.set_num_threads(threads)
        self._state = state.read_all()
        return {}

    def look(self) -> dict[str, Any]:
        """What the kernel's code replaced in torch, numpy and time by now."""
        return {"patched": self.patches.found()}

    def install(self, place: dict[str, Any]) -> dict[str, Any]:
        """Whatever is to be timed, pickled by the judge around this process' own kernel."""
        data = Place.read(place).tensor(self.inputs).numpy().tobytes()
        try:
            kernel = self.kernel
            if kernel is not None and kernel.domain.decode_only:
                kernel = PrefillByEager(kernel).as_kernel()
            self.subject = _Unpickler(io.BytesIO(data), kernel).load()
            self.subject.warm_up()
        except BaseException as error:
            return {"failure": asdict(failure_of(error))}
        return {}

    def go(self, places: list[dict[str, Any]]) -> dict[str, Any]:
        """One timed call for each input. Every result is read to its last element before the answer leaves."""
        xs = [Place.read(fields).tensor(self.inputs, guard=GUARD) for fields in places]
        try:
            results = {}
            for index, x in enumerate(xs):
                for name, tensor in self.subject.call(x).items():
                    results[f"{index} {name}"] = tensor
            return {"places": publish(self.outputs, results)}
        except BaseException as error:
            return {"failure": asdict(failure_of(error))}

    def peak(self, place: dict[str, Any]) -> dict[str, Any]:
        """The most memory that one call held at once, by this process' own account."""
        return {"bytes": self.subject.peak_bytes(Place.read(place).tensor(self.inputs, guard=GUARD))}

    def _put_back(self, request: Request) -> list[str]:
        """Undoes what the call did to this process, and says what that was."""
        drawn = ("torch's RNG",) if request.dropout_p > 0 or request.seed is not None else ()
        changed = state.changed(self._state, keep=(*UNTOLD, *drawn))
        if changed or drawn:
            state.put_back(self._state, keep=state.IMPORTS)
        return changed


class _Unpickler(pickle.Unpickler):
    """The judge sends modules around its own end of the kernel; here they get the kernel itself."""

    def __init__(self, file: io.BytesIO, kernel: Kernel | None) -> None:
        super().__init__(file)
        self._kernel = kernel

    def persistent_load(self, pid: str) -> Any:
        return self._kernel


def serve(channel: int, inputs: Arena, outputs: Arena) -> None:
    hello = receive(channel)
    if hello is None:
        return
    settle(hello["path"], hello["python_path"])
    output, me = os.dup(1), os.getpid()
    if hello["allowed"] is not None:
        limit_memory(hello["allowed"])
    server = Server(inputs, outputs, output)
    faulthandler.enable(output, all_threads=False)  # `output` stays, even if a kernel closes the standard streams
    while (message := receive(channel)) is not None:
        do, number = message.pop("do"), message.pop("number")
        try:
            answer = getattr(server, do)(**message)
        except BaseException as error:
            answer = {"failure": asdict(failure_of(error))}
        if os.getpid() != me:
            os._exit(1)  # a child that the kernel forked and let return: the answer is its parent's to give
        mend_streams(output)
        send(channel, {**answer, "number": number})


def run(channel: int, inputs: int, outputs: int, parent: int) -> None:
    """All that this process does: to its end."""
    die_with_parent(parent)
    for handle in (channel, inputs, outputs):
        os.set_inheritable(handle, False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected, its gigabytes on disk are not
    serve(channel, Arena(inputs), Arena(outputs))
    sys.stdout.flush()
    os._exit(0)  # not held up by threads and exit handlers of others


if __name__ == "__main__":
    run(*map(int, sys.argv[1:]))
