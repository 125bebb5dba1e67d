"""What attention is, written plainly, in float64; and the references that say how exact a right kernel can be."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._nn import scaled_dot_product_attention  # by its own name: torch.nn.functional's is what packages replace
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.candidate.compute import derivatives
from harness.candidate.request import Request

SWALLOWS = -1e4  # a bias below it leaves a score in float32 fewer than three digits behind the point
Problem = Request  # the same fields; of a large call only some of its queries


def textbook(problem: Problem, dropped: Tensor | None = None) -> Tensor:
    """softmax(q k^T scale + mask) v in the dtype of q; a query that may attend nothing gives 0.

    `dropped` (B, H, L, S): what each weight is multiplied by, 0 or 1/(1-p).
    """
    weights = weights_of(problem)
    if dropped is not None:
        weights = weights * dropped.to(weights.dtype)
    return weights @ problem.v.repeat_interleave(_groups(problem), dim=1)


def weights_of(problem: Problem) -> Tensor:
    """(B, H, L, S)"""
    s = scores_of(problem, problem.k.repeat_interleave(_groups(problem), dim=1))
    dead = (s == float("-inf")).all(-1, keepdim=True)
    return torch.softmax(s.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)


def _groups(problem: Problem) -> int:
    return problem.q.shape[1] // max(problem.k.shape[1], 1)


def scores_of(problem: Problem, k: Tensor) -> Tensor:
    """(B, H, L, S), with -inf for what is hidden; `k` has as many heads as q."""
    scale = problem.q.shape[-1] ** -0.5 if problem.scale is None else problem.scale
    s = problem.q @ k.mT * scale
    if problem.is_causal:  # top-left: query i sees keys up to i, however many there are
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    if problem.mask is not None and problem.mask.dtype == torch.bool:
        return s.masked_fill(~problem.mask, float("-inf"))
    return s if problem.mask is None else s + problem.mask


def in_float64(problem: Problem) -> Problem:
    mask = problem.mask
    return replace(
        problem,
        q=problem.q.double(),
        k=problem.k.double(),
        v=problem.v.double(),
        mask=mask if mask is None or mask.dtype == torch.bool else mask.double(),
    )


def at_rows(request: Request, rows: Tensor | None) -> Problem:
    """The same call of some of its queries: `is_causal` becomes rows of a mask."""
    if rows is None:
        return request
    S = request.k.shape[2]
    mask = request.mask
    if mask is not None and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    if request.is_causal:
        below = torch.arange(S) <= rows[:, None]  # (n, S)
        if mask is None:
            mask = below
        else:
            mask = mask & below if mask.dtype == torch.bool else mask.masked_fill(~below, float("-inf"))
    cotangent = None if request.cotangent is None else request.cotangent[:, :, rows]
    return replace(request, q=request.q[:, :, rows], mask=mask, is_causal=False, cotangent=cotangent)


@dataclass(frozen=True)
class Reference:
    """One way in which a right kernel may round."""

    name: str
    run: Callable[[Problem], Tensor]


def sdpa(problem: Problem) -> Tensor:
    return scaled_dot_product_attention(
        problem.q, problem.k, problem.v, attn_mask=problem.mask, is_causal=problem.is_causal, scale=problem.scale,
        enable_gqa=problem.q.shape[1] != problem.k.shape[1],
    )  # fmt: skip


def sdpa_math(problem: Problem) -> Tensor:
    """The plain formula of torch; it takes no mask beside is_causal, so both become one."""
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(_one_mask(problem))


def sdpa_padded(problem: Problem) -> Tensor:
    """Where D and D_v differ torch has no fused kernel; with channels of zeros it has: DeepSeek's practice."""
    D, D_v = problem.q.shape[-1], problem.v.shape[-1]
    scale = D**-0.5 if problem.scale is None else problem.scale
    width = max(D, D_v)
    q, k, v = (F.pad(t, (0, width - t.shape[-1])) for t in (problem.q, problem.k, problem.v))
    return sdpa(replace(problem, q=q, k=k, v=v, scale=scale))[..., :D_v]


def flash_style(problem: Problem) -> Tensor:
    """As fused kernels do in half types: weights rounded before they meet the values, sums in float32."""
    dtype = problem.q.dtype
    groups = problem.q.shape[1] // max(problem.k.shape[1], 1)
    wide = replace(problem, q=problem.q.float(), mask=_wide(problem.mask))
    k, v = (t.float().repeat_interleave(groups, dim=1) for t in (problem.k, problem.v))
    s: Tensor = _RoundedGradient.apply(scores_of(wide, k), dtype)  # type: ignore[no-untyped-call]
    highest = s.amax(-1, keepdim=True).detach().clamp(min=torch.finfo(torch.float32).min)
    weights = (s - highest).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights.to(dtype).float() @ v / torch.where(total == 0, 1.0, total)
    return out.to(dtype)


class _RoundedGradient(torch.autograd.Function):
    """As it is; its gradient is rounded to a dtype, as dS is before it meets q and k."""

    @staticmethod
    def forward(ctx, t: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.dtype = dtype
        return t.view_as(t)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return gradient.to(ctx.dtype).to(gradient.dtype), None


def textbook_autocast(problem: Problem) -> Tensor:
    """What a kernel in plain torch does under autocast: its products are rounded to bfloat16."""
    mask = problem.mask
    dead = None
    if mask is not None or problem.is_causal:
        dead = ~allowed_rows(problem)
    plain = replace(problem, mask=mask)
    groups = problem.q.shape[1] // problem.k.shape[1]
    k, v = (t.repeat_interleave(groups, dim=1) for t in (plain.k, plain.v))
    s = scores_of(plain, k)
    weights = torch.softmax(s if dead is None else s.masked_fill(dead, 0.0), dim=-1)
    return (weights if dead is None else weights.masked_fill(dead, 0.0)) @ v


def allowed_rows(problem: Problem) -> Tensor:
    """(..., L or 1, 1): whether a query sees any key."""
    one = _one_mask(problem).mask
    assert one is not None
    seen = one if one.dtype == torch.bool else one != float("-inf")
    return seen.any(-1, keepdim=True)


REFERENCES = (Reference("SDPA", sdpa_padded), Reference("SDPA's plain formula", sdpa_math))
HALF = Reference("weights rounded before the values", flash_style)
TWICE_DIFFERENTIABLE = (REFERENCES[1], Reference("the textbook", textbook))  # torch's fused kernel is not


def references_of(problem: Problem) -> tuple[Reference, ...]:
    if problem.directions:
        return TWICE_DIFFERENTIABLE
    return (*REFERENCES, HALF) if problem.q.dtype in (torch.bfloat16, torch.float16) else REFERENCES


def outcome(problem: Problem, run: Callable[[Problem], Tensor]) -> dict[str, Tensor]:
    """ "out", and the first and second derivatives that the problem asks for, as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells why it takes no fused kernel
        if problem.cotangent is None or not problem.gradients:
            with torch.no_grad():
                return {"out": run(problem)}
        with torch.enable_grad():
            leaves: dict[str, Any] = {
                name: problem.tensors[name].detach().requires_grad_() for name in problem.gradients
            }
            tied = {name: leaves[problem.tied[0]] for name in problem.tied if problem.tied[0] in leaves}
            out = run(replace(problem, **leaves | tied))
            along = tuple(d.to(leaf.dtype) for d, leaf in zip(problem.directions, leaves.values(), strict=False))
            return {"out": out.detach()} | derivatives(out, leaves, problem.cotangent.to(out.dtype), along)


def uncancelled(problem: Problem, dropped: Tensor | None = None) -> dict[str, Tensor]:
    """Of a problem in float64, for each gradient that it asks for: what its terms come to if none cancels another.

    The gradient of a score is the difference of two terms, exactly 0 where a query sees one key: what remains of them
    in a kernel's own dtype is rounding of that size, whatever the gradient is.
    """
    assert problem.cotangent is not None
    groups, scale = _groups(problem), problem.q.shape[-1] ** -0.5 if problem.scale is None else problem.scale
    k, v = (t.repeat_interleave(groups, dim=1) for t in (problem.k, problem.v))
    weights, cotangent = weights_of(problem), problem.cotangent.double()
    factor = 1.0 if dropped is None else dropped
    pull = (cotangent @ v.mT * factor).abs()
    terms = weights * (pull + (weights * pull).sum(-1, keepdim=True))  # (B, H, L, S)

    def of_groups(t: Tensor) -> Tensor:
        return t.unflatten(1, (-1, groups)).sum(2)

    made: dict[str, Callable[[], Tensor]] = {
        "q": lambda: abs(scale) * terms @ k.abs(),
        "k": lambda: of_groups(abs(scale) * terms.mT @ problem.q.abs()),
        "v": lambda: of_groups((weights * factor).mT @ cotangent.abs()),
        "mask": lambda: terms.sum_to_size(problem.tensors["mask"].shape),
    }
    found = {f"grad {name}": made[name]() for name in problem.gradients}
    if (
        problem.tied and (first := f"grad {problem.tied[0]}") in found
    ):  # of one tensor that is several inputs: their sum
        found[first] = torch.stack([made[name]() for name in problem.tied]).sum(0)
    return found


def lost_rows(problem: Problem) -> Tensor | None:
    """(B or 1, H or 1, L or 1): queries whose every key has a bias so low that it swallows the score; None: none.

    In exact arithmetic such a bias takes nothing away, for all keys share it. Rounded, torch gives the mean of all
    values, a kernel that works with exp2 or keeps the log of the sum something else, and torch's own backward pass
    disagrees with its forward one: the value is left open.
    """
    mask = problem.mask
    if mask is None or not mask.is_floating_point():
        return None
    highest = mask.amax(-1)
    lost = (highest < SWALLOWS) & highest.isfinite()
    return lost.view((1,) * (3 - lost.ndim) + lost.shape) if bool(lost.any()) else None


def largest_log_sum(problem: Problem) -> float:
    """The largest |log sum exp| of any query, of a problem in float64: who keeps it has it rounded."""
    scores = scores_of(problem, problem.k.repeat_interleave(_groups(problem), dim=1))
    return float(torch.logsumexp(scores, dim=-1).nan_to_num(0.0, 0.0, 0.0).abs().max()) if scores.numel() else 0.0


def _one_mask(problem: Problem) -> Problem:
    """`is_causal` beside a mask as part of that mask."""
    if not problem.is_causal or problem.mask is None:
        if problem.is_causal:
            return replace(problem, mask=_below(problem), is_causal=False)
        return problem
    mask, below = problem.mask, _below(problem)
    one = mask & below if mask.dtype == torch.bool else mask.masked_fill(~below, float("-inf"))
    return replace(problem, mask=one, is_causal=False)


def _below(problem: Problem) -> Tensor:
    return torch.ones(problem.q.shape[2], problem.k.shape[2], dtype=torch.bool).tril()


def _wide(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None or mask.dtype == torch.bool else mask.float()
