"""What every check is given: the kernel, the question, the kernel's first answer, and how noisy answers may be.

The question is a small attention call in the likeness of a case. A relation compares the kernel with itself, f(changed
inputs) with changed f(inputs). Each of the two may be off by what the acceptance rule allows one result, so the floor
of their difference is the sum of both floors; the factors are the rule's own. The floors need an attention to be
measured with, and take `eager`; no value is compared with it.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.case import Case
from harness.cell.draws import Jitter, draw, plain_and_jittered
from harness.cell.rule import JITTER_DRAWS, OK_FACTOR, conditioning, decide, ratio_to
from harness.kernels.call import AttentionCall, Kernel, four_dims
from harness.kernels.front import attention, make_call
from harness.kernels.plugin import dense_mask
from harness.variants import masks
from harness.variants.masks import MaskRule
from harness.variants.specs.latent import absorbs

BATCH = 2
LENGTH = 33  # one key beyond a tile of 16 or 32
# Of the calls at the cell's own length: enough for several tiles of any size, and a fraction of a second.
LONGEST, HEADS_AT_LENGTH = 2100, 2
SAMPLED_ROWS = 16  # at the start, in the middle and at the end of a long question: what its floor is measured on
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
    q_start: int | None = None  # position of query 0; None: the last query stands at the last key

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
        hiding = {"mask": self.mask, "causal": self.causal, "window": self.window, "q_start": self.q_start}
        return {**hiding, "scale": self.scale}

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

    def sampled_rows(self) -> "Question":
        """Queries at the start, in the middle and at the end, with all keys; all queries where there are few."""
        L = self.q.shape[2]
        if L <= 3 * SAMPLED_ROWS:
            return self
        starts = (0, (L - SAMPLED_ROWS) // 2, L - SAMPLED_ROWS)
        rows = torch.cat([torch.arange(start, start + SAMPLED_ROWS) for start in starts])
        dense = self.densely_masked()
        mask = None if dense.mask is None else four_dims(dense.mask)
        if mask is not None and mask.shape[-2] > 1:
            mask = mask[..., rows, :]
        return dense.but(q=self.q[:, :, rows], mask=mask)

    def batch(self, index: Tensor) -> "Question":
        mask = self.mask
        if mask is not None and mask.ndim == 4 and mask.shape[0] > 1:
            mask = mask[index]
        return self.but(q=self.q[index], k=self.k[index], v=self.v[index], mask=mask)


def _cut(mask: Tensor, dim: int, start: int, stop: int) -> Tensor:
    return mask if mask.shape[dim] == 1 else mask.narrow(dim, start, stop - start)


def make_question(case: Case, generator: torch.Generator, *, at_length: bool = False) -> Question:
    """All queries of a short sequence and few heads; grouping, channels, dtype and kind of mask are the case's.

    `at_length`: of the case's own sequence, as far as `LONGEST`, with fewer heads still.
    """
    S = min(case.seq_len, LONGEST if at_length else LENGTH)
    H_kv, D, D_v, scale = _shape_of_heads(case)
    G = min(case.heads // H_kv, GROUP)
    H_kv = min(H_kv, HEADS_AT_LENGTH // G if at_length else KV_HEADS)
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


@dataclass(frozen=True)
class RelationFloor:
    """Per row of a result, the terms of N: rounding of the plain kernel, conditioning, one rounding of the result."""

    terms: Tensor  # (3, B, H, L)

    def __add__(self, other: "RelationFloor") -> "RelationFloor":
        return RelationFloor(self.terms + other.terms)

    def times(self, factor: float) -> "RelationFloor":
        return RelationFloor(factor * self.terms)

    def rows(self, start: int, stop: int) -> "RelationFloor":
        return RelationFloor(self.terms[..., start:stop])

    def largest_row(self) -> "RelationFloor":
        """One that stands for every row, of however many."""
        return RelationFloor(self.terms.amax(-1, keepdim=True))

    def batch(self, index: Tensor) -> "RelationFloor":
        return RelationFloor(self.terms[:, index])


@dataclass(frozen=True)
class CheckResult:
    """What a check found; its figures are absent where it asks for exactness."""

    status: str
    reason: str = ""
    max_abs_err: float | None = None
    err_budget: float | None = None
    err_ratio: float | None = None
    block_ratio: float | None = None


OK = CheckResult("ok")


def floor_of(question: Question, generator: torch.Generator) -> RelationFloor:
    """All draws in one call, side by side in the batch."""
    dtype, B = question.q.dtype, question.q.shape[0]
    jitter, draws = Jitter(dtype, generator), 1 + JITTER_DRAWS

    def drawn(t: Tensor) -> Tensor:
        return torch.cat(list(plain_and_jittered(t, jitter.tensor)))

    mask = question.mask
    if mask is not None:
        mask = mask.expand(B, *mask.shape[1:])
        mask = drawn(mask) if mask.is_floating_point() else mask.repeat(draws, 1, 1, 1)
    stack = question.but(q=drawn(question.q), k=drawn(question.k), v=drawn(question.v), mask=mask)
    # In float64 the exact result is eager's own: that its rounding is seen, it is compared with another order of sums.
    plain_kernel = "sdpa" if dtype == torch.float64 else "eager"
    ((r,), (g,)) = draw(
        [stack],
        reference=lambda stack: stack.ask(plain_kernel).double().unflatten(0, (draws, B)),
        golden=lambda stack: stack.in_float64().ask("eager").unflatten(0, (draws, B)),
        dtype=dtype,
    )
    rounding, moved = (r - g).abs().amax(dim=(0, -1)), (g[1:] - g[0]).abs().amax(dim=(0, -1))
    one_rounding = torch.finfo(dtype).eps * g[0].abs().amax(-1)
    return RelationFloor(torch.stack([rounding, conditioning(dtype) * moved, one_rounding]))


def judge_relation(
    answer: Tensor, expected: Tensor, floor: RelationFloor, *, rows: Tensor | None = None
) -> CheckResult:
    """`floor` is that of both sides together; `rows` (B, H, L), if given, are the ones that are compared."""
    error = (answer.detach().double() - expected.detach().double()).abs().amax(-1)  # (B, H, L)
    terms = floor.terms.expand(3, *error.shape)
    if rows is not None:
        error, terms = error.masked_fill(~rows, 0.0), terms.masked_fill(~rows, 0.0)
    if not bool(error.isfinite().all()):
        return CheckResult("mismatch", "not finite")
    worst, N = error.max(), terms.amax(dim=(1, 2, 3)).sum()
    ratio = float(ratio_to(worst, N))
    block_ratio = float(ratio_to(error.amax(-1), terms.amax(-1).sum(0)).max())
    status = decide(ratio, block_ratio)
    reason = "" if status == "ok" else f"the two results differ by {ratio:.3g} N (worst block {block_ratio:.3g} N)"
    return CheckResult(status, reason, float(worst), OK_FACTOR * float(N), ratio, block_ratio)


@dataclass(frozen=True)
class LongProbe:
    """The same at the cell's own length, up to `LONGEST` keys: with the cell's tiles, buffers and threads."""

    whole: Question
    question: Question  # of the phase, as in a `Probe`
    first: Tensor
    answer: Tensor


BUILT_IN = ("harness", "saboteur")  # origins of kernels that are held to our own promises


@dataclass(frozen=True)
class Probe:
    kernel: Kernel
    rule: MaskRule
    phase: str
    seed: int
    whole: Question  # all queries
    whole_floor: RelationFloor
    question: Question  # those of the phase: all, or the last one alone when decoding
    floor: RelationFloor
    first: Tensor  # the kernel's answer to `question`, the tensor itself
    answer: Tensor  # a copy of it, taken at once
    long: "LongProbe"

    @property
    def is_built_in(self) -> bool:
        return self.kernel.origin in BUILT_IN

    @property
    def keeps_nan_out(self) -> bool:
        """Whether the kernel promises that what is hidden cannot leak: a user's kernel is not asked to."""
        return self.kernel.shielded or self.is_built_in

    def generator(self) -> torch.Generator:
        """Anew for each check, so that no number depends on which others ran."""
        return torch.Generator().manual_seed(self.seed)

    def same(self, question: Question) -> CheckResult:
        """Another form of the question must get the first answer."""
        return judge_relation(question.ask(self.kernel), self.answer, self.floor.times(2))
