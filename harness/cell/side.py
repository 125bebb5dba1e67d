"""One side of a comparison: a module and how it is called. Nothing here knows what a result is held to."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from harness.cell.peak import peak_bytes
from harness.kernels.call import AttentionCall, Kernel

if TYPE_CHECKING:
    from harness.cell.build import WatchedKernel
    from harness.cell.draws import Jitter

Steps = tuple[tuple[range, range], ...]  # positions of the queries and of the keys of each step
Views = tuple[Mapping[str, Any], ...]
Forward = Callable[[nn.Module, Tensor, Mapping[str, Any], Any, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a module, how to call it, and its form of the mask for each step."""

    module: nn.Module
    forward: Forward
    views: Views
    new_cache: Callable[[int], Any] | None
    gives_weights: bool
    filled: Callable[[nn.Module, Tensor], Any] | None = None  # a cache that holds these tokens, without attending
    other_backend: Callable[[nn.Module], nn.Module] | None = None  # of a reference: the same by SDPA's other way

    def by_other_backend(self) -> "Side | None":
        if self.other_backend is None:
            return None
        return dataclasses.replace(self, module=self.other_backend(self.module))

    def in_float64(self) -> "Side":
        """The golden: a copy in double precision of what is already rounded."""
        return self._in(torch.float64, {})

    def in_float32(self, watch: "WatchedKernel") -> "Side":
        """A copy in single precision of what is already rounded, around the same kernel."""
        # Copied, a bound method brings its object along: without the memo the user's kernel would be copied too.
        return self._in(torch.float32, {id(watch): watch})

    def _in(self, dtype: torch.dtype, memo: dict[int, Any]) -> "Side":
        return dataclasses.replace(self, module=copy.deepcopy(self.module, memo).to(dtype), views=self.views_in(dtype))

    def views_in(self, dtype: torch.dtype) -> Views:
        return tuple({key: _cast(value, dtype) for key, value in view.items()} for view in self.views)

    def jittered(self, jitter: "Jitter") -> "Side":
        """A copy whose weights and float masks moved."""
        module = jitter.module(self.module)
        return dataclasses.replace(self, module=module, views=self.jittered_views(jitter))

    def jittered_views(self, jitter: "Jitter") -> Views:
        return tuple({key: jitter.value(value) for key, value in view.items()} for view in self.views)


@dataclass(frozen=True)
class OwnCaches:
    """Caches as the module makes them when asked: a saboteur gives a module a `new_cache` after its pair was built.

    A closure would do, but cannot be pickled.
    """

    module: nn.Module

    def __call__(self, capacity: int) -> Any:
        return self.module.new_cache(capacity)  # type: ignore[operator]


def run_variant(
    module: nn.Module, x: Tensor, view: Mapping[str, Any], cache: Any, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    kwargs = dict(view)
    if cache is not None:
        kwargs["cache"] = cache
    if need_weights:
        result: tuple[Tensor, Tensor] = module(x, need_weights=True, **kwargs)
        return result
    return module(x, **kwargs), None


def filled_variant(module: Any, x: Tensor, *, length: int | None = None) -> Any:
    """A cache of its own with what these tokens leave there: the module runs, but its kernel does not.

    With `length` zeros follow, up to as many tokens.
    """
    L = x.shape[1]
    cache, kernel = module.new_cache(length or L), module.kernel
    module.kernel = IDLE
    try:
        module(x, cache=cache)
    finally:
        module.kernel = kernel
    if length is not None and length > L:
        cache.append(*(t.new_zeros(*t.shape[:2], length - L, t.shape[3]) for t in cache.streams()))
    return cache


def _nothing(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, None]:
    return q.new_zeros(*q.shape[:3], v.shape[3]), None


IDLE = Kernel("idle", _nothing, shielded=False)


def run_steps(side: Side, steps: Steps, x: Tensor) -> tuple[Tensor, Any]:
    """Prefill into a fresh cache, then one token at a time: all outputs in order, and the filled cache."""
    assert side.new_cache is not None
    cache = side.new_cache(steps[-1][1].stop)
    parts = []
    for (queries, _), view in zip(steps, side.views, strict=True):
        out, _ = side.forward(side.module, x[:, queries.start : queries.stop], view, cache, False)
        parts.append(out)
    return torch.cat(parts, dim=1), cache


def single_steps(side: Side, steps: Steps, x: Tensor, cache: Any) -> Tensor:
    """Steps of one token each, (B, n, E), with all that stands before it in a cache that holds at least that.

    The last first: what a step leaves behind is cut off before the next.
    """
    parts = []
    for at in reversed(range(len(steps))):
        cache.crop(steps[at][0].start)
        parts.append(side.forward(side.module, x[:, at : at + 1], side.views[at], cache, False)[0])
    return torch.cat(parts[::-1], dim=1)


def train_step(side: Side, x: Tensor, cotangent: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output, and the gradients of x and of every parameter."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        out, _ = side.forward(side.module, leaf, side.views[0], None, False)
        leaves = (leaf, *side.module.parameters())
        # A kernel that cuts the graph gives no gradient: that is a gradient of 0, and judged as one.
        return out, tuple(gradients_of([out], leaves, [cotangent]))


def gradients_of(outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    """Of all leaves, 0 for those that no output depends on; what gradients they had before stays theirs.

    By `backward`: checkpointing in its reentrant form refuses `autograd.grad`.
    """
    before = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    try:
        torch.autograd.backward(list(outputs), list(cotangents))
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    finally:
        for leaf, grad in zip(leaves, before, strict=True):
            leaf.grad = grad


@dataclass
class Subject:
    """What is timed of a side: one prefill, one decode step at the end of a full cache, or one training step.

    Pickled, it goes to the process that its kernel lives in.
    """

    side: Side
    phase: str
    steps: Steps
    context: Tensor  # (B, S, E): the sequence of which decoding knows all but the last token
    cotangent: Tensor

    def warm_up(self) -> None:
        """Fills the cache, and makes one call."""
        if self.phase == "decode":
            with torch.no_grad():
                if self.steps[0][0].start == 0:
                    _, self._cache = run_steps(self.side, self.steps, self.context)
                else:  # the context is given
                    assert self.side.filled is not None
                    self._cache = self.side.filled(self.side.module, self.context)
        self.call(self.example)

    @property
    def example(self) -> Tensor:
        return self.context[:, -1:] if self.phase == "decode" else self.context

    def call(self, x: Tensor) -> dict[str, Tensor]:
        """(B, S, E), when decoding (B, 1, E), to what comes of it, by name."""
        side = self.side
        if self.phase == "train":
            out, gradients = train_step(side, x, self.cotangent)
            return {"out": out.detach(), "grad x": gradients[0]}
        with torch.no_grad():
            if self.phase == "prefill":
                return {"out": side.forward(side.module, x, side.views[0], None, False)[0]}
            if hasattr(self._cache, "crop"):  # a state cannot be cropped, and is as large at any length
                self._cache.crop(self.steps[-1][0].start)
            return {"out": side.forward(side.module, x, side.views[-1], self._cache, False)[0]}

    def peak_bytes(self, x: Tensor) -> int:
        return peak_bytes(lambda: self.call(x))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
