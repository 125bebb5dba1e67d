"""Correct attentions that round differently from the reference: whatever rejects one of them cries wolf.

Each differs from the textbook in one respect: where the scale goes, in which order products and keys are summed, how
the softmax is normalised, or whose code does it. All work on k and v repeated for the query heads, and score half
types in float32, as the contract asks.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.experimental._config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from harness.kernels.call import AttentionCall, Kernel, Unsupported
from harness.kernels.plugin import run_sdpa_signature
from harness.registry import Registry

HONEST: Registry[Kernel] = Registry("honest kernel")
SPLITS = 4  # parts of the keys that `split_keys` attends apart
QUERY_TILE = 16
NO_FLASH = "No available kernel"
Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Problem:
    """One call, made plain: everything wide and per query head, and the masks as one bias and one bool tensor."""

    q: Tensor  # (B, H, L, D)
    k: Tensor  # (B, H, S, D)
    v: Tensor  # (B, H, S, D_v)
    scale: float
    bias: Tensor | None  # broadcasts to (B, H, L, S)
    hidden: Tensor  # (B, H, L, S), True = may not attend

    def finish(self, scores: Tensor, at: slice = slice(None)) -> Tensor:
        """Bias and mask on the scaled scores of the keys `at`."""
        if self.bias is not None:
            scores = scores + self.bias.expand(self.hidden.shape)[..., at]
        return scores.masked_fill(self.hidden[..., at], float("-inf"))


def plain_problem(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, wide: torch.dtype | None = None) -> Problem:
    for name, asked in (("softcap", call.softcap), ("sinks", call.sinks), ("dropout", call.dropout_p or None)):
        if asked is not None:
            raise Unsupported(f"the honest kernels have no {name}")
    B, H, L, _ = q.shape
    wide = wide or torch.promote_types(q.dtype, torch.float32)
    q, k, v = (t.to(wide) for t in (q, k, v))
    k, v = (t.repeat_interleave(H // t.shape[1], dim=1) for t in (k, v))
    allowed = call.allowed(q, k)
    hidden = torch.zeros((), dtype=torch.bool) if allowed is None else ~allowed
    bias = None if call.bias is None else call.bias.to(wide)
    return Problem(q, k, v, call.scale, bias, hidden.expand(B, H, L, k.shape[2]))


def softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1)


def dense(
    name: str,
    score: Callable[[Problem], Tensor],
    normalise: Callable[[Tensor], Tensor] = softmax,
    *,
    wide: torch.dtype | None = None,
    **promises: Any,
) -> None:
    """All scores at once. `score` gives them scaled, biased and masked; `promises` are fields of `Kernel`."""

    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
        problem = plain_problem(q, k, v, call, wide)
        # Rows that may attend nothing are NaN here, and 0 by contract.
        weights = normalise(score(problem)).masked_fill(problem.hidden, 0.0)
        return (weights @ problem.v).to(q.dtype), weights.to(q.dtype)

    HONEST.add(name, Kernel(name, run, gives_weights=True, **promises))


def streamed(name: str, attend: Callable[[Problem], Tensor]) -> None:
    """Never has all the weights, so it gives none."""

    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
        return attend(plain_problem(q, k, v, call)).to(q.dtype), None

    HONEST.add(name, Kernel(name, run))


# The scale, in each place it may stand


def scale_on_queries(p: Problem) -> Tensor:
    return p.finish((p.q * p.scale) @ p.k.mT)


def scale_on_keys(p: Problem) -> Tensor:
    return p.finish(p.q @ (p.k * p.scale).mT)


def scale_split(p: Problem) -> Tensor:
    root = math.sqrt(p.scale)
    return p.finish((p.q * root) @ (p.k * root).mT)


def scale_on_scores(p: Problem) -> Tensor:
    return p.finish((p.q @ p.k.mT) * p.scale)


# The products, in other orders


def channels_backwards(p: Problem) -> Tensor:
    return p.finish(torch.einsum("bhld,bhsd->bhls", p.q.flip(-1), p.k.flip(-1)) * p.scale)


def products_summed(p: Problem) -> Tensor:
    """No matrix product at all: torch's sum adds in a tree."""
    return p.finish((p.q[..., :, None, :] * p.k[..., None, :, :]).sum(-1) * p.scale)


def multiply_add(p: Problem) -> Tensor:
    """One channel after the other on the sum so far, even ones first."""
    scores, channels = torch.zeros(p.hidden.shape, dtype=p.q.dtype), range(p.q.shape[-1])
    for d in (*channels[::2], *channels[1::2]):
        scores = torch.addcmul(scores, p.q[..., d, None], p.k[..., None, :, d])
    return p.finish(scores * p.scale)


def halves_of_channels(p: Problem) -> Tensor:
    half = p.q.shape[-1] // 2
    near, far = ((p.q[..., at] @ p.k[..., at].mT) for at in (slice(half), slice(half, None)))
    return p.finish((near + far) * p.scale)


# The softmax, in other words


def base_two(scores: Tensor) -> Tensor:
    # The maximum first: finfo.min times the logarithm would be infinite.
    weights = torch.exp2((scores - scores.amax(-1, keepdim=True).detach()) * math.log2(math.e))
    return weights / weights.sum(-1, keepdim=True)


def log_space(scores: Tensor) -> Tensor:
    """exp(s - logsumexp(s)): the logarithm is rounded at the size of the scores, so large logits cost digits."""
    return torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True))


# The keys, in other orders and in pieces


def ordered(order: Callable[[int], Tensor]) -> Callable[[Problem], Tensor]:
    """All keys at once, in another order: every sum over keys runs differently."""

    def attend(p: Problem) -> Tensor:
        at = order(p.k.shape[2])
        bias = None if p.bias is None else p.bias.expand(p.hidden.shape)[..., at]
        moved = Problem(p.q, p.k[:, :, at], p.v[:, :, at], p.scale, bias, p.hidden[..., at])
        return softmax(scale_on_queries(moved)).masked_fill(moved.hidden, 0.0) @ moved.v

    return attend


def shuffled(size: int) -> Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


def backwards(size: int) -> Tensor:
    return torch.arange(size - 1, -1, -1)


@dataclass(frozen=True)
class Partial:
    """Attention over some of the keys, not yet normalised: exp(s - top) @ v, the sum of exp(s - top), and top."""

    mixed: Tensor  # (B, H, L, D_v)
    total: Tensor  # (B, H, L, 1)
    top: Tensor  # (B, H, L, 1)

    def merged(self, other: "Partial") -> "Partial":
        top = torch.maximum(self.top, other.top)
        mine, others = torch.exp(self.top - top), torch.exp(other.top - top)
        return Partial(self.mixed * mine + other.mixed * others, self.total * mine + other.total * others, top)

    def normalised(self) -> Tensor:
        return self.mixed / self.total.masked_fill(self.total == 0, 1.0)


def partial(p: Problem, at: slice) -> Partial:
    scores = p.finish((p.q @ p.k[:, :, at].mT) * p.scale, at)
    # The result does not depend on it, so neither does the gradient; -inf would make NaN of rows that see nothing here.
    top = scores.amax(-1, keepdim=True).detach().clamp(min=torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - top)
    return Partial(weights @ p.v[:, :, at], weights.sum(-1, keepdim=True), top)


def online(tile: int) -> Callable[[Problem], Tensor]:
    """One tile of keys after the other, with a running maximum."""

    def attend(p: Problem) -> Tensor:
        tiles = (partial(p, slice(start, start + tile)) for start in range(0, p.k.shape[2], tile))
        return functools.reduce(Partial.merged, tiles).normalised()

    return attend


def split_keys(p: Problem) -> Tensor:
    """Parts of the keys apart, then merged two by two: flash decoding."""
    size = math.ceil(p.k.shape[2] / SPLITS)
    parts = [partial(p, slice(start, start + size)) for start in range(0, p.k.shape[2], size)]
    while len(parts) > 1:
        parts = [functools.reduce(Partial.merged, parts[at : at + 2]) for at in range(0, len(parts), 2)]
    return parts[0].normalised()


def normalised_last(p: Problem) -> Tensor:
    return partial(p, slice(None)).normalised()


def tiled_queries(p: Problem) -> Tensor:
    """Tiles of queries over tiles of keys, as flash attention goes."""
    tiles = []
    for start in range(0, p.q.shape[2], QUERY_TILE):
        at = slice(start, start + QUERY_TILE)
        bias = None if p.bias is None else p.bias.expand(p.hidden.shape)[:, :, at]
        tiles.append(online(2 * QUERY_TILE)(Problem(p.q[:, :, at], p.k, p.v, p.scale, bias, p.hidden[:, :, at])))
    return torch.cat(tiles, dim=2)


# Other people's code


def sdpa(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor, AttentionCall], Result]:
    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
        try:
            with warnings.catch_warnings(), sdpa_kernel(backend):
                warnings.simplefilter("ignore")  # torch says in five warnings why it has no kernel
                return run_sdpa_signature(F.scaled_dot_product_attention, q, k, v, call)
        except RuntimeError as error:
            if NO_FLASH not in str(error):
                raise
            raise Unsupported(f"SDPA has no {backend.name} kernel for this call") from error

    return run


def padded_flash(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """Torch's flash kernel on values as wide as keys, as DeepSeek's own code calls it."""
    wide, D_v = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (F.pad(t, (0, wide - t.shape[-1])) for t in (q, k, v))
    out, _ = sdpa(SDPBackend.FLASH_ATTENTION)(q, k, v, call)
    return out[..., :D_v], None


class _FlashStyle(torch.autograd.Function):
    """FlashAttention-2's arithmetic: sums in float32, but P and dS are rounded to the inputs' type before products."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        scores = (q.float() @ k.float().mT) * scale + bias
        top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
        raised = torch.exp(scores - top)
        total = raised.sum(-1, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
        out = ((raised.to(q.dtype).float() @ v.float()) / total).to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, out, top + total.log())
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, logsum = ctx.saved_tensors
        (g,) = gradients
        weights = torch.exp((q.float() @ k.float().mT) * ctx.scale + bias - logsum)
        delta = (g.float() * out.float()).sum(-1, keepdim=True)
        of_scores = weights * (g.float() @ v.float().mT - delta)
        rounded = of_scores.to(q.dtype).float()
        of_q, of_k = (rounded @ k.float()) * ctx.scale, (rounded.mT @ q.float()) * ctx.scale
        of_v = weights.to(q.dtype).float().mT @ g.float()
        return of_q.to(q.dtype), of_k.to(q.dtype), of_v.to(q.dtype), of_scores, None


def flash_style(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    if q.dtype == torch.float64:
        raise Unsupported("flash kernels sum in float32")
    p = plain_problem(q, k, v, call)
    bias = torch.zeros((), dtype=p.q.dtype) if p.bias is None else p.bias
    bias = bias.expand(p.hidden.shape).masked_fill(p.hidden, float("-inf"))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    out: Tensor = _FlashStyle.apply(q, k, v, bias, call.scale)
    return out, None


def flex(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise Unsupported("flex_attention has no backward pass on CPU")
    problem = plain_problem(q, k, v, call)
    bias = torch.zeros((), dtype=problem.q.dtype) if problem.bias is None else problem.bias
    bias = bias.expand(problem.hidden.shape).masked_fill(problem.hidden, float("-inf"))

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b, h, i, j]

    with _flex_by_hand():
        out = flex_attention.flex_attention(problem.q, problem.k, problem.v, add_bias, scale=call.scale)
    assert isinstance(out, Tensor)
    return out.to(q.dtype), None


@contextmanager
def _flex_by_hand() -> Iterator[None]:
    """flex_attention without the tracing, which takes 0.2 s a call and changes no number."""
    was = flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = was


def _textbook(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hidden: Tensor, scale: Tensor) -> Tensor:
    scores = ((q @ k.mT) * scale + bias).masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0) @ v


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_textbook, dynamic=True, fullgraph=True)


def compiled(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Result:
    """Inductor's code for three dimensions, so that one graph serves all batches, heads and lengths."""
    if q.dtype == torch.float64:
        raise Unsupported("compiled for float32 scores alone: each further graph takes 10 s")
    p = plain_problem(q, k, v, call)
    bias = torch.zeros((), dtype=p.q.dtype) if p.bias is None else p.bias
    parts = [t.flatten(0, 1) for t in (p.q, p.k, p.v, bias.expand(p.hidden.shape), p.hidden)]
    # Clones, and no two lengths taken for one because they happen to be equal: torch would compile anew for each
    # layout and each coincidence, and after eight times run the plain code with no more than a warning.
    parts = [t.clone(memory_format=torch.contiguous_format) for t in parts]
    once = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with once, torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        out = _compiled()(*parts, torch.tensor(p.scale, dtype=p.q.dtype))
    return out.unflatten(0, p.q.shape[:2]).to(q.dtype), None


for _score in (scale_on_queries, scale_on_keys, scale_split, scale_on_scores, channels_backwards, products_summed):
    dense(_score.__name__, _score)
for _score in (multiply_add, halves_of_channels):
    dense(_score.__name__, _score)
dense("base_two", scale_on_queries, base_two)
# Held to what a user's kernel is: of scores that all are finfo.min the logarithm of their number cannot be told.
dense("log_space", scale_on_queries, log_space, origin="a study")
dense("float64_rounded_once", scale_on_queries, wide=torch.float64)
streamed("keys_shuffled", ordered(shuffled))
streamed("keys_backwards", ordered(backwards))
for _tile in (16, 64, 100):
    streamed(f"online_{_tile}", online(_tile))
streamed("split_keys", split_keys)
streamed("normalised_last", normalised_last)
streamed("tiled_queries", tiled_queries)
HONEST.add("sdpa_math", Kernel("sdpa_math", sdpa(SDPBackend.MATH), delegates=True))
HONEST.add("sdpa_flash", Kernel("sdpa_flash", sdpa(SDPBackend.FLASH_ATTENTION), delegates=True))
HONEST.add("padded_flash", Kernel("padded_flash", padded_flash, delegates=True))
HONEST.add("flash_style", Kernel("flash_style", flash_style))
HONEST.add("flex", Kernel("flex", flex))
HONEST.add("compiled", Kernel("compiled", compiled))
