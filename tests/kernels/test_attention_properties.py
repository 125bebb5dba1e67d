"""`harness.attention` equals SDPA and a float64 golden written here, over random problems, gradients included.

Nothing of harness's mask code is used: visibility is spelled out in loops, the golden in plain formulas. Each dtype
judges 500 problems with both kernels (2,000 in all) and 75 more with softcap or sinks; the tests count what was judged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import harness
from harness.cell.rule import BLOCK_FACTOR, OK_FACTOR, TensorVerdict, judge

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CASES = 500  # a dtype; four of them make the 2,000
SOFT_CASES = 75
DRAWS = 5  # the inputs as they are, and four jittered by a relative eps
INF = float("inf")

Named = dict[str, Tensor]  # q, k, v; the mask if it is float; the sinks
Function = Callable[["Problem", Named], Any]


@dataclass(frozen=True)
class Problem:
    """One call of attention."""

    inputs: Named
    mask: Tensor | None  # if it is bool
    causal: bool
    q_start: int | Tensor | None
    window: int | tuple[int, int] | None
    scale: float | None
    softcap: float | None
    visible: Tensor  # (B, H, L, S): what all of the above lets each query see

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs["q"].dtype

    @property
    def softmax_ignores_mask(self) -> bool:
        """A bias that is the same for all keys of a row changes nothing, unless a sink stands beside them."""
        return "sinks" not in self.inputs and self.inputs["mask"].shape[-1:] in ((), (1,))

    def __repr__(self) -> str:
        shapes = {name: tuple(t.shape) for name, t in self.inputs.items()}
        mask = None if self.mask is None else tuple(self.mask.shape)
        return f"{self.dtype} {shapes} bool mask {mask} {self.causal=} {self.q_start=} {self.window=} {self.softcap=}"


def sees(back: int, causal: bool, window: int | tuple[int, int] | None) -> bool:
    """Whether a query sees the key that stands `back` positions behind it: the words of the specification."""
    if causal and back < 0:
        return False
    if window is None:
        return True
    if isinstance(window, int):
        return 0 <= back < window
    left, right = window
    return (left == -1 or back <= left) and (right == -1 or -back <= right)


@st.composite
def problems(draw: Any, dtype: torch.dtype, *, soft: bool = False) -> Problem:
    B, H = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    H_kv = draw(st.sampled_from([d for d in range(1, H + 1) if H % d == 0]))
    length = st.one_of(st.just(1), st.integers(2, 7), st.integers(8, 24))
    L, S = draw(length), draw(length)
    D, D_v = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (size * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)

    loud = draw(st.sampled_from([0.1, 1.0, 4.0]))
    inputs = {"q": normal(B, H, L, D, size=loud), "k": normal(B, H_kv, S, D), "v": normal(B, H_kv, S, D_v)}
    causal = draw(st.booleans())
    side = st.integers(-1, S)
    window = draw(st.one_of(st.none(), st.integers(1, S + 1), st.tuples(side, side)))
    start = st.integers(-L, S + 2)
    q_start = draw(st.one_of(st.none(), start, st.lists(start, min_size=B, max_size=B).map(torch.tensor)))
    starts = [S - L] * B if q_start is None else torch.as_tensor(q_start).expand(B).tolist()
    seen = [[[sees(at + i - j, causal, window) for j in range(S)] for i in range(L)] for at in starts]
    visible = torch.tensor(seen)[:, None].expand(B, H, L, S)

    mask = None
    kind = draw(st.sampled_from(["none", "bool", "float", "float32"]))
    if kind != "none":
        shape = tuple(draw(st.sampled_from([1, size])) for size in (B, H, L, S))[draw(st.integers(0, 4)) :]
        keep = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.3, 0.8, 1.0]))
        visible = visible & keep
        if kind == "bool":
            mask = keep
        else:
            bias = normal(*shape, size=3.0).masked_fill(~keep, -INF)
            inputs["mask"] = bias.float() if kind == "float32" else bias
    if soft and draw(st.booleans()):
        inputs["sinks"] = normal(H, size=2.0)
    scale = draw(st.sampled_from([None, 0.3, 1.0]))
    softcap = draw(st.sampled_from([None, 0.5, 5.0])) if soft else None
    return Problem(inputs, mask, causal, q_start, window, scale, softcap, visible)


def candidate(problem: Problem, inputs: Named, **options: Any) -> Any:
    return harness.attention(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        mask=inputs.get("mask", problem.mask),
        sinks=inputs.get("sinks"),
        causal=problem.causal,
        q_start=problem.q_start,
        window=problem.window,
        scale=problem.scale,
        softcap=problem.softcap,
        **options,
    )


# The functions below take every input with one more axis in front: the draws.


def aligned(mask: Tensor) -> Tensor:
    """A mask of any broadcastable shape as (draws, B | 1, H | 1, L | 1, S | 1)."""
    return mask.reshape(mask.shape[0], *[1] * (5 - mask.ndim), *mask.shape[1:])


def logits(problem: Problem, inputs: Named) -> Tensor:
    """Scaled, capped, biased; what is hidden is not yet. (draws, B, H, L, S)."""
    q, k = inputs["q"], inputs["k"]
    scale = 1 / math.sqrt(q.shape[-1]) if problem.scale is None else problem.scale
    scores = torch.einsum("nbhid,nbhjd->nbhij", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if "mask" in inputs:
        mask = aligned(inputs["mask"])
        scores = scores + torch.where(mask > -INF, mask, 0)
    return scores


def golden(problem: Problem, inputs: Named) -> dict[str, Tensor]:
    """The plain formulas."""
    scores, seen = logits(problem, inputs), problem.visible
    v = inputs["v"].repeat_interleave(scores.shape[2] // inputs["v"].shape[2], 2)
    top = scores.detach().masked_fill(~seen, -INF).amax(-1, keepdim=True).clamp(min=-100)
    shares = torch.where(seen, torch.exp(torch.where(seen, scores - top, 0)), 0)
    total = shares.sum(-1, keepdim=True)
    if "sinks" in inputs:
        total = total + torch.exp(inputs["sinks"][:, None, :, None, None] - top)
    weights = shares / torch.where(total > 0, total, 1)
    return {"out": torch.einsum("nbhij,nbhjd->nbhid", weights, v), "weights": weights}


def sdpa(problem: Problem, inputs: Named) -> dict[str, Tensor]:
    """torch's own, with everything that hides in one dense mask."""
    q, k, v = (inputs[name].flatten(0, 1) for name in "qkv")
    mask = problem.visible.expand(DRAWS, *problem.visible.shape)
    if "mask" in inputs:
        mask = torch.where(mask, aligned(inputs["mask"]), -INF)
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask.flatten(0, 1), scale=problem.scale, enable_gqa=gqa)
    return {"out": out.unflatten(0, (DRAWS, -1))}


def sdpa_of_logits(problem: Problem, inputs: Named) -> dict[str, Tensor]:
    """SDPA knows neither softcap nor sinks: it gets the logits as its mask, a sink as a key whose value is 0."""
    wide = {name: t.to(torch.promote_types(problem.dtype, torch.float32)) for name, t in inputs.items()}
    mask = logits(problem, wide).masked_fill(~problem.visible, -INF)
    v = wide["v"].repeat_interleave(mask.shape[2] // wide["v"].shape[2], 2)
    v = torch.cat([v, torch.eye(mask.shape[-1], dtype=v.dtype).expand(*v.shape[:3], -1, -1)], -1)  # gives the weights
    if "sinks" in inputs:
        mask = torch.cat([mask, wide["sinks"][:, None, :, None, None].expand(*mask.shape[:-1], 1)], -1)
        v = F.pad(v, (0, 0, 0, 1))
    nothing = v.new_zeros(()).expand(*mask.shape[:-1], 1), v.new_zeros(()).expand(*v.shape[:-1], 1)
    out = F.scaled_dot_product_attention(*nothing, v, mask).to(problem.dtype)
    D_v = inputs["v"].shape[-1]
    return {"out": out[..., :D_v], "weights": out[..., D_v:]}


def jittered(problem: Problem, generator: torch.Generator) -> Named:
    """Every input with the draws in front: as it is, then moved by a random relative eps."""
    u = torch.finfo(problem.dtype).eps
    found = {}
    for name, t in problem.inputs.items():
        noise = u * (2 * torch.rand((DRAWS, *t.shape), generator=generator, dtype=torch.float64) - 1)
        noise[0] = 0
        found[name] = (t.double() * (1 + noise)).to(t.dtype)
    return found


def differentiated(function: Function, problem: Problem, inputs: Named, cotangent: Tensor) -> Named:
    """What the function gives, and the gradient of every input."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    found: Named = function(problem, leaves)
    gradients = torch.autograd.grad(found["out"], list(leaves.values()), cotangent.expand_as(found["out"]))
    tensors = {name: t.detach() for name, t in found.items()}
    return tensors | {f"grad {name}": g for name, g in zip(leaves, gradients, strict=True)}


def assert_equal(problem: Problem, reference: Function, candidates: dict[str, Function]) -> None:
    """The acceptance rule, for every tensor of every candidate."""
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn((*problem.visible.shape[:3], problem.inputs["v"].shape[-1]), generator=generator)
    cotangent = cotangent.to(problem.dtype)  # rounded once: all sides differentiate the same scalar
    draws = jittered(problem, generator)
    r = differentiated(reference, problem, draws, cotangent)
    g = differentiated(golden, problem, {name: t.double() for name, t in draws.items()}, cotangent.double())
    for kernel, function in candidates.items():
        c = differentiated(function, problem, problem.inputs, cotangent)
        assert c.keys() == r.keys()
        for name, tensor in c.items():
            if name == "grad mask" and problem.softmax_ignores_mask:
                # The true gradient is 0: a sum of terms that cancel up to their rounding, which no tensor shows.
                assert float(tensor.abs().max()) <= torch.finfo(problem.dtype).eps * problem.visible.numel()
                continue
            verdict = judge(name, tensor, list(r[name]), list(g[name]), is_gradient=name.startswith("grad"))
            assert is_ok(verdict, problem.dtype), f"{kernel}: {verdict}"


def is_ok(verdict: TensorVerdict, dtype: torch.dtype) -> bool:
    if verdict.status != "degraded" or dtype != torch.float64:
        return verdict.status == "ok"
    # In float64 the golden is rounded like the candidate, so the two errors may add up.
    assert verdict.err_ratio is not None and verdict.block_ratio is not None and verdict.mean_ratio is not None
    return verdict.err_ratio <= 2 * OK_FACTOR and verdict.block_ratio <= 2 * BLOCK_FACTOR and verdict.mean_ratio <= 2


def of_kernel(kernel: str) -> Function:
    return lambda problem, inputs: {"out": candidate(problem, inputs, kernel=kernel)}


def with_weights(problem: Problem, inputs: Named) -> Named:
    out, weights = candidate(problem, inputs, return_weights=True)
    return {"out": out, "weights": weights}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_sdpa_and_the_float64_golden(dtype):
    judged = 0

    @settings(max_examples=CASES)
    @given(problems(dtype))
    def holds(problem: Problem) -> None:
        nonlocal judged
        assert_equal(problem, sdpa, {kernel: of_kernel(kernel) for kernel in ("eager", "sdpa")})
        judged += 1

    holds()
    assert judged >= CASES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap_sinks_and_weights_equal_the_formulas(dtype):
    judged = 0

    @settings(max_examples=SOFT_CASES)
    @given(problems(dtype, soft=True))
    def holds(problem: Problem) -> None:
        nonlocal judged
        assert_equal(problem, sdpa_of_logits, {"eager": with_weights})
        judged += 1

    holds()
    assert judged >= SOFT_CASES


@settings(max_examples=50)
@given(problems(torch.float64))
def test_the_golden_of_this_file_is_sdpa_in_float64(problem):
    """Two independent oracles agree to the last digits."""
    draws = jittered(problem, torch.Generator().manual_seed(0))
    with sdpa_kernel(SDPBackend.MATH):
        expected = sdpa(problem, draws)["out"]
    torch.testing.assert_close(golden(problem, draws)["out"], expected, rtol=1e-12, atol=1e-13)
