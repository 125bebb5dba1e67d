"""The acceptance rule: when is a candidate numerically the same as its reference?

C = candidate; R = reference in the same dtype; G = golden, the reference in float64 on the already rounded inputs and
weights; u = eps of the dtype. Four more draws repeat R and G with inputs and weights jittered by a relative u.
The noise floor is N = max|R - G| + J + u max|G|: the reference's own rounding (the largest of the draws: of a small
tensor one draw says little), how far G moves under a jitter of the eps that scores are computed in (the problem's
conditioning), and one rounding.
Every test is written `value <= limit`, so that a NaN never passes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.record import DEGRADED_FACTOR as DEGRADED_FACTOR
from harness.record import OK_FACTOR as OK_FACTOR

if TYPE_CHECKING:
    from pandas import DataFrame

# Over the whole tensor OK_FACTOR and DEGRADED_FACTOR hold, in N; for blocks twice that.
BLOCK_FACTOR = 4.0  # of the block's own N: a block's maxima scatter more
MEAN_FACTOR = 1.5  # of mean|R - G|
# The mean of n errors scatters by 0.76 / sqrt(n) of itself: below this size a factor of 1.5 is within chance. So it is
# for gradients of any size: a weight's gradient is a sum over a few dominant tokens, and its errors go together.
MEAN_ELEMENTS = 256
GRADIENT_FACTOR = 2.0  # of N, for gradients
NOISE_FACTOR = 2.0  # once more, for a gradient that is nothing but rounding, also in the reference
BLOCK_ROWS = 16
JITTER_DRAWS = 4
LARGE_ELEMENTS, LARGE_DRAWS = 1 << 20, 2  # of tensors so large the maxima hardly scatter: fewer jittered draws will do
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
    is_aside: bool = False  # not the cell's own comparison: a float32 shadow, or a check without a reference

    @property
    def rank(self) -> tuple[int, bool, float]:
        """Worst last. What failed without an error to compare (a wrong shape, a NaN) is worse than any number.

        What stands aside speaks for its cell only where it is what fails: its errors are not those of the cell.
        """
        nothing = float("inf") if self.status == "mismatch" else 0.0
        return SEVERITY.index(self.status), not self.is_aside, nothing if self.err_ratio is None else self.err_ratio


def worst_of(verdicts: Sequence[TensorVerdict]) -> TensorVerdict:
    return max(verdicts, key=lambda v: v.rank)


@dataclass(frozen=True)
class Sampled:
    """What of a large cell had a golden."""

    seed: int
    rows: tuple[int, ...]  # queries, or the places of single decode steps
    regimes: tuple[str, ...]  # in which the whole length was judged
    short_length: int  # at which all were


@dataclass(frozen=True)
class Equivalence:
    verdicts: tuple[TensorVerdict, ...]
    sampled: Sampled | None = None  # None: every element had a golden

    @property
    def status(self) -> str:
        """The worst of all; `skipped` where all that could be judged is ok, and something could not be."""
        return "skipped" if self.judged == "ok" and not self.passed else self.judged

    @property
    def judged(self) -> str:
        """The worst of what could be judged: a regime that overflows leaves the cell's other regimes to speak."""
        return max((v.status for v in self.verdicts), key=SEVERITY.index)

    @property
    def passed(self) -> bool:
        """A tensor that could not be judged has not passed."""
        return bool(self.verdicts) and all(verdict.status == "ok" for verdict in self.verdicts)

    @property
    def worst(self) -> TensorVerdict:
        return worst_of(self.verdicts)

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
    yardstick = Yardstick.of(references, goldens, may_differ=may_differ, is_gradient=is_gradient)
    return yardstick.judge(tensor, candidate, regime=regime)


@dataclass(frozen=True)
class Term:
    """One part of the noise floor: its maximum over each row of a tensor, and its sum over all elements."""

    rows: Tensor  # (rows,), float64
    total: float

    @classmethod
    def of(cls, values: Tensor) -> "Term":
        return cls(values.amax(-1), float(values.sum()))

    @classmethod
    def joined(cls, parts: Sequence["Term"]) -> "Term":
        rows = [part.rows for part in parts] or [torch.zeros(0, dtype=torch.float64)]
        return cls(torch.cat(rows), sum(part.total for part in parts))


@dataclass(frozen=True)
class Floor:
    """The terms of the noise floor over some rows of a tensor, and the places (rows, width) that have none."""

    r: Term  # |R - G|: rows are the largest of any draw, the sum is the mean of the draws'
    jitter: Term
    size: Term  # |G|
    not_finite: Tensor | None  # the golden: there the candidate must be the same
    overflow: Tensor | None  # the reference
    open_places: Tensor | None  # where nothing is compared: any of the two, or left open

    @classmethod
    def of(
        cls, references: list[Tensor], goldens: list[Tensor], left_open: Tensor | None, dtype: torch.dtype
    ) -> "Floor":
        """Of tensors in float64; `dtype` is the reference's own."""
        g = goldens[0]
        not_finite = ~g.isfinite()
        open_places = not_finite if left_open is None else not_finite | left_open
        all_closed = not bool(open_places.any())

        def closed(t: Tensor) -> Tensor:
            return t.abs_() if all_closed else t.abs_().masked_fill_(open_places, 0.0)

        r_err, jitter, r_sum = torch.zeros_like(g), torch.zeros_like(g), torch.zeros((), dtype=torch.float64)
        for r, at in zip(references, goldens, strict=True):
            error = closed(r - at)
            r_err, r_sum = torch.maximum(r_err, error), r_sum + error.sum() / len(goldens)
            if at is not g:
                jitter = torch.maximum(jitter, closed(at - g))
        jitter *= conditioning(dtype)
        if dtype == torch.float64:  # the golden is then no more exact than the reference: its own rounding adds as much
            r_err, r_sum = 2 * r_err, 2 * r_sum
        # Where the reference overflows nothing can be said; the rest of the tensor is judged all the same.
        overflow = ~(r_err.isfinite() & jitter.isfinite())
        open_places = open_places | overflow
        r_err, jitter = r_err.masked_fill_(overflow, 0.0), jitter.masked_fill_(overflow, 0.0)
        r_sum = r_sum if bool(r_sum.isfinite()) else r_err.sum()
        return cls(
            r=Term(r_err.amax(-1), float(r_sum)),
            jitter=Term.of(jitter),
            size=Term.of(g.abs().masked_fill_(open_places, 0.0)),
            not_finite=not_finite,
            overflow=overflow,
            open_places=open_places,
        )

    @classmethod
    def joined(cls, parts: Sequence["Floor"]) -> "Floor":
        """Of all rows; None for places of which there are none."""

        def places(masks: list[Tensor | None]) -> Tensor | None:
            given = [mask for mask in masks if mask is not None]
            return torch.cat(given) if any(bool(mask.any()) for mask in given) else None

        return cls(
            r=Term.joined([part.r for part in parts]),
            jitter=Term.joined([part.jitter for part in parts]),
            size=Term.joined([part.size for part in parts]),
            not_finite=places([part.not_finite for part in parts]),
            overflow=places([part.overflow for part in parts]),
            open_places=places([part.open_places for part in parts]),
        )


@dataclass(frozen=True)
class Yardstick:
    """What one tensor of any candidate is held to: the golden, and the noise floor's terms.

    Made once, it judges a candidate in a few passes: a study tries a hundred candidates on the same draws.
    """

    shape: torch.Size
    dtype: torch.dtype
    golden: Tensor  # (rows, width), float64
    floor: Floor
    left_open: Tensor | None
    is_gradient: bool
    ref_max_abs_err: float

    @classmethod
    def of(
        cls,
        references: Sequence[Tensor],
        goldens: Sequence[Tensor],
        *,
        may_differ: Tensor | None = None,
        is_gradient: bool = False,
    ) -> "Yardstick":
        """In chunks of rows: weights of 1024 tokens are 67 MB a draw in float64, and paging those in takes seconds."""
        first = references[0]
        width = first.shape[-1] if first.ndim else 1
        rows = first.numel() // max(width, 1)
        r_rows, g_rows = ([t.detach().reshape(rows, width) for t in side] for side in (references, goldens))
        left_open = None if may_differ is None else may_differ.reshape(rows, width)
        step = max(1, CHUNK_ELEMENTS // max(width, 1))
        chunks = [slice(start, start + step) for start in range(0, rows, step)]
        floor = Floor.joined(
            [
                Floor.of(
                    [t[chunk].double() for t in r_rows],
                    [t[chunk].double() for t in g_rows],
                    None if left_open is None else left_open[chunk],
                    first.dtype,
                )
                for chunk in chunks
            ]
        )
        ref_max_abs_err = float(floor.r.rows.max()) if rows else 0.0
        if first.dtype == torch.float64 and floor.r.total == 0:
            # Golden and reference made the same sums in the same order: how much the order matters does not show, and
            # the conditioning stands for it.
            floor = replace(floor, r=floor.jitter)
        golden = g_rows[0].double()
        return cls(first.shape, first.dtype, golden, floor, left_open, is_gradient, ref_max_abs_err)

    def judge(self, tensor: str, candidate: Any, *, regime: str = "plain") -> TensorVerdict:
        def mismatch(reason: str) -> TensorVerdict:
            return TensorVerdict(tensor, regime, "mismatch", reason)

        if not isinstance(candidate, Tensor):
            return mismatch(f"{type(candidate).__name__} instead of a tensor")
        if candidate.shape != self.shape:
            return mismatch(f"shape {tuple(candidate.shape)} instead of {tuple(self.shape)}")
        if candidate.dtype != self.dtype:
            return mismatch(f"dtype {candidate.dtype} instead of {self.dtype}")
        elements = candidate.numel()
        if elements == 0:
            return TensorVerdict(tensor, regime, "ok")
        u = torch.finfo(self.dtype).eps
        c_rows, c_sum, max_rel_err, misplaced = self._errors(candidate.detach().reshape(self.golden.shape))
        if misplaced:
            places = f"{misplaced} of {elements} elements"
            return mismatch(f"{places} are NaN or infinite where the golden is finite, or finite where it is not")

        slack = self._slack()
        terms = (self.floor.r, self.floor.jitter, self.floor.size)
        r, jitter, size = (term.rows for term in terms)
        worst, N = c_rows.max(), slack * (r.max() + jitter.max() + u * size.max())
        c, r, jitter, size = (_block_max(rows, self.shape) for rows in (c_rows, r, jitter, size))
        # Gradients cancel: a block whose true gradient is 0 still carries one rounding of the terms that cancelled.
        block_floor = slack * (r + jitter + u * (size.max() if self.is_gradient else size))
        r_mean, jitter_mean, size_mean = (term.total / elements for term in terms)
        mean_limit = MEAN_FACTOR * r_mean + jitter_mean + u * size_mean
        ratio = float(ratio_to(worst, N))
        block_ratio = float(ratio_to(c, block_floor).max())
        mean_ratio = float(ratio_to(*torch.tensor([c_sum / elements, mean_limit], dtype=torch.float64)))
        by_mean = elements >= MEAN_ELEMENTS and not self.is_gradient
        status, reason = decide(ratio, block_ratio, mean_ratio if by_mean else 0.0), ""
        if status != "ok":
            mean = f"{mean_ratio if by_mean else 0.0:.3g} of its limit"
            reason = f"error is {ratio:.3g} N (worst block {block_ratio:.3g} N, mean {mean})"
        overflows = 0 if self.floor.overflow is None else int(self.floor.overflow.sum())
        if status == "ok" and overflows:
            # An infinite noise floor would pass anything: the rest agrees, but the whole cannot be called equal.
            reason = f"the reference itself is not finite in {overflows} of {elements} elements"
            return TensorVerdict(tensor, regime, "skipped", reason)
        return TensorVerdict(
            tensor=tensor,
            regime=regime,
            status=status,
            reason=reason,
            max_abs_err=float(worst),
            mean_abs_err=c_sum / elements,
            max_rel_err=max_rel_err,
            max_ulp_err=max_rel_err / u,
            ref_max_abs_err=self.ref_max_abs_err,
            err_budget=OK_FACTOR * float(N),
            err_ratio=ratio,
            block_ratio=block_ratio,
            mean_ratio=mean_ratio,
        )

    def _slack(self) -> float:
        """How much more than its parts N is.

        A gradient is a sum over a few dominant tokens: its errors go together, and their maximum scatters as that of a
        few numbers does. And one without a right digit even in the reference, because it is 0 in exact arithmetic, is
        rounding alone: how much there is depends on the order of the sums.
        """
        if not self.is_gradient:
            return 1.0
        return GRADIENT_FACTOR * (NOISE_FACTOR if bool(self.floor.size.rows.max() <= self.floor.r.rows.max()) else 1.0)

    def _errors(self, candidate: Tensor) -> tuple[Tensor, float, float, int]:
        """|C - G|: its maximum over each row, its sum, its largest share of |G|; and how many are misplaced."""
        rows, width = candidate.shape
        step = max(1, CHUNK_ELEMENTS // width)
        maxima, total, relative, misplaced = [], 0.0, 0.0, 0
        for start in range(0, rows, step):
            part = slice(start, start + step)
            c, g = candidate[part].double(), self.golden[part]
            error = (c - g).abs_()
            if self.floor.open_places is not None:
                error.masked_fill_(self.floor.open_places[part], 0.0)
            largest = error.amax(-1)
            # NaN or infinity where the golden is finite shows in the error; where it is not, the two must be the same.
            if self.floor.not_finite is not None or not bool(largest.isfinite().all()):
                misplaced += self._misplaced(c, g, part)
            maxima.append(largest)
            total += float(error.sum())
            size = g.abs().clamp_(min=torch.finfo(self.dtype).tiny)
            relative = max(relative, float(ratio_to(error, size).max()))
        return torch.cat(maxima), total, relative, misplaced

    def _misplaced(self, c: Tensor, g: Tensor, part: slice) -> int:
        policy = torch.where(g.isfinite(), c.isfinite(), (c == g) | (c.isnan() & g.isnan()))
        for excused in (self.floor.overflow, self.left_open):
            if excused is not None:
                policy |= excused[part]
        return int((~policy).sum())


def conditioning(dtype: torch.dtype) -> float:
    """How much of the golden's movement counts. Half types are scored in float32: there a jitter of the inputs' own
    eps would excuse half-precision scores.
    """
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps / torch.finfo(dtype).eps


def decide(ratio: float, block_ratio: float, mean_ratio: float = 0.0) -> str:
    if ratio <= OK_FACTOR and block_ratio <= BLOCK_FACTOR and mean_ratio <= 1.0:
        return "ok"
    return "degraded" if ratio <= DEGRADED_FACTOR and block_ratio <= 2 * DEGRADED_FACTOR else "mismatch"


def ratio_to(value: Tensor, limit: Tensor) -> Tensor:
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
