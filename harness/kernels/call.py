"""What one attention call asks for, checked once, and the mask algebra that every kernel shares."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.kernels.tally import Tally


class Unsupported(NotImplementedError):
    """The kernel says that it cannot do this call; it never guesses."""


@dataclass(frozen=True)
class AttentionCall:
    """Everything but q, k and v. Windows are counts of visible keys beside self; None = unbounded."""

    scale: float
    q_start: int | Tensor = 0  # position of query 0; (B,) if each batch row has its own
    mask: Tensor | None = None
    causal: bool = False
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # (H,)
    dropout_p: float = 0.0
    need_weights: bool = False

    @property
    def hides(self) -> bool:
        """Whether some key may be invisible to some query."""
        return self.mask is not None or self.causal or self.left is not None or self.right is not None

    @property
    def bias(self) -> Tensor | None:
        """The float mask, if there is one."""
        return self.mask if self.mask is not None and self.mask.is_floating_point() else None

    def allowed(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Bool, broadcastable to (B, H, L, S), True = attends; None if nothing is hidden."""
        parts: list[Tensor] = []
        if self.causal or self.left is not None or self.right is not None:
            i = torch.arange(q.shape[2], device=q.device)[:, None]  # (L, 1)
            if isinstance(self.q_start, Tensor):
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
        if not parts:
            return None
        visible = parts[0]
        for part in parts[1:]:
            visible = visible & part
        return visible


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
    tally: Tally | None = None  # where an approximate kernel counts what it left out
