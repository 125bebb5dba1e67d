"""A kernel that can be asked: here, in this very process; in one of its own, see `client`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.candidate.compute import Function, call, compute, derivatives, failure_of
from harness.candidate.request import Failure, Reply, Request
from harness.kernels.domain import Domain, domain_of
from harness.kernels.layouts.layout import adapt


class Examinee(Protocol):
    """What holds a kernel, whoever runs it."""

    name: str
    domain: Domain

    def ask(self, request: Request) -> Reply:
        """Never raises for what the kernel does: its failure is the reply."""
        ...

    def post(self, request: Request) -> Callable[[], Reply]:
        """The same in two: it is asked, and the reply is waited for when the result is called."""
        ...

    def reread(self, ticket: int) -> Tensor:
        """A held output as it is now: whether a later call, or a change of the inputs, has altered it."""
        ...

    def differentiate(self, ticket: int, cotangent: Tensor) -> dict[str, Tensor] | Failure:
        """The gradients of a held output, by name; it stays held."""
        ...

    def release(self, ticket: int) -> None: ...


class Held:
    """Outputs that are kept with their graphs, by ticket."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Tensor, dict[str, Tensor], Request]] = {}
        self._next = 0

    def compute(self, function: Function, request: Request) -> tuple[dict[str, Tensor], int | None]:
        """All that is asked for, by name, and the ticket if it is to be held. Raises what the kernel raises."""
        if request.reuse is not None:
            request = _overwritten(self._held[request.reuse][2], request)
        if not request.hold:
            return compute(function, request), None
        out, leaves = call(function, request)
        self._next += 1
        self._held[self._next] = (out, leaves, request)
        return {"out": out.detach()}, self._next

    def reread(self, ticket: int) -> Tensor:
        return self._held[ticket][0].detach()

    def differentiate(self, ticket: int, cotangent: Tensor) -> dict[str, Tensor]:
        out, leaves, _ = self._held[ticket]
        return derivatives(out, leaves, cotangent, retain=True)

    def release(self, ticket: int) -> None:
        self._held.pop(ticket, None)


class InProcess:
    """For harness' own kernels and for tests: what the kernel does to this process, it does to the judge."""

    def __init__(self, function: Function, name: str) -> None:
        self._function, self.name = adapt(function), name
        self.domain = domain_of(self._function)
        self._held = Held()

    def ask(self, request: Request) -> Reply:
        before = {name: t.detach().clone() for name, t in request.tensors.items()}
        state = torch.get_rng_state()
        try:
            tensors, ticket = self._held.compute(self._function, request)
        except Exception as error:
            return Reply(failure=failure_of(error))
        finally:
            drew = not torch.equal(torch.get_rng_state(), state)
            torch.set_rng_state(state)
        may_draw = request.dropout_p > 0 or request.seed is not None
        return Reply(
            tensors={name: t.clone() for name, t in tensors.items()},
            shares=tuple(shared_memory(tensors["out"], request)),
            written=tuple(n for n, t in request.tensors.items() if not _same(t.detach(), before[n])),
            changed=("torch's random numbers",) if drew and not may_draw else (),
            ticket=ticket,
        )

    def post(self, request: Request) -> Callable[[], Reply]:
        reply = self.ask(request)
        return lambda: reply

    def reread(self, ticket: int) -> Tensor:
        return self._held.reread(ticket).clone()

    def differentiate(self, ticket: int, cotangent: Tensor) -> dict[str, Tensor] | Failure:
        try:
            return self._held.differentiate(ticket, cotangent)
        except Exception as error:
            return failure_of(error)

    def release(self, ticket: int) -> None:
        self._held.release(ticket)


def _overwritten(held: Request, new: Request) -> Request:
    """The very tensors of the held call, with the new one's numbers."""
    for name, tensor in held.tensors.items():
        tensor.copy_(new.tensors[name])
    same: dict[str, Any] = held.tensors
    return replace(new, **same)


def shared_memory(out: Tensor, request: Request) -> list[str]:
    """The inputs in whose memory the result lies."""
    place = out.untyped_storage().data_ptr()
    return [name for name, t in request.tensors.items() if place and t.untyped_storage().data_ptr() == place]


def _same(new: Tensor, old: Tensor) -> bool:
    """Bit for bit but for NaN, which is not equal to itself."""
    return torch.equal(new, old) or bool(((new == old) | (new.isnan() & old.isnan())).all())
