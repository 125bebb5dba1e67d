"""What each key weighed, also in a kernel that returns no weights: values that are one-hot bring the weights out."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.candidate.request import Request
from harness.cell.golden import in_float64, scores_of, weights_of
from harness.diagnosis.evidence import Witness
from harness.diagnosis.place import described, drawn, where_wrong

MOST_KEYS, MOST_CALLS, MOST_WEIGHTS = 1100, 64, 1 << 22
GONE = 1e-3  # of what it should be: a weight that small is missing
LEAST = 1e-4  # smaller weights are not looked at one by one
SUM_OFF = 1e-3
FITS, WEIGHED = 1e-3, 1e-2
MOST_OF = 0.9  # of the pairs in a block of rows and keys, to speak of the block


@dataclass(frozen=True, eq=False)
class Weights:
    """(B, H, L, S), float64: those that the kernel used, and those that it should have."""

    used: Tensor
    true: Tensor
    request: Request

    @property
    def are_right(self) -> bool:
        return bool(((self.used - self.true).abs() <= GONE * self.true.clamp(min=LEAST)).all())

    @property
    def missing(self) -> Tensor:
        return (self.true > LEAST) & (self.used.abs() <= GONE * self.true)

    @property
    def extra(self) -> Tensor:
        return (self.true == 0) & (self.used.abs() > LEAST)

    def sentences(self) -> Iterator[str]:
        """Each holds for every weight that it speaks of."""
        if not bool(self.used.isfinite().all()):
            return
        if self.are_right:
            yield "the weights are right: what is wrong comes with the values, or with what is done after them"
            return
        if not bool(self.used.any()):
            yield "no key has any weight"
            return
        hidden = self.true == 0
        for marks, verb, among in ((self.missing, "missing", ~hidden), (self.extra, "seen though hidden", hidden)):
            if bool(marks.any()):
                yield told_keys(marks, verb, among)
        if not bool(self.missing.any()) and not bool(self.extra.any()):
            yield from self._weighed()
        sums, true = self.used.sum(-1), self.true.sum(-1)
        off = (sums - true).abs() > SUM_OFF
        if bool(off.any()):
            low, high = float(sums[off].min()), float(sums[off].max())
            spread = f"{low:.4g}" if high - low <= 1e-3 * abs(high) else f"{low:.4g} to {high:.4g}"
            yield f"weights sum to {spread} instead of 1" + (
                "" if bool(off.all()) else f" ({where_wrong(off, ('batch', 'head', 'row'))})"
            )

    def _weighed(self) -> Iterator[str]:
        """Where no key is missing and none too many: a factor of all scores, or single keys beside the others."""
        if (
            (fit := self.fit()) is not None
            and fit.residual <= FITS
            and max(abs(fit.scale - 1), abs((fit.mask or 1) - 1)) > FITS
        ):
            if abs(fit.scale - 1) > FITS:
                yield f"by its weights, q k^T is multiplied by {fit.scale:.5g} times the scale that was asked for"
            if fit.mask is not None and abs(fit.mask - 1) > FITS:
                times = "as if its numbers were all alike" if abs(fit.mask) <= FITS else f"{fit.mask:.5g} times"
                yield f"by its weights, the mask is added {times}"
            return
        both = (self.true > LEAST) & (self.used > LEAST)
        ratio = torch.where(both, (self.used.clamp(min=1e-300) / self.true.clamp(min=1e-300)).log(), math.nan)
        off = both & ((ratio - ratio.nanmedian(-1, keepdim=True).values).abs() > WEIGHED)
        if bool(off.any()) and float(off.sum() / both.sum()) < 0.4:
            yield told_keys(off, "weighed otherwise than the others", both)

    @property
    def picture(self) -> tuple[str, ...]:
        """Rows by keys: how far the weights of any head are off."""
        error = (self.used - self.true).abs().nan_to_num(math.inf).flatten(0, 1).amax(0)
        return drawn(error / GONE, "keys ->, a line for each row: how far its weights are off")

    def fit(self) -> "ScoreFit | None":
        """Log weights against scores and mask, where both see a key: the factors of each."""
        both = (self.true > LEAST) & (self.used > LEAST)
        several = both.sum(-1, keepdim=True) > 1
        both = both & several
        if int(both.sum()) < 8 or not bool(self.used.isfinite().all()):
            return None
        problem = in_float64(self.request)
        groups = problem.q.shape[1] // problem.k.shape[1]
        k = problem.k.repeat_interleave(groups, dim=1)
        raw = scores_of(replace(problem, mask=None, is_causal=False), k)
        columns = [raw]
        has_mask = problem.mask is not None and problem.mask.is_floating_point()
        if has_mask:
            assert problem.mask is not None
            columns.append(problem.mask.expand(raw.shape).masked_fill(problem.mask.expand(raw.shape) < -1e4, 0.0))
        y = _centred(self.used.clamp(min=1e-300).log(), both)
        xs = torch.stack([_centred(column, both) for column in columns], dim=-1)
        sizes = torch.stack([column.abs().max() for column in columns])
        if bool((xs.abs().amax(0) <= FITS * sizes.clamp(min=1e-9)).any()):  # of what hardly differs nothing can be said
            return None
        solution = torch.linalg.lstsq(xs, y[:, None]).solution[:, 0]
        left = y - xs @ solution
        return ScoreFit(
            scale=float(solution[0]),
            mask=float(solution[1]) if has_mask else None,
            residual=float(left.norm() / max(float(y.norm()), 1e-300)),
        )


@dataclass(frozen=True)
class ScoreFit:
    """By how much scores and mask are multiplied, and what that does not explain."""

    scale: float
    mask: float | None
    residual: float


def _centred(t: Tensor, where: Tensor) -> Tensor:
    """Each row without its mean: a factor of all weights of a row is no difference of scores."""
    t = torch.where(where, t, 0.0)
    mean = t.sum(-1, keepdim=True) / where.sum(-1, keepdim=True).clamp(min=1)
    return (t - mean)[where]


def weights_used(witness: Witness, request: Request) -> Weights | None:
    """None where the kernel does not answer, or the call is too large."""
    (B, H, L, _), (_, H_kv, S, D_v) = request.q.shape, request.v.shape
    if S > MOST_KEYS or math.ceil(S / max(D_v, 1)) > MOST_CALLS or B * H * L * S > MOST_WEIGHTS or not S:
        return None
    bare = replace(request, gradients=(), cotangent=None, directions=())
    parts = []
    for start in range(0, S, D_v):  # as many channels as in the call itself
        one_hot = torch.zeros(S, D_v, dtype=request.v.dtype)
        width = min(D_v, S - start)
        one_hot[start : start + width, :width] = torch.eye(width, dtype=request.v.dtype)
        reply = witness.evidence(replace(bare, v=one_hot.expand(B, H_kv, S, D_v).contiguous())).reply
        if reply.failure is not None or reply.out.shape != (B, H, L, D_v):
            return None
        parts.append(reply.out.double()[..., :width])
    return Weights(torch.cat(parts, dim=-1), weights_of(in_float64(bare)), bare)


def told_keys(marks: Tensor, verb: str, seen: Tensor | None = None) -> str:
    """`marks` (B, H, L, S): which (row, key) pairs of those that are `seen`; by distance where that says it, else by
    rows and keys.
    """
    any_head = marks.flatten(0, 1).any(0)  # (L, S)
    L, S = any_head.shape
    rows, keys = any_head.any(1), any_head.any(0)
    away = (torch.arange(S) - torch.arange(L)[:, None])[any_head]
    where = "" if bool(marks.flatten(0, 1).any(-1).any(-1).all()) else _heads(marks)
    low, high = int(away.min()), int(away.max())
    if low == high and int(rows.sum()) > 2:
        place = (
            "at the row's own position" if not low else f"{abs(low)} {'after' if low > 0 else 'before'} the row's own"
        )
        return f"the key {place} is {verb}{where}"
    which = described("key", keys.tolist())
    box = rows[:, None] & keys & (True if seen is None else seen.flatten(0, 1).any(0))
    if float(any_head.sum()) < MOST_OF * float(box.sum()):
        return f"{int(any_head.sum())} of {any_head.numel()} pairs of row and key are {verb}{where}"
    one = which.startswith(("key ", "every"))
    return f"{which} {'is' if one else 'are'} {verb}" + (
        where if bool(rows.all()) else f" in {described('row', rows.tolist())}{where}"
    )


def _heads(marks: Tensor) -> str:
    entries, heads = marks.flatten(1).any(1), marks.transpose(0, 1).flatten(1).any(1)
    parts = [
        described(name, found.tolist())
        for name, found in (("batch", entries), ("head", heads))
        if not bool(found.all())
    ]
    return f" ({', '.join(parts)})" if parts else ""
