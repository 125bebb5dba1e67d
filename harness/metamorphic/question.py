"""The small attention call that all checks start from, made in the likeness of a case."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness import masks
from harness.case import Case
from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.front import attention, make_call
from harness.kernels.plugin import dense_mask
from harness.specs.latent import absorbs

BATCH = 2
LENGTH = 33  # one key beyond a tile of 16 or 32
# Enough to tell groups, their members and channels apart. The comparison has the case's own sizes; here they cost most.
KV_HEADS, GROUP = 2, 2
RANK, ROPE = 64, 16
# Inputs are multiples of 1/8 up to 3: sums of a few of them are exact in bfloat16 too, so that what a check adds to the
# inputs costs no rounding that it would have to excuse.
STEP, LARGEST = 0.125, 3.0


@dataclass(frozen=True)
class Question:
    """One call of `attention`; queries stand at the end of the keys."""

    q: Tensor  # (B, H, L, D)
    k: Tensor  # (B, H_kv, S, D)
    v: Tensor  # (B, H_kv, S, D_v)
    scale: float
    mask: Tensor | None = None  # what `causal` and `window` do not say; broadcasts to (B, H, L, S)
    causal: bool = False
    window: int | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v}
        return named if self.mask is None else named | {"mask": self.mask}

    @property
    def call(self) -> AttentionCall:
        return make_call(self.q, self.k, self.v, **self._rules())

    def ask(self, kernel: Kernel | str, **options: Any) -> Tensor:
        out: Tensor = attention(self.q, self.k, self.v, kernel=kernel, **self._rules(), **options)
        return out

    def _rules(self) -> dict[str, Any]:
        return {"mask": self.mask, "causal": self.causal, "window": self.window, "scale": self.scale}

    def but(self, **changes: Any) -> "Question":
        return dataclasses.replace(self, **changes)

    def in_float64(self) -> "Question":
        return self.but(**{name: t.double() for name, t in self.tensors.items() if t.is_floating_point()})

    def densely_masked(self) -> "Question":
        """The same call with everything that hides keys in one tensor."""
        return self.but(mask=dense_mask(self.q, self.k, self.call), causal=False, window=None)

    def allowed(self) -> Tensor | None:
        """(B, H, L, S), True = attends; None if nothing is hidden."""
        allowed = self.call.allowed(self.q, self.k)
        return None if allowed is None else allowed.expand(*self.q.shape[:3], self.k.shape[2])

    def rows(self, start: int, stop: int) -> "Question":
        """Some of the queries; keys after the last of them are left out where none of them may see those anyway."""
        S = stop if self.causal or self.window is not None else self.k.shape[2]
        mask = None if self.mask is None else _cut(_cut(self.mask, -2, start, stop), -1, 0, S)
        return self.but(q=self.q[:, :, start:stop], k=self.k[:, :, :S], v=self.v[:, :, :S], mask=mask)

    def batch(self, index: Tensor) -> "Question":
        mask = self.mask
        if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
            mask = mask[index]
        return self.but(q=self.q[index], k=self.k[index], v=self.v[index], mask=mask)


def _cut(mask: Tensor, dim: int, start: int, stop: int) -> Tensor:
    return mask if mask.shape[dim] == 1 else mask.narrow(dim, start, stop - start)


def make_question(case: Case, generator: torch.Generator) -> Question:
    """All queries of a short sequence and few heads; grouping, channels, dtype and kind of mask are the case's."""
    S = min(case.seq_len, LENGTH)
    H_kv, D, D_v, scale = _shape_of_heads(case)
    G = min(case.heads // H_kv, GROUP)
    H_kv = min(H_kv, KV_HEADS)
    H = G * H_kv
    dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        return (STEP * (noise / STEP).round()).clamp(-LARGEST, LARGEST).to(dtype)

    rule = masks.MASKS[case.mask]
    at = masks.positions(BATCH, H, range(S), range(S), S)
    return Question(
        q=draw(BATCH, H, S, D),
        k=draw(BATCH, H_kv, S, D),
        v=draw(BATCH, H_kv, S, D_v),
        scale=scale,
        mask=masks.remainder(rule, at, dtype),
        causal=rule.causal,
        window=None if rule.window is None else rule.window(S),
    )


def _shape_of_heads(case: Case) -> tuple[int, int, int, float]:
    """Key/value heads, channels of q and k, channels of v, and the scale: as the kernel of this case sees them."""
    if case.kv_lora_rank is None:
        return case.kv_heads or case.heads, case.head_dim, case.head_dim, case.head_dim**-0.5
    assert case.rope_head_dim is not None and case.v_head_dim is not None
    N, rope, V, r = case.head_dim, case.rope_head_dim, case.v_head_dim, case.kv_lora_rank
    scale = (N + rope) ** -0.5
    queries = 1 if case.phase == "decode" else case.seq_len
    if absorbs(case, queries, case.kv_len):
        r, rope = min(r, RANK), min(rope, ROPE)
        return 1, r + rope, r, scale  # in latent space all heads share one key and one value
    return case.heads, N + rope, V, scale
