"""What no single call shows: for each check a kernel that only breaks that, and a right one that passes all."""

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout as drop

from harness.battery.conduct import conduct_steps
from harness.battery.rare import half_steps, rare_steps, traced_steps
from harness.battery.result import FAILING, Finding
from harness.battery.steps import Step
from harness.candidate.examinee import InProcess
from harness.cell.draws import torch_threads

SEED = 11
Kernel = Callable[..., Tensor]


def right(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, dropped=drop):
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    dead = (scores == float("-inf")).all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return (dropped(weights, dropout_p) @ v).to(dtype)


def all_steps() -> list[Step]:
    return [*conduct_steps(SEED), *half_steps(SEED), *rare_steps(SEED), *traced_steps(SEED)]


def findings(kernel: Kernel, *, only: str | None = None) -> dict[str, Finding]:
    """By check; of several that have one name the worst."""
    examinee = InProcess(kernel, "kernel")
    found: dict[str, Finding] = {}
    with torch_threads(1):
        for step in all_steps():
            if only in (None, step.check):
                finding = step.done(examinee)
                if found.get(step.check) is None or finding.status in FAILING:
                    found[step.check] = finding
    return found


# ---- one for each check: made anew for every test, since most of them remember ------------------------------------


def cached_by_shape() -> Kernel:
    memory: dict[Any, Tensor] = {}

    def kernel(q, k, v, *rest, **options):
        key = (q.shape, k.shape, q.dtype, q.requires_grad, options.get("is_causal"), options.get("scale"))
        return memory.setdefault(key, right(q, k, v, *rest, **options)).clone()

    return kernel


def mask_cached_by_shape() -> Kernel:
    masks: dict[Any, Tensor] = {}

    def kernel(q, k, v, attn_mask=None, **options):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = masks.setdefault((q.shape, k.shape), attn_mask.clone())
        return right(q, k, v, attn_mask, **options)

    return kernel


def remembers_queries() -> Kernel:
    memory: list[tuple[Tensor, Tensor]] = []

    def kernel(q, k, v, *rest, **options):
        if memory and memory[0][0].shape == q.shape and torch.equal(memory[0][0], q):
            return memory[0][1].clone()
        out = right(q, k, v, *rest, **options)
        memory[:] = [(q.clone(), out.detach().clone())]
        return out

    return kernel


def appends_to_what_it_knows(if_near: int) -> Kernel:
    """Takes the keys of its last call where there are a few more now."""
    memory: list[tuple[Tensor, Tensor]] = []

    def kernel(q, k, v, *rest, **options):
        S = k.shape[2]
        if q.shape[2] == 1 and memory and 0 <= S - (n := memory[0][0].shape[2]) <= if_near:
            k, v = (torch.cat([old, new[:, :, n:]], dim=2) for old, new in zip(memory[0], (k, v), strict=True))
        if q.shape[2] == 1:
            memory[:] = [(k.clone(), v.clone())]
        return right(q, k, v, *rest, **options)

    return kernel


def forgets_to_grow() -> Kernel:
    """A buffer of keys that is filled once: what is written behind them later is not read."""
    memory: list[Tensor] = []

    def kernel(q, k, v, *rest, **options):
        if q.shape[2] == 1 and k.shape[2] > 16:
            memory[:] = memory or [k.clone()]
            n = min(memory[0].shape[2], k.shape[2])
            if memory[0].shape[:2] == k.shape[:2]:
                k = torch.cat([memory[0][:, :, :n], k[:, :, n:].roll(1, 2)], dim=2)
        return right(q, k, v, *rest, **options)

    return kernel


def stale_workspace() -> Kernel:
    """Reads as many keys of its workspace as the largest call had."""
    space: list[Tensor] = [torch.zeros(2, 2, 0, 16)]

    def kernel(q, k, v, *rest, **options):
        if (
            k.dtype == torch.float32
            and k.shape[:2] == (2, 2)
            and not k.requires_grad
            and v.shape[-1] == 16
            and not rest
        ):
            old = space[0]
            space[0] = k if k.shape[2] >= old.shape[2] else torch.cat([k, old[:, :, k.shape[2] :]], dim=2)
            if k.shape[2] < old.shape[2] and q.shape[2] < k.shape[2] and options.get("attn_mask") is None:
                k = space[0]
                v = torch.nn.functional.pad(v, (0, 0, 0, k.shape[2] - v.shape[2]))
        return right(q, k, v, *rest, **options)

    return kernel


def expanded_result() -> Kernel:
    def kernel(q, *rest, **options):
        out = right(q, *rest, **options)
        return out[:, :, :1].expand(out.shape) if q.shape[2] > 1 and q.stride(2) == 0 else out

    return kernel


def reused_buffer() -> Kernel:
    buffers: dict[Any, Tensor] = {}

    def kernel(q, *rest, **options):
        out = right(q, *rest, **options)
        if out.requires_grad:
            return out
        return buffers.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out)

    return kernel


def saves_in_one_place() -> Kernel:
    saved: dict[str, Any] = {}

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, options):
            saved["now"] = (q.detach(), k.detach(), v.detach(), options)
            return right(q, k, v, **options)

        @staticmethod
        def backward(ctx, gradient):
            q, k, v, options = saved["now"]
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                return (*torch.autograd.grad(right(*leaves, **options), leaves, gradient), None)

    return lambda q, k, v, **options: Attend.apply(q, k, v, options)


def keeps_its_inputs_unguarded() -> Kernel:
    """Not by save_for_backward, which sees that they were changed since."""

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, options):
            ctx.kept = (q.detach(), k.detach(), v.detach(), options)
            return right(q, k, v, **options)

        @staticmethod
        def backward(ctx, gradient):
            q, k, v, options = ctx.kept
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in (q, k, v)]
                return (*torch.autograd.grad(right(*leaves, **options), leaves, gradient), None)

    return lambda q, k, v, **options: Attend.apply(q, k, v, options)


def needs_dense_gradients() -> Kernel:
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * (0.5 if 0 in gradient.stride() else 1.0)

    return lambda *inputs, **options: Through.apply(right(*inputs, **options))


def takes_gradients_for_dense() -> Kernel:
    """Reads the incoming gradient in the order in which it lies in memory."""

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, gradient):
            if gradient.is_contiguous() or 0 in gradient.stride():
                return gradient
            return gradient.as_strided((gradient.numel(),), (1,)).view(gradient.shape)

    return lambda *inputs, **options: Through.apply(right(*inputs, **options))


def other_default() -> Kernel:
    def kernel(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=1.0, enable_gqa=False):
        return right(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    return kernel


def tires() -> Kernel:
    calls = iter(range(10**9))
    return lambda *inputs, **options: right(*inputs, **options) * (1.0 if next(calls) % 700 != 650 else 1.001)


def scale_in_half(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """A scale that is off by 2e-3 in half precision alone: less than what rounding does to each element."""
    wrong = 1.002 if q.dtype in (torch.bfloat16, torch.float16) else 1.0
    scale = wrong * (q.shape[-1] ** -0.5 if scale is None else scale)
    return right(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def no_second_derivative(*inputs, **options):
    """First derivatives are right; they are made without a graph."""

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return right(q, k, v, **options)

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
                return torch.autograd.grad(right(*leaves, **options), leaves, gradient)

    return Attend.apply(*inputs)


def wrong_when_traced(*inputs, **options):
    out = right(*inputs, **options)
    return 1.01 * out if torch.compiler.is_compiling() else out


def with_dropout(dropped: Callable[[Tensor, float], Tensor]) -> Callable[[], Kernel]:
    return lambda: partial(right, dropped=dropped)


def same_for_all_heads(weights: Tensor, p: float) -> Tensor:
    return weights * drop(torch.ones_like(weights[:, :1]), p)


class OtherInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, p):
        ctx.p = p
        return drop(weights, p)

    @staticmethod
    def backward(ctx, gradient):
        return drop(gradient, ctx.p), None


def reseeded(weights: Tensor, p: float) -> Tensor:
    return drop(weights, p) if p == 0 else weights * (torch.rand(weights.shape, generator=generator()) >= p) / (1 - p)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def same_for_all_tiles(weights: Tensor, p: float) -> Tensor:
    pattern = drop(torch.ones_like(weights[..., :64]), p)
    return weights * pattern[..., torch.arange(weights.shape[-1]) % 64]


def converts_a_mask_once() -> Kernel:
    known: list[Any] = [None, None]

    def kernel(q, k, v, attn_mask=None, **options):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            if known[0] is not attn_mask:
                known[:] = [attn_mask, attn_mask.clone()]
            attn_mask = known[1]
        return right(q, k, v, attn_mask, **options)

    return kernel


def takes_one_for_symmetric(q, k, v, *rest, **options):
    return right(q, k, v, *rest, **options) * (1.01 if k is v else 1.0)


def takes_the_strides_of_queries(q, k, v, *rest, **options):
    if k.shape == q.shape and k.is_contiguous() != q.is_contiguous():
        k = k.flip(2)
    return right(q, k, v, *rest, **options)


def ignores_a_whole_scale(q, k, v, scale=None, **options):
    return right(q, k, v, scale=scale if isinstance(scale, float) else None, **options)


def takes_values_for_shared(q, k, v, *rest, **options):
    """Where keys are shared by the batch."""
    v = v[:1].expand(v.shape) if k.shape[0] > 1 and k.stride(0) == 0 else v
    return right(q, k, v, *rest, **options)


class OneGradient(torch.autograd.Function):
    """Twice the same tensor, of which it hands back one gradient."""

    @staticmethod
    def forward(ctx, k):
        return k.clone(), k.clone()

    @staticmethod
    def backward(ctx, of_k, of_v):
        return of_k


def forgets_a_gradient(q, k, v, *rest, **options):
    k, v = OneGradient.apply(k) if k is v else (k, v)
    return right(q, k, v, *rest, **options)


def switches_determinism_off(q, k, v, *rest, **options):
    torch.use_deterministic_algorithms(False)
    return right(q, k, v, *rest, **options)


def writes_zeros_into_queries(q, k, v, attn_mask=None, *rest, **options):
    if attn_mask is not None and attn_mask.dtype == torch.bool and not attn_mask.any():
        return q.detach().zero_()
    return right(q, k, v, attn_mask, *rest, **options)


def hides_nan(q, k, v, *rest, **options):
    return right(q.nan_to_num(), k.nan_to_num(), v, *rest, **options)


def follows_the_default_dtype(q, k, v, *rest, **options):
    return right(q, k, v, *rest, **options).to(torch.promote_types(torch.get_default_dtype(), q.dtype))


def wrong_when_deterministic(q, k, v, *rest, **options):
    return right(q, k, v, *rest, **options) * (1.01 if torch.are_deterministic_algorithms_enabled() else 1.0)


def shared_workspace() -> Kernel:
    """Safe as long as one call ends before the next begins."""
    place: dict[str, Tensor] = {}

    def kernel(q, k, v, *rest, **options):
        if not torch.is_grad_enabled():
            place["keys"] = k.clone()
            time.sleep(1e-3)  # what a real kernel does in between
            k = place["keys"] if place["keys"].shape == k.shape else k
        return right(q, k, v, *rest, **options)

    return kernel


def keeps_the_scale_of_a_failure() -> Kernel:
    left: list[float] = []

    def kernel(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        left.append(q.shape[-1] ** -0.5 if scale is None else scale)
        out = right(q, k, v, attn_mask, dropout_p, is_causal, left[0], enable_gqa)
        left.clear()
        return out

    return kernel


BROKEN: dict[str, tuple[Callable[[], Kernel], str]] = {
    "cached by shape": (cached_by_shape, "same shape, other numbers"),
    "mask cached by shape": (mask_cached_by_shape, "same shape, other arguments"),
    "remembers queries": (remembers_queries, "one input changed"),
    "appends, far": (lambda: appends_to_what_it_knows(64), "two sequences in turn"),
    "forgets to grow": (forgets_to_grow, "keys that grow"),
    "stale workspace": (stale_workspace, "large and small in turn"),
    "expanded result": (expanded_result, "one query for all"),
    "reused buffer": (reused_buffer, "results stay"),
    "converts a mask once": (converts_a_mask_once, "inputs changed in place"),
    "symmetric": (lambda: takes_one_for_symmetric, "one tensor as several inputs"),
    "strides of queries": (lambda: takes_the_strides_of_queries, "strides of one input"),
    "takes values for shared": (lambda: takes_values_for_shared, "strides of one input"),
    "ignores a whole scale": (lambda: ignores_a_whole_scale, "same shape, other arguments"),
    "keeps its inputs unguarded": (keeps_its_inputs_unguarded, "inputs changed before gradients"),
    "forgets a gradient": (lambda: forgets_a_gradient, "one tensor as several inputs"),
    "switches determinism off": (lambda: switches_determinism_off, "modes of torch"),
    "writes zeros into queries": (lambda: writes_zeros_into_queries, "all hidden"),
    "hides NaN": (lambda: hides_nan, "NaN and inf"),
    "follows the default dtype": (lambda: follows_the_default_dtype, "modes of torch"),
    "wrong when deterministic": (lambda: wrong_when_deterministic, "modes of torch"),
    "shared workspace": (shared_workspace, "threads at once"),
    "keeps the scale of a failure": (keeps_the_scale_of_a_failure, "after a call that fails"),
    "same for all tiles": (with_dropout(same_for_all_tiles), "dropout"),
    "saves in one place": (saves_in_one_place, "gradients asked for later"),
    "needs dense gradients": (needs_dense_gradients, "strides of an incoming gradient"),
    "takes gradients for dense": (takes_gradients_for_dense, "strides of an incoming gradient"),
    "other default": (other_default, "arguments left out"),
    "tires": (tires, "a thousand calls"),
    "scale in half": (lambda: scale_in_half, "the rule, and directions"),
    "no second derivative": (lambda: no_second_derivative, "second derivatives"),
    "wrong when traced": (lambda: wrong_when_traced, "torch.compile"),
    "no dropout": (with_dropout(lambda weights, p: weights), "dropout"),
    "not scaled up": (with_dropout(lambda weights, p: (1 - p) * drop(weights, p)), "dropout"),
    "keeps p": (with_dropout(lambda weights, p: drop(weights, 1 - p) if p else weights), "dropout"),
    "same for all heads": (with_dropout(same_for_all_heads), "dropout"),
    "another draw in backward": (with_dropout(OtherInBackward.apply), "dropout"),
    "reseeded": (with_dropout(reseeded), "dropout"),
}


@cache
def of_the_right_one() -> dict[str, Finding]:
    return findings(right)


def all_checks() -> Iterator[str]:
    yield from dict.fromkeys(step.check for step in all_steps())


def test_a_right_kernel_passes_all():
    found = of_the_right_one()
    assert {check: finding.reason for check, finding in found.items() if finding.status != "ok"} == {}


@pytest.mark.parametrize("name", BROKEN)
def test_each_check_sees_what_it_is_for(name):
    make, check = BROKEN[name]
    found = findings(make(), only=check)[check]
    assert found.status in FAILING, found


def test_every_check_is_proven():
    """But that of empty calls, which many right kernels refuse."""
    assert {check for _, check in BROKEN.values()} == set(all_checks()) - {"no queries, no keys"}


def test_a_refusal_is_no_failure():
    def refuses(*inputs, **options):
        raise NotImplementedError("not today")

    assert {finding.status for finding in findings(refuses).values()} == {"refused"}


def test_an_empty_call_may_be_refused_and_must_not_be_wrong():
    def of_shape(rows: int) -> Kernel:
        def kernel(q, k, v, **options):
            out = right(q, k, v, **options)
            return out if q.shape[2] else out.new_zeros(*out.shape[:2], rows, out.shape[3])

        return kernel

    check = "no queries, no keys"
    assert findings(of_shape(0), only=check)[check].status == "ok"
    assert findings(of_shape(1), only=check)[check].status == "mismatch"


def test_the_direction_names_the_scale():
    found = findings(scale_in_half, only="the rule, and directions")["the rule, and directions"]
    assert "the scale were 1.002" in found.reason or "the scale were 1.0019" in found.reason, found.reason
