"""Linear recurrences, in their three forms, and the cache that they keep: a state whose size no length changes.

    S_t = exp(g_t) S_(t-1) + k_t u_t^T,   o_t = S_t^T q_t,   u_t = v_t, or with the delta rule
    u_t = b_t (v_t - (exp(g_t) S_(t-1))^T k_t): what the state does not say of k_t already

`recurrent` goes token by token. `parallel` takes all tokens at once: attention without a softmax, each score times the
decay between its two tokens, and under the delta rule a triangular system. `chunked` is parallel within chunks and
recurrent between them: for long prompts the cheapest. All three take and give the state.

Log-decays are summed before exp, and never positive: nothing overflows, however fast a state forgets. Everything is
computed in the inputs' dtype, in float32 at least.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from harness.variants.specs.recurrent import CHUNK, FEW

Form = Literal["auto", "chunked", "recurrent", "parallel"]
FORMS = ("auto", "chunked", "recurrent", "parallel")


@dataclass(frozen=True)
class Recurrence:
    """q, k (B, H, L, Dk), v (B, H, L, Dv), log-decays g (B, H, L, 1) or one for each channel of k (B, H, L, Dk) and,
    under the delta rule, beta (B, H, L, 1)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None = None

    def cut(self, start: int, stop: int) -> "Recurrence":
        parts = (None if t is None else t[:, :, start:stop] for t in (self.q, self.k, self.v, self.g, self.beta))
        return Recurrence(*parts)  # type: ignore[arg-type]

    def widened(self) -> "Recurrence":
        dtype = torch.promote_types(self.q.dtype, torch.float32)
        parts = (None if t is None else t.to(dtype) for t in (self.q, self.k, self.v, self.g, self.beta))
        return Recurrence(*parts)  # type: ignore[arg-type]

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def empty_state(self) -> Tensor:
        """(B, H, Dk, Dv)"""
        B, H, _, Dk = self.k.shape
        return self.k.new_zeros(B, H, Dk, self.v.shape[3])


def run(steps: Recurrence, state: Tensor | None, *, form: Form = "auto", chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """Outputs (B, H, L, Dv) and the state after them (B, H, Dk, Dv), both in float32 at least."""
    steps = steps.widened()
    S = steps.empty_state() if state is None else state.to(steps.q.dtype)
    if form == "recurrent" or (form == "auto" and steps.length <= FEW):
        return token_by_token(steps, S)
    size = max(1, steps.length) if form == "parallel" else chunk
    outputs = []
    for start in range(0, steps.length, size):
        out, S = at_once(steps.cut(start, start + size), S)
        outputs.append(out)
    return torch.cat(outputs, dim=2), S


def token_by_token(steps: Recurrence, S: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(steps.length):
        one = steps.cut(t, t + 1)
        k, u = one.k, one.v  # (B, H, 1, Dk), (B, H, 1, Dv)
        S = S * one.g.exp().mT  # (B, H, Dk or 1, 1): each channel of k, or all, forget
        if one.beta is not None:
            u = one.beta * (u - k @ S)
        S = S + k.mT @ u
        outputs.append(one.q @ S)
    return torch.cat(outputs, dim=2), S


def at_once(steps: Recurrence, S: Tensor) -> tuple[Tensor, Tensor]:
    q, k, u = steps.q, steps.k, steps.v
    between = _between(steps.g).exp()  # (B, H, C, C, 1 or Dk): what token i still has of token j
    if steps.g.shape[3] == 1:
        left = between.squeeze(-1)
        read = (q @ k.mT) * left
        overlap = None if steps.beta is None else (k @ k.mT) * left
    else:
        keys = k[:, :, None] * between
        read = (keys @ q[..., None]).squeeze(-1)
        overlap = None if steps.beta is None else (keys @ k[..., None]).squeeze(-1)
    kept = steps.g.cumsum(2).exp()  # what each token still has of the state at the start
    if steps.beta is not None:
        assert overlap is not None
        known = (k * kept) @ S  # what the state at the start says of each key
        system = (steps.beta * overlap).tril(-1)
        u = torch.linalg.solve_triangular(system, steps.beta * (u - known), upper=False, unitriangular=True)
    out = (q * kept) @ S + read @ u
    return out, S * kept[:, :, -1:].mT + (k * between[:, :, -1]).mT @ u


def _between(g: Tensor) -> Tensor:
    """(B, H, C, channels) -> (B, H, C, C, channels): the sum of g behind token j up to token i, -inf where i < j.

    Each is summed by itself: a difference of two sums from the start would lose the digits that these have in common,
    and where a state forgets fast they are large.
    """
    C = g.shape[2]
    behind = torch.ones(C, C, dtype=torch.bool, device=g.device).tril(-1)[..., None]
    sums = g[:, :, :, None].masked_fill(~behind, 0.0).cumsum(2)
    return sums.masked_fill(behind.transpose(0, 1), float("-inf"))


class StateCache:
    """States of fixed size by name, allocated when they are first known and written in place from then on."""

    def __init__(self, capacity: int = 0) -> None:
        self.length = 0
        self._states: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        return self._states.get(name)

    def put(self, name: str, state: Tensor) -> None:
        held = self._states.get(name)
        if held is None:
            self._states[name] = state.clone() if state._base is not None else state
        elif torch.is_grad_enabled() and (state.requires_grad or held.requires_grad):
            self._states[name] = state  # autograd may need the old one again
        else:
            held.copy_(state)

    @property
    def allocated_bytes(self) -> int:
        storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in self._states.values())}
        return sum(storages.values())

    def streams(self) -> Sequence[Tensor]:
        return tuple(self._states.values())

    def get_cache_info(self) -> dict[str, Any]:
        shapes = {name: tuple(state.shape) for name, state in self._states.items()}
        return {"tokens": self.length, "states": shapes, "allocated_bytes": self.allocated_bytes}
