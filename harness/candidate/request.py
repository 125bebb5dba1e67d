"""What a kernel is asked, and what comes back: tensors and words alone, so that both can cross to another process."""

from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from harness.kernels.domain import CallFacts

# How the call is made; gradients can be asked for in `grad`, `deterministic` and `float64`.
# thread: in another Python thread; threads: each batch entry in one of its own, all at once; float64: torch's default
# dtype is that; deterministic: torch's deterministic algorithms.
MODES = ("no_grad", "grad", "inference", "autocast", "compile", "thread", "threads", "float64", "deterministic")
DIFFERENTIABLE = ("q", "k", "v", "mask")


@dataclass(frozen=True, eq=False)
class Request:
    """One call with SDPA's arguments, and under which circumstances it is made.

    Strides are part of the question: each tensor arrives with its own.
    """

    q: Tensor  # (B, H, L, D)
    k: Tensor  # (B, H_kv, S, D)
    v: Tensor  # (B, H_kv, S, D_v)
    mask: Tensor | None = None  # bool (True = attends) or float (added)
    dropout_p: float = 0.0
    is_causal: bool = False  # aligned top-left, as SDPA's
    scale: float | None = None
    mode: str = "no_grad"
    threads: int | None = None  # torch's threads during the call; None: as they are
    gradients: tuple[str, ...] = ()  # of DIFFERENTIABLE; the others are passed without requires_grad
    cotangent: Tensor | None = None  # of the output; with it the gradients come back, by name "grad q"
    directions: tuple[Tensor, ...] = ()  # one for each of `gradients`: with them second derivatives, "second q"
    repeats: int = 1  # calls in a row on the same inputs; beyond 1 "out" is the stack of all results
    seed: int | None = None  # torch's generator is set to it before the call
    brief: bool = False  # arguments that have their default are left out
    hold: bool = False  # keep the result, so that it can be read again or differentiated later
    reuse: int | None = None  # a ticket: the tensors of that call get these numbers in place, and are passed again
    tied: tuple[str, ...] = ()  # inputs that are one and the same tensor object: the first of them

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The kernel's own inputs."""
        named = {"q": self.q, "k": self.k, "v": self.v}
        return named if self.mask is None else named | {"mask": self.mask}

    @property
    def facts(self) -> CallFacts:
        """What decides whether the call lies within a kernel's domain."""
        (B, H, L, D), (H_kv, S, D_v) = self.q.shape, (self.k.shape[1], *self.v.shape[2:])
        kind = "none" if self.mask is None else "float" if self.mask.is_floating_point() else "bool"
        return CallFacts(
            dtype=str(self.q.dtype).removeprefix("torch."),
            B=B, H=H, H_kv=H_kv, L=L, S=S, D=D, D_v=D_v,
            mask=kind,
            is_causal=self.is_causal,
            dropout=self.dropout_p > 0,
            other_scale=self.scale is not None and self.scale != D**-0.5,
            gradients=bool(self.gradients),
            mask_gradients="mask" in self.gradients,
            second_derivatives=bool(self.directions),
            compiled=self.mode == "compile",
        )  # fmt: skip

    @property
    def words(self) -> dict[str, Any]:
        """Everything but the tensors."""
        of_tensors = {"q", "k", "v", "mask", "cotangent", "directions"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in of_tensors}


@dataclass(frozen=True)
class Failure:
    """Why there is no result. `kind`:

    refused   NotImplementedError: the kernel says that it does not do this call
    contract  it returned something that is no plain tensor
    oom       no memory
    error     whatever else it raised
    died      its process ended
    timeout   no answer in time
    """

    kind: str
    message: str


@dataclass(frozen=True)
class Reply:
    """What came back. `tensors`: "out", and as asked for "grad q", "second q" ...; empty where there is a failure."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    failure: Failure | None = None
    written: tuple[str, ...] = ()  # inputs that are no longer what they were, or memory beside them
    shares: tuple[str, ...] = ()  # inputs whose memory the result lies in
    changed: tuple[str, ...] = ()  # global state that the call left otherwise than it found it
    ticket: int | None = None  # of what is held

    @property
    def out(self) -> Tensor:
        return self.tensors["out"]
