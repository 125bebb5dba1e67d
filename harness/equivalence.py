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
CHUNK_ELEMENTS = 1 << 17
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
    is_shadow: bool = False  # compared in float32 although the cell is in half precision

    @property
    def rank(self) -> tuple[int, bool, float]:
        """Worst last. What failed without an error to compare (a wrong shape, a NaN) is worse than any number.

        A shadow speaks for its cell only where it is what fails: its errors are those of another dtype.
        """
        nothing = float("inf") if self.status == "mismatch" else 0.0
        return SEVERITY.index(self.status), not self.is_shadow, nothing if self.err_ratio is None else self.err_ratio


@dataclass(frozen=True)
class Equivalence:
    verdicts: tuple[TensorVerdict, ...]

    @property
    def status(self) -> str:
        return max((v.status for v in self.verdicts), key=SEVERITY.index)

    @property
    def passed(self) -> bool:
        """A tensor that could not be judged has not passed."""
        return bool(self.verdicts) and all(verdict.status == "ok" for verdict in self.verdicts)

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
    reference = references[0]

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

    u = torch.finfo(reference.dtype).eps
    found = _reduce(candidate, references, goldens, may_differ, u)
    if found.misplaced:
        places = f"{found.misplaced} of {candidate.numel()} elements"
        return mismatch(f"{places} are non-finite (or finite) where the golden is not")

    worst, floor = found.c.max(), found.r.max() + found.jitter.max() + u * found.size.max()
    c, r, jitter, size = (_block_max(t, reference.shape) for t in (found.c, found.r, found.jitter, found.size))
    # Gradients cancel: a block whose true gradient is 0 still carries one rounding of the terms that cancelled.
    block_floor = r + jitter + u * (size.max() if is_gradient else size)
    mean_limit = MEAN_FACTOR * found.means[1] + found.means[2] + u * found.means[3]
    ratio = float(_ratio(worst, floor))
    block_ratio = float(_ratio(c, block_floor).max())
    mean_ratio = float(_ratio(found.means[0], mean_limit))
    by_mean = candidate.numel() >= MEAN_ELEMENTS and not is_gradient
    status, reason = _decide(ratio, block_ratio, mean_ratio if by_mean else 0.0)
    if status == "ok" and found.overflows:
        # An infinite noise floor would pass anything: the rest agrees, but the whole cannot be called equal.
        reason = f"the reference itself is not finite in {found.overflows} of {candidate.numel()} elements"
        return TensorVerdict(tensor, regime, "skipped", reason)
    return TensorVerdict(
        tensor=tensor,
        regime=regime,
        status=status,
        reason=reason,
        max_abs_err=float(worst),
        mean_abs_err=float(found.means[0]),
        max_rel_err=found.max_rel_err,
        max_ulp_err=found.max_ulp_err,
        ref_max_abs_err=float(found.r.max()),
        err_budget=OK_FACTOR * float(floor),
        err_ratio=ratio,
        block_ratio=block_ratio,
        mean_ratio=mean_ratio,
    )


@dataclass(frozen=True)
class _Reduced:
    """Maxima of each row, and means of the whole: of |C - G|, of |R - G| over the draws, of J, and of |G|."""

    c: Tensor
    r: Tensor
    jitter: Tensor
    size: Tensor
    means: Tensor  # (4,)
    max_rel_err: float
    max_ulp_err: float
    misplaced: int  # elements whose finiteness is not the golden's
    overflows: int  # elements at which the reference itself is not finite


def _reduce(
    candidate: Tensor, references: Sequence[Tensor], goldens: Sequence[Tensor], may_differ: Tensor | None, u: float
) -> _Reduced:
    """In chunks of rows: the weights of 1024 tokens are 67 MB a draw in float64, and paging those in takes seconds."""
    width = candidate.shape[-1] if candidate.ndim else 1
    rows = candidate.numel() // width
    tensors = [t.detach().reshape(rows, width) for t in (candidate, *references, *goldens)]
    left_open = None if may_differ is None else may_differ.reshape(rows, width)
    step = max(1, CHUNK_ELEMENTS // width)
    parts = [
        _reduce_chunk(
            [t[start : start + step].double() for t in tensors],
            None if left_open is None else left_open[start : start + step],
            u,
            references[0].dtype,
        )
        for start in range(0, rows, step)
    ]
    return _Reduced(
        c=torch.cat([part.c for part in parts]),
        r=torch.cat([part.r for part in parts]),
        jitter=torch.cat([part.jitter for part in parts]),
        size=torch.cat([part.size for part in parts]),
        means=torch.stack([part.means for part in parts]).sum(0) / candidate.numel(),
        max_rel_err=max(part.max_rel_err for part in parts),
        max_ulp_err=max(part.max_ulp_err for part in parts),
        misplaced=sum(part.misplaced for part in parts),
        overflows=sum(part.overflows for part in parts),
    )


def _reduce_chunk(tensors: list[Tensor], may_differ: Tensor | None, u: float, dtype: torch.dtype) -> _Reduced:
    """Here `means` are sums still."""
    draws = len(tensors) // 2
    c, references, goldens = tensors[0], tensors[1 : 1 + draws], tensors[1 + draws :]
    g = goldens[0]
    finite = g.isfinite()
    open_places = ~finite if may_differ is None else ~finite | may_differ

    all_closed = not bool(open_places.any())

    def closed(t: Tensor) -> Tensor:
        return t.abs_() if all_closed else t.abs_().masked_fill_(open_places, 0.0)

    r_err, jitter, r_sum = torch.zeros_like(g), torch.zeros_like(g), torch.zeros((), dtype=torch.float64)
    for r, at in zip(references, goldens, strict=True):
        error = closed(r - at)
        r_err, r_sum = torch.maximum(r_err, error), r_sum + error.sum() / draws
        if at is not g:
            jitter = torch.maximum(jitter, closed(at - g))
    # Half types are scored in fp32: there a jitter of the inputs' own eps would excuse half-precision scores.
    jitter *= torch.finfo(torch.promote_types(dtype, torch.float32)).eps / u
    # Where the reference overflows nothing can be said; the rest of the tensor is judged all the same.
    overflow = ~(r_err.isfinite() & jitter.isfinite())
    open_places |= overflow
    all_closed = all_closed and not bool(overflow.any())
    r_err, jitter = r_err.masked_fill_(overflow, 0.0), jitter.masked_fill_(overflow, 0.0)
    r_sum = r_sum if bool(r_sum.isfinite()) else r_err.sum()
    # The golden's NaN or infinity must stand exactly where the golden has it; there nothing else is compared.
    policy = torch.where(finite, c.isfinite() | overflow, (c == g) | (c.isnan() & g.isnan()))
    if may_differ is not None:
        policy |= may_differ
    c_err, size = closed(c - g), closed(g.clone())
    return _Reduced(
        c=c_err.amax(-1),
        r=r_err.amax(-1),
        jitter=jitter.amax(-1),
        size=size.amax(-1),
        means=torch.stack([c_err.sum(), r_sum, jitter.sum(), size.sum()]),
        max_rel_err=float(_ratio(c_err, size).masked_fill(size == 0, 0.0).max()),
        max_ulp_err=float((c_err / (u * size.clamp(min=torch.finfo(dtype).tiny))).max()),
        misplaced=int((~policy).sum()),
        overflows=int(overflow.sum()),
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


def _block_max(rows: Tensor, shape: torch.Size) -> Tensor:
    """Row maxima to those of each (batch, head) of a 4-D tensor, of each block of rows of a smaller one."""
    if len(shape) <= 1:
        return rows
    if len(shape) >= 4:
        return rows.view(-1, shape[-2]).amax(-1)
    rows = rows.view(-1, shape[-2])
    short = -rows.shape[-1] % BLOCK_ROWS
    return torch.nn.functional.pad(rows, (0, short)).unflatten(-1, (-1, BLOCK_ROWS)).amax(-1).flatten()
