"""The acceptance rule: when is a candidate numerically the same as its reference?

C = candidate; R = reference in the same dtype; G = golden, the reference in float64 on the already rounded inputs and
weights; u = eps of the dtype. Four more draws repeat R and G with inputs and weights jittered by a relative u.
The noise floor is N = max|R - G| + J + u max|G|: the reference's own rounding (the largest of the draws: of a small
tensor one draw says little), how far G moves under a jitter of the eps that scores are computed in (the problem's
conditioning), and one rounding.
Every test is written `value <= limit`, so that a NaN never passes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pandas import DataFrame

OK_FACTOR = 2.0  # of N, over the whole tensor
BLOCK_FACTOR = 4.0  # of the block's own N: a block's maxima scatter more
DEGRADED_FACTOR = 32.0  # of N; for blocks twice that, as BLOCK_FACTOR is twice OK_FACTOR
MEAN_FACTOR = 1.5  # of mean|R - G|
# The mean of n errors scatters by 0.76 / sqrt(n) of itself: below this size a factor of 1.5 is within chance. So it is
# for gradients of any size: a weight's gradient is a sum over a few dominant tokens, and its errors go together.
MEAN_ELEMENTS = 256
BLOCK_ROWS = 16
JITTER_DRAWS = 4
SEVERITY = ("skipped", "ok", "degraded", "mismatch")


@dataclass(frozen=True)
class TensorVerdict:
    tensor: str
    regime: str
    status: str
    reason: str = ""
    max_abs_err: float | None = None  # max|C - G|
    mean_abs_err: float | None = None
    max_rel_err: float | None = None
    max_ulp_err: float | None = None
    ref_max_abs_err: float | None = None  # max|R - G|
    err_budget: float | None = None  # 2 N
    err_ratio: float | None = None  # max|C - G| / N
    block_ratio: float | None = None  # the worst block's, over that block's N
    mean_ratio: float | None = None  # mean|C - G| over its limit

    @property
    def rank(self) -> tuple[int, float]:
        """Worst last. What failed without an error to compare (a wrong shape, a NaN) is worse than any number."""
        nothing = float("inf") if self.status == "mismatch" else 0.0
        return SEVERITY.index(self.status), nothing if self.err_ratio is None else self.err_ratio


@dataclass(frozen=True)
class Equivalence:
    verdicts: tuple[TensorVerdict, ...]

    @property
    def status(self) -> str:
        return max((v.status for v in self.verdicts), key=SEVERITY.index)

    @property
    def passed(self) -> bool:
        return self.status == "ok"

    @property
    def worst(self) -> TensorVerdict:
        return max(self.verdicts, key=lambda v: v.rank)

    def table(self) -> "DataFrame":
        import pandas as pd

        return pd.DataFrame([asdict(v) for v in self.verdicts])


def judge(
    tensor: str,
    candidate: Any,
    references: Sequence[Tensor],
    goldens: Sequence[Tensor],
    *,
    regime: str = "plain",
    may_differ: Tensor | None = None,
    is_gradient: bool = False,
) -> TensorVerdict:
    """`references` and `goldens`: the plain draw first, then the jittered ones.

    `may_differ`: elements whose value the policy leaves open (a query that was itself poisoned).
    """
    reference, golden = references[0], goldens[0]

    def mismatch(reason: str) -> TensorVerdict:
        return TensorVerdict(tensor, regime, "mismatch", reason)

    if not isinstance(candidate, Tensor):
        return mismatch(f"{type(candidate).__name__} instead of a tensor")
    if candidate.shape != reference.shape:
        return mismatch(f"shape {tuple(candidate.shape)} instead of {tuple(reference.shape)}")
    if candidate.dtype != reference.dtype:
        return mismatch(f"dtype {candidate.dtype} instead of {reference.dtype}")
    if candidate.numel() == 0:
        return TensorVerdict(tensor, regime, "ok")

    c, g = candidate.detach().double(), golden.detach().double()
    open_places = ~g.isfinite() if may_differ is None else ~g.isfinite() | may_differ

    def closed(t: Tensor) -> Tensor:
        return t.abs().masked_fill(open_places, 0.0)

    # Running maxima over the draws: attention weights are large, and five of them at once are larger.
    r_err, jitter, r_mean = torch.zeros_like(g), torch.zeros_like(g), 0.0
    for r, at in zip(references, goldens, strict=True):
        drawn = closed(r.detach().double() - at)
        r_err, r_mean = torch.maximum(r_err, drawn), r_mean + float(drawn.mean()) / len(goldens)
        jitter = jitter if at is golden else torch.maximum(jitter, closed(at - g))
    overflow = ~r_err.isfinite()
    # The golden's NaN or infinity must stand exactly where the golden has it; there nothing else is compared.
    policy = torch.where(g.isfinite(), c.isfinite() | overflow, (c == g) | (c.isnan() & g.isnan()))
    if may_differ is not None:
        policy = policy | may_differ
    if not bool(policy.all()):
        count = int((~policy).sum())
        return mismatch(f"{count} of {c.numel()} elements are non-finite (or finite) where the golden is not")
    if bool(overflow.any()):
        # An infinite noise floor would pass anything: where the reference overflows, nothing is said.
        return TensorVerdict(tensor, regime, "skipped", "the reference itself is not finite")
    # Half types are scored in fp32: there a rounding of the inputs' own eps would excuse half-precision scores.
    u = torch.finfo(reference.dtype).eps
    scored_in = torch.finfo(torch.promote_types(reference.dtype, torch.float32)).eps
    jitter *= scored_in / u
    c_err, size = closed(c - g), closed(g)

    worst, floor = c_err.max(), r_err.max() + jitter.max() + u * size.max()
    blocks = [_block_max(t) for t in (c_err, r_err, jitter, size)]
    # Gradients cancel: a block whose true gradient is 0 still carries one rounding of the terms that cancelled.
    block_size = size.max() if is_gradient else blocks[3]
    block_ratio = float(_ratio(blocks[0], blocks[1] + blocks[2] + u * block_size).max())
    ratio = float(_ratio(worst, floor))
    mean_limit = MEAN_FACTOR * r_mean + jitter.mean() + u * size.mean()
    mean_ratio = float(_ratio(c_err.mean(), mean_limit))
    by_mean = c.numel() >= MEAN_ELEMENTS and not is_gradient
    status, reason = _decide(ratio, block_ratio, mean_ratio if by_mean else 0.0)
    smallest = torch.finfo(reference.dtype).tiny
    return TensorVerdict(
        tensor=tensor,
        regime=regime,
        status=status,
        reason=reason,
        max_abs_err=float(worst),
        mean_abs_err=float(c_err.mean()),
        max_rel_err=float(_ratio(c_err, size).masked_fill(size == 0, 0.0).max()),
        max_ulp_err=float((c_err / (u * size.clamp(min=smallest))).max()),
        ref_max_abs_err=float(r_err.max()),
        err_budget=OK_FACTOR * float(floor),
        err_ratio=ratio,
        block_ratio=block_ratio,
        mean_ratio=mean_ratio,
    )


def _decide(ratio: float, block_ratio: float, mean_ratio: float) -> tuple[str, str]:
    found = f"error is {ratio:.3g} N (worst block {block_ratio:.3g} N, mean {mean_ratio:.3g} of its limit)"
    if ratio <= OK_FACTOR and block_ratio <= BLOCK_FACTOR and mean_ratio <= 1.0:
        return "ok", ""
    if ratio <= DEGRADED_FACTOR and block_ratio <= 2 * DEGRADED_FACTOR:
        return "degraded", found
    return "mismatch", found


def _ratio(value: Tensor, limit: Tensor) -> Tensor:
    """value / limit, with 0/0 = 0: exact where exactness is asked for."""
    return torch.where(value == 0, torch.zeros_like(value), value / limit)


def _block_max(t: Tensor) -> Tensor:
    """The maximum of each (batch, head) of a 4-D tensor, of each block of rows of a smaller one."""
    if t.ndim >= 4:
        return t.flatten(-2).amax(-1).flatten()
    if t.ndim <= 1:
        return t.max().reshape(1)
    rows = t.amax(-1)  # (..., rows)
    short = -rows.shape[-1] % BLOCK_ROWS
    return torch.nn.functional.pad(rows, (0, short)).unflatten(-1, (-1, BLOCK_ROWS)).amax(-1).flatten()
