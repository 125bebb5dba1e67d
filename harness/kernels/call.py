"""What one attention call asks for, with the mask algebra that every kernel shares; and what a kernel is.

An approximate kernel counts how much of its work each call left out; the counts add up until somebody asks.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from harness.kernels.domain import EVERYTHING, Domain


@dataclass(frozen=True, slots=True)
class BlockCount:
    """Blocks of queries x keys over batch and heads. `visible` are those that exact attention would have to compute."""

    kept: int
    visible: int
    total: int  # with those that causality, a window or a mask hides altogether
    pv_skipped: int = 0  # of the kept ones: scored, but too small to be multiplied with their values

    @property
    def sparsity(self) -> float:
        """The share of the visible blocks that was skipped: 0 is exact attention, causal or not."""
        return 1 - self.kept / self.visible if self.visible else 0.0

    @property
    def skipped(self) -> int:
        return self.visible - self.kept

    @property
    def skipped_any(self) -> bool:
        return self.skipped + self.pv_skipped > 0

    def __add__(self, other: "BlockCount") -> "BlockCount":
        return BlockCount(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: "BlockCount") -> "BlockCount":
        return BlockCount(*map(operator.sub, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """What one call kept, so that its output can be checked: `shown` gives the map of elements, (B, H, L, S)."""

    shown: Callable[[], Tensor]
    pv: float | None = None  # nats below which values were skipped, too


class Tally:
    """Held by one kernel; `take` gives what was counted since the last time and begins anew.

    `last` and `choice` are those of the latest call, whatever was taken.
    """

    def __init__(self) -> None:
        self.calls, self.count = 0, BlockCount(0, 0, 0)
        self.last = BlockCount(0, 0, 0)
        self.choice: BlockChoice | None = None
        self._spoilt: object | None = None

    def add(
        self,
        count: BlockCount,
        *,
        choice: BlockChoice | None = None,
        call: object | None = None,
        is_spoilt: bool = False,
    ) -> None:
        """`is_spoilt`: the output of `call` is not finite, and the shield may run the very same call on cleaned inputs.

        Then that run stands in the place of this one, also if this one was taken already.
        """
        is_again = call is not None and call is self._spoilt
        if is_again:
            self.count -= self.last
        else:
            self.calls += 1
        self.count += count
        self.last, self.choice = count, choice
        self._spoilt = call if is_spoilt and not is_again else None

    def take(self) -> BlockCount:
        taken = self.count
        self.calls, self.count = 0, BlockCount(0, 0, 0)
        return taken


class Unsupported(NotImplementedError):
    """The kernel says that it cannot do this call; it never guesses."""


class ContractBroken(Exception):
    """The kernel returned the wrong thing, or wrote into its inputs."""


class WrongDtype(ContractBroken):
    """The kernel answered in another dtype than it was asked in."""


@dataclass(frozen=True)
class AttentionCall:
    """Everything but q, k and v. Windows are counts of visible keys beside self; None = unbounded."""

    scale: float
    q_start: int | Tensor = 0  # position of query 0; (B,) if each batch row has its own, () under transforms
    mask: Tensor | None = None
    causal: bool = False
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,)
    dropout_p: float = 0.0
    need_weights: bool = False
    is_default_scale: bool = False  # a kernel with SDPA's signature is to find the scale itself: `scale=None`

    @property
    def hides(self) -> bool:
        """Whether some key may be invisible to some query."""
        return self.mask is not None or self.is_slanted

    @property
    def is_slanted(self) -> bool:
        """Whether what a query sees depends on its position."""
        return self.causal or self.left is not None or self.right is not None

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Keys left and right of a query's own position that it sees; None = unbounded."""
        return self.left, 0 if self.causal else self.right

    @property
    def bias(self) -> Tensor | None:
        """The float mask, if there is one."""
        return self.mask if self.mask is not None and self.mask.is_floating_point() else None

    def restricted(self, shown: Tensor) -> "AttentionCall":
        """The same call in which a query sees of the keys only those that are `shown`: bool, (B, H, L, S)."""
        if self.bias is not None:
            return dataclasses.replace(self, mask=self.bias.masked_fill(~shown, float("-inf")))
        return dataclasses.replace(self, mask=shown if self.mask is None else shown & self.mask)

    def needs_gradients(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        leaves = (q, k, v, self.mask, self.sinks)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leaves)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Bool, broadcastable to (B, H, L, S), True = attends; None if nothing is hidden."""
        parts: list[Tensor] = []
        if self.is_slanted:
            i = torch.arange(q.shape[2], device=q.device)[:, None]  # (L, 1)
            if isinstance(self.q_start, Tensor) and self.q_start.ndim == 1:
                i = i + self.q_start.to(q.device)[:, None, None, None]  # (B, 1, L, 1)
            else:
                i = i + self.q_start
            j = torch.arange(k.shape[2], device=q.device)  # (S,)
            if self.causal:
                parts.append(j <= i)
            if self.left is not None:
                parts.append(j >= i - self.left)
            if self.right is not None:
                parts.append(j <= i + self.right)
        if self.mask is not None:
            # A key at -inf is blocked, not merely unlikely: rows of -inf only are dead rows.
            parts.append(self.mask != float("-inf") if self.mask.is_floating_point() else self.mask)
        return functools.reduce(operator.and_, parts) if parts else None


def four_dims(mask: Tensor) -> Tensor:
    """What broadcasts to (B, H, L, S), with all four dimensions."""
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape)


def one_dtype(*tensors: Tensor) -> list[Tensor]:
    """For models under autocast: products come out narrower than what norms and rotations gave."""
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return [t.to(dtype) for t in tensors]


@dataclass(frozen=True)
class Kernel:
    """`run(q, k, v, call)` gives the output and, where `gives_weights` and asked for, the weights."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Tensor | None]]
    gives_weights: bool = False
    shielded: bool = True  # NaN and inf behind a mask are kept out around it; False: it is judged as it is
    origin: str = "harness"  # file and hash of a user's kernel
    delegates: bool = False  # it hands the work to torch's own attention; a built-in kernel must say so
    approximate: bool = False  # it leaves work out on purpose: judged by error metrics where a suite says so
    process: Any = None  # of a user's kernel that is judged: where it lives (`candidate.client.Process`)
    tally: Tally | None = None  # where an approximate kernel counts what it left out
    domain: Domain = EVERYTHING  # what it is for
    counted: Callable[[], None] | None = None  # for a module that has no kernel: what it calls when it runs


class Counter:
    """Counts a kernel's calls: a swap that is bypassed shows as zero."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.calls = kernel, 0

    def as_kernel(self) -> Kernel:
        return dataclasses.replace(self.kernel, run=self.run, counted=self.count)

    def count(self) -> None:
        # A compiled graph would be made anew for every count.
        if not torch.compiler.is_compiling():
            self.calls += 1

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        self.count()
        return self.kernel.run(q, k, v, call)
