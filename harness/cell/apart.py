"""Timing of a kernel in a process of its own, by the judge's clock, on inputs that it has never seen.

The reference runs in such a process too, in which nobody's code was ever loaded: both sides pay the same way there and
back. A sample ends when every element of every result lies in the judge's memory. Of the results some are chosen at
random afterwards, to be judged: a kernel that does less while it is timed is wrong.

A kernel in a layout of its own is called through packing that is not its work. What that costs is timed beside both,
where nobody's code is, and taken off: a kernel that could say when to stop the clock would.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from harness.candidate.client import Process
from harness.cell.build import Pair
from harness.cell.side import Subject
from harness.cell.timing import Samples
from harness.kernels.call import AttentionCall
from harness.kernels.layouts import find_layout
from harness.kernels.layouts.layout import SdpaCall
from harness.kernels.plugin import sdpa_arguments

SAMPLE_S = 4e-3  # a sample lasts about this long: beside it the way there and back, some 0.1 ms, is little
JUDGED = 2  # timed calls of a cell that are judged
LEAST_OWN = 0.01  # of a sample is the kernel's, however much of it packing seems to take
chance = random.SystemRandom()  # the kernel may know every seed of ours


class Installed(Protocol):
    """What a process can install and call: a Subject, or Packing."""

    @property
    def example(self) -> Tensor: ...

    def warm_up(self) -> None: ...

    def call(self, x: Tensor) -> dict[str, Tensor]: ...


@dataclass
class Packing:
    """What the layout alone does in one call of a side: inputs into its form, a result back, and both ways for
    gradients. It never sees the kernel.
    """

    layout: str
    calls: tuple[SdpaCall, ...]  # that the side makes
    differentiates: bool

    @classmethod
    def of(cls, pair: Pair, subject: Subject, layout: str) -> "Packing":
        """As the calls of this subject are; it is called here, once."""
        heard: list[SdpaCall] = []
        kernel = pair.watch.kernel

        def listen(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
            heard.append(SdpaCall(q.detach(), k.detach(), v.detach(), **sdpa_arguments(q, k, v, call)))
            return kernel.run(q, k, v, call)

        pair.watch.kernel = replace(kernel, run=listen)
        try:
            subject.warm_up()  # it ends with such a call
            last = heard[-1:] if subject.phase == "decode" else heard
        finally:
            pair.watch.kernel = kernel
        return cls(layout, tuple(last), subject.phase == "train")

    @property
    def example(self) -> Tensor:
        return torch.zeros(1)

    def warm_up(self) -> None:
        self.call(self.example)

    def call(self, x: Tensor) -> dict[str, Tensor]:
        with torch.set_grad_enabled(self.differentiates):
            for each in self.calls:
                self._pack(each)
        return {"out": x}

    def _pack(self, call: SdpaCall) -> None:
        layout = find_layout(self.layout)
        if self.differentiates:
            call = replace(call, **{name: getattr(call, name).detach().requires_grad_() for name in ("q", "k", "v")})
        own = layout.prepare(call)
        result = torch.zeros(own.shape, dtype=call.q.dtype, requires_grad=self.differentiates)
        outputs = [layout.restore(result, own.memo), *(t for t in own.args if isinstance(t, Tensor))]
        if self.differentiates:
            outputs = [t for t in outputs if t.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def without(packing: Samples, samples: Samples) -> Samples:
    """Samples less what packing took in the same block; as whole as the less whole of the two."""
    pairs = zip(samples.seconds, packing.seconds, strict=True)
    own = [max(sample - packed, LEAST_OWN * sample) for sample, packed in pairs]
    return Samples(own, [max(pair) for pair in zip(samples.waited, packing.waited, strict=True)])


@dataclass(frozen=True)
class TimedResult:
    """One timed call: its input, and what came of it, by name."""

    x: Tensor
    tensors: dict[str, Tensor]


@dataclass
class Apart:
    """A side as `interleave` samples it."""

    process: Process
    subject: Installed
    kept: list[TimedResult] = field(default_factory=list)
    samples: int = 0

    def __post_init__(self) -> None:
        self.process.install(self.subject)
        self._size = self.subject.example.numel()
        self._pool = torch.randn(2 * self._size).to(self.subject.example.dtype)

    @property
    def pid(self) -> int:
        return self.process.pid

    def sample(self, repeats: int) -> float:
        """Seconds per call, each on numbers of its own."""
        xs = [self.fresh() for _ in range(repeats)]
        seconds, results = self.process.go(xs)
        self._keep(xs, results)
        return seconds / repeats

    def fresh(self) -> Tensor:
        """A random stretch of random numbers: a draw of as many would take longer than the call."""
        start = chance.randrange(self._size + 1)
        return self._pool[start : start + self._size].view(self.subject.example.shape)

    def _keep(self, xs: list[Tensor], results: dict[str, Tensor]) -> None:
        """Each sample has the same chance to be among the JUDGED, and each call in it."""
        self.samples += 1
        place = len(self.kept) if len(self.kept) < JUDGED else chance.randrange(self.samples)
        if place >= JUDGED:
            return
        chosen = chance.randrange(len(xs))
        mark = f"{chosen} "
        tensors = {name.removeprefix(mark): t for name, t in results.items() if name.startswith(mark)}
        self.kept[place : place + 1] = [TimedResult(xs[chosen], tensors)]
