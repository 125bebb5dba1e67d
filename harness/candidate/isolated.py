"""A user's kernel in a process of its own, as a Kernel like any other: modules, swaps and checks do not notice."""

import atexit
import weakref
from typing import Any

import torch
from torch import Tensor

from harness.candidate.client import Process
from harness.candidate.request import DIFFERENTIABLE, Failure, Reply, Request
from harness.candidate.zygote import Zygote
from harness.kernels.call import AttentionCall, ContractBroken, Kernel, Unsupported
from harness.kernels.front import AnyKernel, find_kernel
from harness.kernels.names import is_plugin
from harness.kernels.plugin import file_digest, sdpa_arguments

MOST_ALIVE = 8  # processes at once
SHARE_BYTES = 1 << 30  # one for each of these that may be used


class KernelFailed(RuntimeError):
    """What the kernel raised in its process, in words that already say where."""


class KernelDied(KernelFailed):
    """Its process ended: by a signal, by its own exit, or because it did not answer."""


def exception_of(failure: Failure) -> Exception:
    kinds: dict[str, type[Exception]] = {
        "refused": Unsupported,
        "contract": ContractBroken,
        "oom": MemoryError,
        "died": KernelDied,
        "timeout": KernelDied,
    }
    return kinds.get(failure.kind, KernelFailed)(failure.message)


def judged_kernel(kernel: AnyKernel, *, allowed: int | None = None) -> Kernel:
    """As `find_kernel`, but a user's `file.py:function` or `module:function` lives in a process of its own.

    That process stays as long as this one, unless the file changes; `allowed` bytes are what it may take.
    """
    if not (isinstance(kernel, str) and is_plugin(kernel)):
        return find_kernel(kernel)
    process = PROCESSES.of(kernel, file_digest(kernel), allowed)
    process.start()
    # Not shielded: a user's kernel is judged as it is.
    return Kernel(
        kernel, _Runner(process).run, shielded=False, origin=process.origin, process=process, domain=process.domain
    )


class Processes:
    """Those of this process, the one used last at the end: a few stay alive, an older one starts anew when asked."""

    def __init__(self) -> None:
        self.zygote: Zygote | None = None  # a worker has one
        self._known: dict[tuple[str | None, str | None, int | None], Process] = {}
        atexit.register(self.stop)

    def of(self, kernel: str | None, digest: str | None = None, allowed: int | None = None) -> Process:
        """`digest` is of the file that the kernel is in: another content is another kernel. Without a kernel it is what
        the process is for."""
        key = (kernel, digest, allowed)
        process = self._known.pop(key, None) or Process(kernel, allowed=allowed, echo=True, zygote=self.zygote)
        self._known[key] = process
        others = [other for other in self._known.values() if not other.is_dead and other is not process]
        most = MOST_ALIVE if allowed is None else max(1, min(MOST_ALIVE, allowed // SHARE_BYTES))
        for other in others[: max(0, len(others) + 1 - most)]:
            other.stop()
        return process

    def stop(self) -> None:
        for process in self._known.values():
            process.stop()


PROCESSES = Processes()


def trusted_process(purpose: str) -> Process:
    """One that loads nobody's code, for what is timed beside a user's kernel: the reference, the packing."""
    return PROCESSES.of(None, purpose)


class _Runner:
    def __init__(self, process: Process) -> None:
        self._process = process

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Runner":
        return self

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, None]:
        arguments = sdpa_arguments(q, k, v, call)
        mask = arguments.pop("attn_mask")
        arguments.pop("enable_gqa")
        arguments["threads"] = torch.get_num_threads()  # as here
        if call.dropout_p:  # its draws follow from the generator here, as in one process
            arguments["seed"] = int(torch.randint(1 << 31, ()))
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, mask)):
            out: Tensor = _Differentiable.apply(self._process, arguments, q, k, v, mask)  # type: ignore[no-untyped-call]
            return out, None
        mode = "inference" if torch.is_inference_mode_enabled() else "no_grad"
        reply = self._process.ask(Request(q, k, v, mask, mode=mode, **arguments))
        _check(reply)
        return reply.out, None


def _check(reply: Reply) -> None:
    if reply.failure is not None:
        raise exception_of(reply.failure)
    if reply.written:
        raise ContractBroken(f"kernel wrote into its input {reply.written[0]}, or beside it")


class _Differentiable(torch.autograd.Function):
    """The graph stays in the kernel's process, under a ticket that ends with the graph here."""

    @staticmethod
    def forward(
        ctx: Any, process: Process, arguments: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Tensor:
        named = {name: t for name, t in zip(DIFFERENTIABLE, (q, k, v, mask), strict=True) if t is not None}
        wanted = tuple(name for name, t in named.items() if t.requires_grad)
        reply = process.ask(Request(q, k, v, mask, mode="grad", gradients=wanted, hold=True, **arguments))
        _check(reply)
        assert reply.ticket is not None
        ctx.process, ctx.ticket = process, reply.ticket
        weakref.finalize(ctx, process.release, reply.ticket)
        return reply.out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        found = ctx.process.differentiate(ctx.ticket, gradient)
        if isinstance(found, Failure):
            raise exception_of(found)
        return (None, None, *(found.get(f"grad {name}") for name in DIFFERENTIABLE))
