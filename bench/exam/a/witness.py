"""Proof that every wrong kernel is wrong on this machine, and that the correct base is not.

Every witness is a function of a kernel that returns a deviation. It is run on the wrong kernel and, as a control, on
the correct textbook core: the wrong kernel has to deviate, the control must not. Run with `python witness.py`; exit 1
if any witness fails.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import random
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from wrong import KERNELS, THEMES  # noqa: E402
from wrong.base import manual, textbook, tiled  # noqa: E402

INF = float("inf")
Function = Callable[..., Tensor]
Witness = Callable[[Function], float]
Masker = Callable[[Tensor, Tensor], Tensor]
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


# --------------------------------------------------------------------------------------------------------------------
# The judge of this file: a float64 textbook of its own, which shares no code with the kernels.
# --------------------------------------------------------------------------------------------------------------------


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention in float64 by the documentation of SDPA; a row without keys is zero."""
    q, k, v = q.double(), k.double(), v.double()
    if enable_gqa:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    s = torch.einsum("bhld,bhsd->bhls", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        s = s.masked_fill(torch.arange(k.shape[2]) > torch.arange(q.shape[2])[:, None], -INF)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -INF) if attn_mask.dtype == torch.bool else s + attn_mask.double()
    dead = (s == -INF).all(-1, keepdim=True)
    return torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0) @ v


def distance(out: Tensor, ref: Tensor, dtype: torch.dtype | None = None) -> float:
    """Relative root mean square deviation; infinite for a wrong shape, dtype or pattern of NaN and inf."""
    if out.shape != ref.shape or (dtype is not None and out.dtype != dtype):
        return INF
    out = out.detach().double()
    if not torch.equal(out.isfinite(), ref.isfinite()):
        return INF
    live = ref.isfinite()
    if not bool(live.any()):
        return 0.0
    size = ref[live].square().mean().sqrt().item()
    return (out - ref)[live].square().mean().sqrt().item() / max(size, 1e-30)


def peak(out: Tensor, ref: Tensor) -> float:
    """Largest deviation relative to the largest element."""
    return ((out.detach().double() - ref).abs().max() / ref.abs().max()).item()


# --------------------------------------------------------------------------------------------------------------------
# Inputs and masks.
# --------------------------------------------------------------------------------------------------------------------


def inputs(
    B: int = 2,
    H: int = 2,
    L: int = 8,
    S: int = 8,
    D: int = 16,
    Dv: int | None = None,
    kv: int | None = None,
    dtype: torch.dtype = f32,
    gain: float = 1.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal random inputs; gain enlarges the scores."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, L, D, generator=g, dtype=f64) * gain
    k = torch.randn(B, kv or H, S, D, generator=g, dtype=f64)
    v = torch.randn(B, kv or H, S, Dv or D, generator=g, dtype=f64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def coins(*shape: int, share: float = 0.6) -> Tensor:
    """A random bool mask whose first key is always seen."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(7)) < share
    mask[..., 0] = True
    return mask


def rows_mask(q: Tensor, k: Tensor) -> Tensor:
    """Bool (L, S)."""
    return coins(q.shape[2], k.shape[2])


def full_mask(q: Tensor, k: Tensor) -> Tensor:
    """Bool (B, H, L, S), different everywhere."""
    return coins(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def batch_mask(q: Tensor, k: Tensor) -> Tensor:
    """Bool (B, 1, L, S)."""
    return coins(q.shape[0], 1, q.shape[2], k.shape[2])


def head_mask(q: Tensor, k: Tensor) -> Tensor:
    """Bool (1, H, L, S)."""
    return coins(1, q.shape[1], q.shape[2], k.shape[2])


def right_padding(q: Tensor, k: Tensor) -> Tensor:
    """Bool (B, 1, 1, S): batch b has its last 2 b + 1 keys hidden."""
    return (torch.arange(k.shape[2]) < k.shape[2] - 1 - 2 * torch.arange(q.shape[0])[:, None])[:, None, None]


def left_padding(q: Tensor, k: Tensor) -> Tensor:
    """Bool (B, 1, 1, S): the first keys hidden."""
    return right_padding(q, k).flip(-1)


def dead_mask(q: Tensor, k: Tensor) -> Tensor:
    """Bool (L, S) with row 1 dead."""
    mask = rows_mask(q, k)
    mask[1] = False
    return mask


def float_mask(q: Tensor, k: Tensor) -> Tensor:
    """Float (L, S), normal."""
    return torch.randn(q.shape[2], k.shape[2], generator=torch.Generator().manual_seed(3))


def alibi(q: Tensor, k: Tensor) -> Tensor:
    """Float (1, H, L, S) with slopes per head."""
    gap = (torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]).abs()
    return (-gap * (1.0 + torch.arange(q.shape[1]))[:, None, None] / 7.0)[None]


def constant(value: float) -> Masker:
    """Float (L, S): row 1 is value throughout, the others zero."""

    def make(q: Tensor, k: Tensor) -> Tensor:
        mask = torch.zeros(q.shape[2], k.shape[2])
        mask[1] = value
        return mask

    return make


def lone(q: Tensor, k: Tensor) -> Tensor:
    """Bool (L, S) with one key in each row."""
    return torch.arange(k.shape[2]) == (torch.arange(q.shape[2]) % k.shape[2])[:, None]


def hides_from(start: int) -> Masker:
    """Bool (1, 1, 1, S) that hides the keys from start on."""
    return lambda q, k: (torch.arange(k.shape[2]) < start)[None, None, None]


# --------------------------------------------------------------------------------------------------------------------
# Witnesses of the output.
# --------------------------------------------------------------------------------------------------------------------


def fw(
    mask: Masker | None = None,
    causal: bool = False,
    scale: float | None = None,
    gqa: bool = False,
    inside: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    change: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None,
    grad: bool = False,
    measure: Callable[..., float] | None = None,
    wrap: Callable[[Function], Function] = lambda f: f,
    **shape: object,
) -> Witness:
    """One forward call against the reference."""

    def run(f: Function) -> float:
        q, k, v = inputs(**shape)
        if change is not None:
            q, k, v = change(q, k, v)
        m = None if mask is None else mask(q, k)
        with inside():
            if torch.is_autocast_enabled("cpu"):
                ref = reference(q.to(bf16), k.to(bf16), v.to(bf16), m, causal, scale, gqa)
                dtype = bf16
            else:
                ref, dtype = reference(q, k, v, m, causal, scale, gqa), q.dtype
            if grad:
                q.requires_grad_()
            try:
                out = wrap(f)(q, k, v, attn_mask=m, is_causal=causal, scale=scale, enable_gqa=gqa)
            except (RuntimeError, IndexError, ValueError):
                return INF
            return measure(out, ref) if measure is not None else distance(out, ref, dtype)

    return run


def autocast() -> contextlib.AbstractContextManager[object]:
    """CPU autocast to bfloat16."""
    return torch.autocast("cpu", dtype=bf16)


@contextlib.contextmanager
def threads(count: int):  # noqa: ANN201
    """Another number of torch threads."""
    old = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(old)


@contextlib.contextmanager
def deterministic():  # noqa: ANN201
    """Deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_double():  # noqa: ANN201
    """float64 as the default dtype."""
    torch.set_default_dtype(f64)
    try:
        yield
    finally:
        torch.set_default_dtype(f32)


def compiled(f: Function) -> Function:
    """The kernel under torch.compile (eager backend)."""
    torch._dynamo.reset()
    return torch.compile(f, backend="eager")


def in_thread(f: Function) -> Function:
    """The kernel called from another Python thread."""

    def call(*args: object, **kwargs: object) -> Tensor:
        box: list[Tensor] = []
        worker = threading.Thread(target=lambda: box.append(f(*args, **kwargs)))
        worker.start()
        worker.join()
        return box[0]

    return call


def vmapped(f: Function) -> Function:
    """The kernel under torch.func.vmap over a further dim."""

    def call(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
        return torch.func.vmap(f)(q[None], k[None], v[None])[0]

    return call


# --------------------------------------------------------------------------------------------------------------------
# Witnesses of gradients.
# --------------------------------------------------------------------------------------------------------------------


def bw(
    mask: Masker | None = None,
    causal: bool = False,
    scale: float | None = None,
    gqa: bool = False,
    want: str = "qkv",
    twice: bool = False,
    flip: bool = False,
    shared: bool = False,
    size: float = 1.0,
    **shape: object,
) -> Witness:
    """Gradients against those of the reference; want says which inputs require grad (m: the float mask)."""

    def run(f: Function) -> float:
        q, k, v = inputs(**shape)
        v = k if shared else v
        m = None if mask is None else mask(q, k)
        leaves = {"q": q, "k": k, "v": v, "m": m}
        mine = {
            n: t.detach().clone().requires_grad_(n in want) if t is not None and t.dtype != torch.bool else t
            for n, t in leaves.items()
        }
        gold = {
            n: t.detach().double().requires_grad_(n in want) if t is not None and t.dtype != torch.bool else t
            for n, t in leaves.items()
        }
        if shared:
            mine["v"], gold["v"] = mine["k"], gold["k"]
        ref = reference(gold["q"], gold["k"], gold["v"], gold["m"], causal, scale, gqa)
        g = torch.randn(ref.shape, generator=torch.Generator().manual_seed(9)).to(q.dtype) * size
        if flip:
            g = g.transpose(1, 2).contiguous().transpose(1, 2)
        out = f(mine["q"], mine["k"], mine["v"], attn_mask=mine["m"], is_causal=causal, scale=scale, enable_gqa=gqa)
        if not out.requires_grad:
            return INF
        names = [n for n in want if not (shared and n == "v")]
        if twice:
            torch.autograd.grad(out, [mine[n] for n in names], g, retain_graph=True, allow_unused=True)
        got = torch.autograd.grad(out, [mine[n] for n in names], g, allow_unused=True)
        right = torch.autograd.grad(ref, [gold[n] for n in names], g.double())
        return max(INF if a is None else distance(a, b) for a, b in zip(got, right, strict=True))

    return run


def second(f: Function) -> float:
    """Second derivatives (gradient of the squared norm of the gradient) against the reference."""
    found = []
    for function in (f, reference):
        q, k, v = (x.requires_grad_() for x in inputs(dtype=f64))
        first = torch.autograd.grad(function(q, k, v).square().sum(), (q, k, v), create_graph=True)
        total = sum(g.square().sum() for g in first)
        if not total.requires_grad:
            return INF
        found.append(torch.autograd.grad(total, (q, k, v), allow_unused=True))
    return max(INF if a is None else distance(a, b) for a, b in zip(*found, strict=True))


def gradient_overwritten(f: Function) -> float:
    """Whether the tensor handed to backward changes."""
    q, k, v = (x.requires_grad_() for x in inputs())
    g = torch.ones(2, 2, 8, 16)
    f(q, k, v).backward(g)
    return (g - 1).abs().max().item()


# --------------------------------------------------------------------------------------------------------------------
# Witnesses of state: sequences of calls.
# --------------------------------------------------------------------------------------------------------------------


def worst(f: Function, *calls: tuple[tuple[Tensor, Tensor, Tensor], dict[str, object]]) -> float:
    """The largest deviation over a sequence of calls."""
    top = 0.0
    for (q, k, v), kw in calls:
        top = max(top, distance(f(q, k, v, **kw), _gold(q, k, v, **kw), q.dtype))
    return top


def _gold(q: Tensor, k: Tensor, v: Tensor, **kw: object) -> Tensor:
    """The reference for keyword arguments of the kernel."""
    return reference(q, k, v, **kw)


def same_shape_twice(f: Function) -> float:
    """Other data of the same shape."""
    return worst(f, *((inputs(seed=s), {}) for s in range(3)))


def same_shape_often(f: Function) -> float:
    """Six calls with other data of the same shape."""
    return worst(f, *((inputs(seed=s), {}) for s in range(6)))


def in_place_between(which: int) -> Witness:
    """An input changed in place between two calls."""

    def run(f: Function) -> float:
        q, k, v = args = inputs()
        f(q, k, v)
        args[which].copy_(inputs(seed=5)[which])
        return worst(f, (args, {}))

    return run


def mask_in_place(f: Function) -> float:
    """A bool mask changed in place between two calls."""
    q, k, v = inputs()
    m = rows_mask(q, k)
    f(q, k, v, attn_mask=m)
    m.copy_(lone(q, k))
    return worst(f, ((q, k, v), {"attn_mask": m}))


def first_call(f: Function) -> float:
    """The very first call."""
    return worst(f, (inputs(), {}))


def many(count: int) -> Witness:
    """That many small calls."""

    def run(f: Function) -> float:
        q, k, v = inputs(B=1, H=1, L=2, S=3, D=4)
        ref = reference(q, k, v)
        return max(distance(f(q, k, v), ref) for _ in range(count))

    return run


def earlier_result(calls: int) -> Witness:
    """Whether a result changes through later calls."""

    def run(f: Function) -> float:
        kept = f(*inputs())
        copy = kept.clone()
        for seed in range(1, calls + 1):
            f(*inputs(seed=seed))
        return distance(kept, copy.double())

    return run


def mask_sticks(f: Function) -> float:
    """A call with a mask, then one without."""
    a = inputs()
    return worst(f, (a, {"attn_mask": rows_mask(a[0], a[1])}), (a, {}))


def scale_sticks(f: Function) -> float:
    """A call with a scale, then one without."""
    return worst(f, (inputs(), {"scale": 0.9}), (inputs(), {}))


def more_rows(f: Function) -> float:
    """Causal calls with one S and growing L."""
    return worst(f, *((inputs(L=n, S=9), {"is_causal": True}) for n in (3, 6)))


def shorter(f: Function) -> float:
    """A long call, then shorter ones."""
    return worst(f, *((inputs(S=n, L=3), {}) for n in (31, 17, 16, 5)))


def longer(f: Function) -> float:
    """A short call, then a longer one."""
    return worst(f, *((inputs(S=n, L=3), {}) for n in (5, 200)))


def prefix(f: Function) -> float:
    """Two calls that share their first keys."""
    q, k, v = inputs()
    k2, v2 = inputs(seed=4)[1:]
    k2[:, :, :4] = k[:, :, :4]
    return worst(f, ((q, k, v), {}), ((q, k2, v2), {}))


def lengths_in_turn(f: Function) -> float:
    """Twenty different key lengths."""
    return worst(f, *((inputs(S=n, L=2, D=4), {}) for n in range(3, 40, 2)))


def dtype_then(first: torch.dtype, then: torch.dtype) -> Witness:
    """A call in one dtype, then one in another."""

    def run(f: Function) -> float:
        f(*inputs(dtype=first, D=24))
        return worst(f, (inputs(dtype=then, D=24), {}))

    return run


def two_forwards_one_backward(f: Function) -> float:
    """Two forward calls of one shape, then the backward pass of the first."""
    leaves = [x.requires_grad_() for x in inputs()]
    gold = [x.detach().double().requires_grad_() for x in leaves]
    out = f(*leaves)
    f(*(x.requires_grad_() for x in inputs(seed=8)))
    got = torch.autograd.grad(out.square().sum(), leaves)
    right = torch.autograd.grad(reference(*gold).square().sum(), gold)
    return max(distance(a, b) for a, b in zip(got, right, strict=True))


def after_exception(f: Function) -> float:
    """A call that raises, then a good one."""
    q, k, v = inputs()
    with contextlib.suppress(RuntimeError):
        f(q, k[..., :5], v, scale=2.0)
    return worst(f, ((q, k, v), {}))


def dead_after(f: Function) -> float:
    """A plain call, then one with a dead row."""
    a = inputs()
    return worst(f, (a, {}), (a, {"attn_mask": dead_mask(a[0], a[1])}))


def small_then_large_values(f: Function) -> float:
    """Small values, then large ones."""
    q, k, v = inputs()
    return worst(f, ((q, k, v * 0.1), {}), ((q, k, v), {}))


# --------------------------------------------------------------------------------------------------------------------
# Witnesses of memory.
# --------------------------------------------------------------------------------------------------------------------


def inputs_kept(mask: Masker | None = None, **shape: object) -> Witness:
    """How many elements of the inputs (and of the mask) change through a call."""

    def run(f: Function) -> float:
        q, k, v = inputs(**shape)
        given = [q, k, v] + ([] if mask is None else [mask(q, k)])
        before = [t.clone() for t in given]
        f(q, k, v, attn_mask=given[3] if mask is not None else None)
        return float(sum((~torch.eq(a, b)).sum().item() for a, b in zip(given, before, strict=True)))

    return run


def infinite_float_mask(q: Tensor, k: Tensor) -> Tensor:
    """Float (L, S) with -inf entries."""
    return float_mask(q, k).masked_fill(~rows_mask(q, k), -INF)


def cache_slices(q: Tensor, k: Tensor, v: Tensor, room: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values as slices of a larger cache with other data behind."""
    wide = []
    for x in (k, v):
        cache = torch.randn(*x.shape[:2], room, x.shape[3], generator=torch.Generator().manual_seed(1)).to(x.dtype)
        cache[:, :, : x.shape[2]] = x
        wide.append(cache[:, :, : x.shape[2]])
    return q, wide[0], wide[1]


def behind_keys(f: Function) -> float:
    """Whether the cache behind a slice changes."""
    q, k, v = cache_slices(*inputs(S=5))
    whole = torch.as_strided(k, (2, 2, 32, 16), k.stride(), 0)
    before = whole.clone()
    f(q, k, v)
    return float((whole != before).sum().item())


def behind_query(f: Function) -> float:
    """Whether the columns behind a slice in D change."""
    q, k, v = inputs()
    wide = torch.zeros(2, 2, 8, 20)
    wide[..., :16] = q
    f(wide[..., :16], k, v)
    return wide[..., 16:].abs().sum().item()


def blhd(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The layout (B, L, H, D) seen as (B, H, L, D)."""
    return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)


def only(*which: int) -> Callable[..., tuple[Tensor, ...]]:
    """Some of q, k, v in the layout (B, L, H, D)."""
    return lambda *a: tuple(blhd(x)[0] if i in which else x for i, x in enumerate(a))


def strided_last(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """q, k, v with a last dim of stride two."""
    return tuple(torch.stack([x, torch.ones_like(x)], -1)[..., 0] for x in (q, k, v))


def with_offset(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k as a view with a storage offset."""
    return q, torch.cat([torch.randn(1, *k.shape[1:]), k])[1:], v


def alias_of_value(f: Function) -> float:
    """Whether the output changes when v does (S = 1)."""
    q, k, v = inputs(S=1)
    out = f(q, k, v)
    copy = out.clone()
    v.add_(1.0)
    return (out - copy).abs().max().item()


def overlapping_output(f: Function) -> float:
    """Whether a write to one row of the output changes another."""
    q, k, v = inputs()
    out = f(q[:, :, :1].expand(-1, -1, 8, -1), k, v)
    before = out[:, :, 1].clone()
    out[:, :, 0].add_(1.0)
    return (out[:, :, 1] - before).abs().max().item()


def packed(f: Function) -> float:
    """Whether a packed (B, L, 3, H, D) tensor changes."""
    pack = torch.randn(2, 8, 3, 2, 16, generator=torch.Generator().manual_seed(2))
    before = pack.clone()
    f(*(pack[:, :, i].transpose(1, 2) for i in range(3)))
    return float((pack != before).sum().item())


def masked_values_kept(f: Function) -> float:
    """Elements changed under a left padding mask."""
    return inputs_kept(left_padding)(f)


# --------------------------------------------------------------------------------------------------------------------
# Witnesses of dropout: with v = 1 on the diagonal the output is the dropped weights themselves.
# --------------------------------------------------------------------------------------------------------------------


def weights(f: Function, p: float, S: int = 64, seed: int = 0, mask: Tensor | None = None) -> Tensor:
    """Dropped weights divided by the weights without dropout, (2, 4, 32, S)."""
    q, k, _ = inputs(B=2, H=4, L=32, S=S, D=8, seed=1)
    v = torch.eye(S).expand(2, 4, S, S)
    torch.manual_seed(seed)
    return f(q, k, v, attn_mask=mask, dropout_p=p).double() / reference(q, k, v)


def noise_free(value: float) -> float:
    """What is left of a deviation of statistics above its noise."""
    return max(0.0, value - 0.03)


def drop_mean(p: float, masked: bool = False) -> Witness:
    """The mean of the weights has to stay, the kept share has to be 1 - p, and kept ones have to be 1 / (1 - p)."""

    def run(f: Function) -> float:
        w = weights(f, p, mask=torch.ones(32, 64, dtype=torch.bool) if masked else None)
        if not bool(w.isfinite().all()):
            return INF
        kept = w[w != 0]
        size = (kept * (1 - p) - 1).abs().max().item() if kept.numel() else 0.0
        return noise_free(max(abs(w.mean().item() - 1), abs((w != 0).double().mean().item() - (1 - p)), size))

    return run


def drop_mean_no_grad(f: Function) -> float:
    """The same under no_grad."""
    with torch.no_grad():
        return drop_mean(0.3)(f)


def drop_agrees(dim: int, S: int = 64) -> Witness:
    """The share of equal decisions between neighbours along a dim (independent: p^2 + (1 - p)^2)."""

    def run(f: Function) -> float:
        w = weights(f, 0.5, S) != 0
        half = w.shape[dim] // 2
        return noise_free((w.narrow(dim, 0, half) == w.narrow(dim, half, half)).double().mean().item() - 0.5)

    return run


def drop_seeds(f: Function) -> float:
    """Two seeds have to give two patterns."""
    a, b = (weights(f, 0.5, seed=s) != 0 for s in (0, 1))
    return noise_free((a == b).double().mean().item() - 0.5)


def drop_calls(f: Function) -> float:
    """Two calls in a row have to give two patterns."""
    q, k, v = inputs(L=32, S=64)
    torch.manual_seed(3)
    a, b = f(q, k, v, dropout_p=0.5), f(q, k, v, dropout_p=0.5)
    return 1.0 if torch.equal(a, b) else 0.0


def drop_resets(f: Function) -> float:
    """The numbers drawn after the call must depend on the seed before."""
    q, k, v = inputs()
    drawn = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        f(q, k, v, dropout_p=0.5)
        drawn.append(torch.rand(4))
    return 1.0 if torch.equal(*drawn) else 0.0


def drop_one(f: Function) -> float:
    """dropout_p = 1 gives zeros."""
    out = f(*inputs(), dropout_p=1.0)
    return 0.0 if bool((out == 0).all()) else INF


def drop_first_key(f: Function) -> float:
    """The first key has to be dropped as often as the others."""
    return noise_free(abs((weights(f, 0.5)[..., 0] != 0).double().mean().item() - 0.5) - 0.05)


def drop_gradient(f: Function) -> float:
    """The gradient of v has to be that of the weights that were dropped: dv = P^T g with P from the output."""
    q, k, _ = inputs(L=16, S=16, D=8)
    v = torch.eye(16).expand(2, 2, 16, 16).clone().requires_grad_()
    torch.manual_seed(0)
    out = f(q, k, v, dropout_p=0.5)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (dv,) = torch.autograd.grad(out, v, g)
    return distance(dv, (out.detach().mT @ g).double())


# --------------------------------------------------------------------------------------------------------------------
# Witnesses of side effects.
# --------------------------------------------------------------------------------------------------------------------


def changes(
    look: Callable[[], object],
    prepare: Callable[[], object] = lambda: None,
    restore: Callable[[object], object] = lambda _: None,
    grad: bool = False,
    dtype: torch.dtype = f32,
    inside: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Witness:
    """Whether something global changes through a call."""

    def run(f: Function) -> float:
        q, k, v = inputs(dtype=dtype)
        if grad:
            q.requires_grad_()
        prepare()
        with inside():
            before = look()
            f(q, k, v)
            after = look()
        restore(before)
        equal = torch.equal(before, after) if isinstance(before, Tensor) else before == after
        return 0.0 if equal else 1.0

    return run


def requires_grad_kept(f: Function) -> float:
    """Whether an input that needs no gradient needs one after the call."""
    args = inputs()
    f(*args)
    return float(any(t.requires_grad for t in args))


def leaf_grad_kept(f: Function) -> float:
    """Whether .grad of a leaf is set by the forward pass."""
    q, k, v = inputs()
    q.requires_grad_()
    f(q, k, v)
    return float(q.grad is not None)


def inputs_freed(f: Function) -> float:
    """Whether the inputs live on after the call."""
    q, k, v = inputs()
    ref = weakref.ref(q)
    f(q, k, v)
    del q, k, v
    gc.collect()
    return float(ref() is not None)


def denormals(f: Function) -> float:
    """Whether denormal numbers are flushed after a call."""
    f(*inputs())
    lost = bool((torch.tensor([1e-40]) * torch.tensor([1.0]) == 0).item())
    torch.set_flush_denormal(False)
    return float(lost)


def filters(f: Function) -> float:
    """Whether the warning filters change."""
    with warnings.catch_warnings():
        before = list(warnings.filters)
        f(*inputs())
        return float(list(warnings.filters) != before)


# --------------------------------------------------------------------------------------------------------------------
# Witnesses of special values.
# --------------------------------------------------------------------------------------------------------------------


def set_at(which: int, place: tuple[object, ...], value: float) -> Callable[..., tuple[Tensor, ...]]:
    """One of q, k, v with some elements replaced."""

    def change(*args: Tensor) -> tuple[Tensor, ...]:
        args[which][place] = value
        return args

    return change


def equal_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two neighbouring keys are equal."""
    k[:, :, 3] = k[:, :, 2]
    return q, k, v


def all_equal_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All keys equal: flat rows."""
    return q, k[:, :, :1].expand_as(k).clone(), v


def emptied(dim: int, which: str) -> Callable[..., tuple[Tensor, ...]]:
    """Some of q, k, v with a dim of size zero."""
    return lambda *a: tuple(x.narrow(dim, 0, 0) if n in which else x for n, x in zip("qkv", a, strict=True))


def shifted(level: float, column: int | None = None) -> Callable[..., tuple[Tensor, ...]]:
    """Scores moved by about level, for all keys or one key only (through a constant component of q and k)."""

    def change(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q[..., 0] = math.sqrt(q.shape[-1])
        k[..., 0] = level if column is None else 0.0
        if column is not None:
            k[:, :, column, 0] = level
        return q, k, v

    return change


def row_shift(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row 0 has scores 300 above those of the other rows."""
    k[..., 0] = 1.0
    q[..., 0] = -150.0 * math.sqrt(q.shape[-1])
    q[:, :, 0, 0] = 150.0 * math.sqrt(q.shape[-1])
    return q, k, v


def later_tile_larger(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys from 64 on have scores 150 above the first tile."""
    q, k, v = shifted(0.0)(q, k, v)
    k[:, :, 64:, 0] = 150.0
    return q, k, v


def same_query_key(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q is k."""
    return q, q, v


def far_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Key 5 has a score 30 below the rest and a huge value."""
    q, k, v = shifted(-30.0, 5)(q, k, v)
    v[:, :, 5] = 1e3
    return q, k, v


def repeated(f: Function) -> float:
    """Sixty-four equal calls: the largest deviation."""
    q, k, v = inputs(S=33)
    ref = reference(q, k, v)
    top = 0.0
    for i in range(64):
        time.sleep(1e-6 * (i % 7))
        top = max(top, distance(f(q, k, v), ref))
    return top


def differs_between_calls(f: Function) -> float:
    """The largest deviation between equal calls."""
    q, k, v = inputs(S=200, L=4)
    first = f(q, k, v).double()
    top = 0.0
    for i in range(40):
        time.sleep(1e-6 * (i % 7))
        top = max(top, distance(f(q, k, v), first))
    return top


def bias_of_rounding(out: Tensor, ref: Tensor) -> float:
    """The mean signed error relative to the spacing: 0 for rounding to nearest."""
    size = torch.exp2(torch.floor(torch.log2(ref.abs())) - 7)
    return abs(((out.double() - ref) * ref.sign() / size).mean().item())


def uncentred(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values with a mean of four."""
    return q, k, v + 4.0


def offset_cache(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Only k as a slice of a longer cache."""
    return q, cache_slices(q, k, v)[1], v


def expanded(dim: int) -> Callable[..., tuple[Tensor, ...]]:
    """k expanded (stride 0) over a dim."""
    return lambda q, k, v: (q, k.narrow(dim, 0, 1).expand_as(k), v)


def tile_rows(q: Tensor, k: Tensor) -> Tensor:
    """Bool (L, S) where row 0 sees the first tile only and others see everything."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    mask[0, 64:] = False
    return mask


def tile_batches(q: Tensor, k: Tensor) -> Tensor:
    """Bool (B, 1, 1, S) where batch 0 sees the first 64 keys only."""
    mask = torch.ones(q.shape[0], 1, 1, k.shape[2], dtype=torch.bool)
    mask[0, ..., 64:] = False
    return mask


def full_then_padded(q: Tensor, k: Tensor) -> Tensor:
    """Bool (B, 1, 1, S): all True in batch 0, some hidden in the others."""
    mask = torch.ones(q.shape[0], 1, 1, k.shape[2], dtype=torch.bool)
    mask[1:, ..., 3:] = False
    return mask


def short_first(q: Tensor, k: Tensor) -> Tensor:
    """Bool (B, 1, 1, S): batch 0 is the short one."""
    return right_padding(q, k).flip(0)


def corner_hidden(q: Tensor, k: Tensor) -> Tensor:
    """Bool (L, S), a band of two to the right: not causal, top right corner hidden."""
    return torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] < 3


def transposed_view(q: Tensor, k: Tensor) -> Tensor:
    """A bool mask (L, S) that is a transposed view of (S, L)."""
    mask = coins(k.shape[2], q.shape[2])
    mask[0] = True
    return mask.T


def expanded_rows(q: Tensor, k: Tensor) -> Tensor:
    """A bool mask expanded over the rows."""
    return coins(1, k.shape[2]).expand(q.shape[2], k.shape[2])


def three_dims(q: Tensor, k: Tensor) -> Tensor:
    """Bool (H, L, S)."""
    return head_mask(q, k)[0]


def first_tile_dead(q: Tensor, k: Tensor) -> Tensor:
    """Bool (L, S) where odd rows see nothing of the first tile."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    mask[1::2, :64] = False
    return mask


def second_tile_dead(q: Tensor, k: Tensor) -> Tensor:
    """Bool (L, S) where odd rows see nothing of the second tile."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    mask[1::2, 64:] = False
    return mask


def all_dead(q: Tensor, k: Tensor) -> Tensor:
    """Bool (L, S) all False."""
    return torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)


def hides_first(q: Tensor, k: Tensor) -> Tensor:
    """Bool (L, S) that hides the first two keys."""
    return (torch.arange(k.shape[2]) >= 2).expand(q.shape[2], -1).clone()


def one_batch_float(q: Tensor, k: Tensor) -> Tensor:
    """Float (1, 1, L, S)."""
    return float_mask(q, k)[None, None]


def large_bias(q: Tensor, k: Tensor) -> Tensor:
    """Float (L, S) times 40."""
    return 40.0 * float_mask(q, k)


def some_zero(q: Tensor, k: Tensor) -> Tensor:
    """Float (L, S) with zeros and other entries."""
    return float_mask(q, k).masked_fill(rows_mask(q, k), 0.0)


def fine_bias(q: Tensor, k: Tensor) -> Tensor:
    """Float (L, S) around 20 with fine differences."""
    return 20.0 + float_mask(q, k)


def hides_key(index: int) -> Masker:
    """Bool (L, S) that hides one key."""
    return lambda q, k: (torch.arange(k.shape[2]) != index).expand(q.shape[2], -1).clone()


def inf_hides_key(q: Tensor, k: Tensor) -> Tensor:
    """Float (L, S) that hides key 3."""
    return torch.zeros(q.shape[2], k.shape[2]).masked_fill(~hides_key(3)(q, k), -INF)


# --------------------------------------------------------------------------------------------------------------------
# The table of witnesses.
# --------------------------------------------------------------------------------------------------------------------

WITNESSES: dict[str, Witness] = {
    # scale
    "scale_one_percent": fw(),
    "scale_one_permille": fw(),
    "scale_given_ignored": fw(scale=0.7),
    "scale_given_on_top": fw(scale=0.7),
    "scale_default_missing": fw(),
    "scale_default_inverse_dim": fw(),
    "scale_from_value_dim": fw(Dv=24),
    "scale_from_padded_dim": fw(D=20),
    "scale_from_power_of_two_dim": fw(D=96),
    "scale_zero_is_default": fw(scale=0.0),
    "scale_negative_made_positive": fw(scale=-0.3),
    "scale_negative_overflows": fw(scale=-0.3, gain=60.0),
    "scale_twice_when_causal": fw(causal=True),
    "scale_dim_capped": fw(D=160),
    "scale_on_float_mask": fw(float_mask),
    "scale_integer_root": fw(D=24),
    "scale_rounded_to_bf16": fw(D=24, gain=4.0),
    "scale_given_ignored_in_decode": fw(L=1, scale=0.7),
    "scale_odd_dim_rounded_down": fw(D=17),
    "scale_short_log2e": fw(),
    "scale_clamped_to_one": fw(scale=1.5),
    "scale_given_ignored_in_gqa": fw(S=70, H=4, kv=2, gqa=True, scale=0.7),
    # causal
    "causal_bottom_right": fw(L=5, causal=True),
    "causal_strict": fw(causal=True),
    "causal_one_ahead": fw(causal=True),
    "causal_ignored": fw(causal=True),
    "causal_ignored_for_one_query": fw(L=1, causal=True),
    "causal_ignored_when_not_square": fw(L=5, causal=True),
    "causal_ignored_in_gqa": fw(H=4, kv=2, gqa=True, causal=True),
    "causal_by_blocks": fw(causal=True),
    "causal_upper": fw(causal=True),
    "causal_window": fw(B=1, H=1, L=1100, S=1100, D=4, causal=True),
    "causal_long_query_shifted": fw(L=9, S=5, causal=True),
    "causal_last_row_sees_all": fw(L=5, causal=True),
    "causal_ignored_for_short_keys": fw(causal=True),
    "causal_minus_ten_thousand": fw(causal=True, change=shifted(2e4, 7)),
    "causal_buffer_too_short": fw(B=1, H=1, L=1100, S=1100, D=4, causal=True),
    "causal_first_row_sees_two": fw(causal=True),
    "causal_tile_bound_exclusive": fw(L=70, S=70, causal=True),
    "causal_flat_rows": fw(causal=True),
    "causal_decode_bottom_right_in_gqa": fw(L=1, H=4, kv=2, gqa=True, causal=True),
    "causal_only_first_heads": fw(H=10, causal=True),
    "causal_packed_gqa_rows": fw(H=4, kv=2, gqa=True, causal=True),
    # lengths
    "lengths_keys_cut_at_query_length": fw(L=5),
    "lengths_query_tail_zero": fw(L=9, S=5),
    "lengths_decode_last_key_lost": fw(L=1),
    "lengths_decode_splits_averaged": fw(L=1, S=300),
    "lengths_decode_split_remainder_lost": fw(L=1, S=131),
    "lengths_chunk_taken_for_last": fw(L=4, causal=True),
    "lengths_single_key_shortcut": fw(all_dead, S=1),
    "lengths_mask_read_transposed": fw(rows_mask, L=5),
    "lengths_query_tail_offset": fw(L=150, S=150, causal=True),
    "lengths_output_shaped_as_values": fw(L=9, S=5),
    "lengths_few_queries_share_last_mask_row": fw(L=4, S=4, causal=True),
    "lengths_query_chunk_mask_not_sliced": fw(rows_mask, B=1, H=1, L=1030, D=4),
    "lengths_causal_tail_rows_dead": fw(L=9, S=5, causal=True),
    "lengths_decode_ring_buffer": fw(L=1, S=2100, D=4),
    # tiles
    "tiles_last_partial_lost": fw(S=70),
    "tiles_padding_counted": fw(S=13),
    "tiles_remainder_of_one_lost": fw(S=65),
    "tiles_last_full_lost": fw(S=128),
    "tiles_mask_ignored_beyond_512": fw(hides_from(520), S=600, D=4),
    "tiles_keys_beyond_4096_lost": fw(S=4200, L=2, D=4),
    "tiles_second_pass_unweighted": fw(S=2100, L=2, D=4),
    "tiles_skipped_by_first_row": fw(tile_rows, S=128),
    "tiles_skipped_by_first_key": fw(hides_key(32), S=64),
    "tiles_skipped_by_first_batch": fw(tile_batches, S=128),
    "tiles_query_tail_not_written": fw(L=40),
    "tiles_last_overlaps": fw(S=70),
    "tiles_mask_tile_not_advanced": fw(rows_mask, S=200),
    "tiles_mask_index_sixteen_bits": fw(hides_from(65537), B=1, H=1, L=1, S=65600, D=4, measure=peak),
    "tiles_key_tile_as_short_as_queries": fw(S=70),
    "tiles_unrolled_by_two": fw(S=130),
    "tiles_value_buffer_stale": fw(S=200),
    "tiles_broadcast_keys_remainder": fw(S=33, change=expanded(1)),
    "tiles_causal_limit_rounded_down": fw(L=100, S=100, causal=True),
    "tiles_short_keys_padded_with_first": fw(S=5),
    "tiles_corner_tile_lost": fw(L=140, S=140),
    "tiles_causal_off_beyond_1024": fw(B=1, H=1, L=1100, S=1100, D=4, causal=True),
    "tiles_mask_vector_tail_unmasked": fw(hides_from(9), S=11),
    # online
    "online_accumulator_not_rescaled": fw(S=200),
    "online_sum_not_rescaled": fw(S=200),
    "online_max_starts_at_zero": fw(change=shifted(-200.0)),
    "online_max_starts_at_minus_thousand": fw(change=shifted(-2000.0)),
    "online_max_not_subtracted": fw(change=shifted(200.0)),
    "online_max_of_first_tile": fw(S=100, change=later_tile_larger),
    "online_lazy_rescale": fw(S=200),
    "online_rescale_inverted": fw(S=200),
    "online_max_shared_by_rows": fw(change=row_shift),
    "online_exponent_clamped": fw(change=far_values),
    "online_sink_in_sum": fw(),
    "online_dead_tile_nan": fw(first_tile_dead, S=128),
    "online_dead_tile_resets_row": fw(second_tile_dead, S=128),
    "online_sum_before_masking": fw(rows_mask),
    "online_merge_without_max": fw(S=300, change=shifted(200.0)),
    "online_rescale_in_base_two": fw(S=200),
    "online_rescale_once": fw(S=400),
    "online_normalised_per_tile": fw(S=200),
    # mask
    "mask_float_ignored": fw(float_mask),
    "mask_float_as_bool": fw(alibi),
    "mask_float_only_minus_inf": fw(alibi),
    "mask_float_positive_dropped": fw(float_mask),
    "mask_float_clamped_from_below": fw(inf_hides_key, change=shifted(300.0, 3)),
    "mask_bool_inverted": fw(rows_mask),
    "mask_bool_minus_ten_thousand": fw(hides_key(3), change=shifted(2e4, 3)),
    "mask_bool_added": fw(rows_mask),
    "mask_dead_rows_nan": fw(dead_mask),
    "mask_dead_rows_mean": fw(dead_mask),
    "mask_finfo_min_rows_zero": fw(constant(torch.finfo(f32).min)),
    "mask_padding_on_queries": fw(right_padding),
    "mask_first_batch_for_all": fw(batch_mask),
    "mask_first_head_for_all": fw(head_mask),
    "mask_batch_taken_for_heads": fw(batch_mask),
    "mask_padding_right_only": fw(left_padding),
    "mask_reduced_to_last_row": fw(full_mask),
    "mask_strides_ignored": fw(transposed_view),
    "mask_two_dims_taken_for_batch": fw(rows_mask, B=3, L=3),
    "mask_three_dims_taken_for_batch": fw(three_dims),
    "mask_ignored_in_decode": fw(right_padding, L=1),
    "mask_float_rounded_to_input_dtype": fw(fine_bias, dtype=bf16),
    "mask_after_softmax": fw(rows_mask),
    "mask_multiplies_scores": fw(rows_mask),
    "mask_guessed_causal": fw(corner_hidden),
    "mask_skipped_if_first_batch_full": fw(full_then_padded),
    "mask_bias_not_in_max": fw(constant(200.0)),
    "mask_broadcast_row_only_first": fw(right_padding),
    "mask_float_not_in_base_two": fw(alibi),
    "mask_trimmed_to_first_batch_length": fw(short_first),
    "mask_one_batch_zero_padded": fw(one_batch_float),
    "mask_single_key_rows_unmasked": fw(lone),
    "mask_float_large_negative_as_inf": fw(constant(-5000.0)),
    "mask_dead_rows_copy_neighbour": fw(dead_mask),
    "mask_lost_with_causal": fw(rows_mask, causal=True),
    "mask_bool_finite_penalty": fw(hides_key(3), change=shifted(60.0, 3)),
    "mask_head_bias_wraps": fw(alibi, H=6),
    "mask_float_soft_clamped": fw(large_bias),
    "mask_expanded_rows_advance": fw(expanded_rows),
    "mask_diagonal_always_seen": fw(rows_mask),
    "mask_sinks_always_seen": fw(hides_first),
    "mask_float_divided_by_scale": fw(float_mask, scale=0.5),
    "mask_upper_part_skipped": fw(rows_mask),
    # gqa
    "gqa_tiled": fw(H=4, kv=2, gqa=True),
    "gqa_values_tiled": fw(H=4, kv=2, gqa=True),
    "gqa_group_over_four": fw(H=16, kv=2, gqa=True),
    "gqa_group_shifted": fw(H=6, kv=2, gqa=True),
    "gqa_multi_query_first_mask": fw(head_mask, H=4, kv=1, gqa=True),
    "gqa_mask_by_key_head": fw(head_mask, H=4, kv=2, gqa=True),
    "gqa_mask_ignored": fw(rows_mask, H=4, kv=2, gqa=True),
    "gqa_gradient_of_last_head": bw(H=4, kv=2, gqa=True),
    "gqa_gradient_averaged": bw(H=4, kv=2, gqa=True),
    "gqa_more_than_eight_key_heads": fw(H=20, kv=10, gqa=True),
    "gqa_decode_tiled": fw(L=1, H=4, kv=2, gqa=True),
    "gqa_batch_offset_by_query_heads": fw(B=3, H=6, kv=2, gqa=True),
    "gqa_pair_swapped": fw(H=4, kv=2, gqa=True),
    "gqa_odd_key_heads_rounded": fw(H=6, kv=3, gqa=True),
    "gqa_view_of_keys": fw(H=4, kv=2, gqa=True, change=blhd),
    # shapes
    "shapes_heads_beyond_16_zero": fw(H=18),
    "shapes_heads_wrap_at_32": fw(H=34),
    "shapes_head_tail_zero": fw(H=6),
    "shapes_odd_head_reads_neighbour": fw(H=3),
    "shapes_batch_beyond_two": fw(B=3),
    "shapes_fourth_batch_zero": fw(B=4),
    "shapes_odd_batch_tail_zero": fw(B=3),
    "shapes_grid_beyond_64": fw(B=5, H=14),
    "shapes_grid_limit": fw(B=65537, H=1, L=1, S=2, D=2, measure=peak),
    "shapes_odd_dim_cut": fw(D=17),
    "shapes_dim_beyond_128_cut": fw(D=160),
    "shapes_dim_96_overlaps": fw(D=96),
    "shapes_wide_values_cut": fw(Dv=24),
    "shapes_narrow_values_padded": fw(Dv=8),
    "shapes_padded_dim_not_cropped": fw(Dv=12),
    "shapes_value_tail_zero": fw(Dv=12),
    "shapes_output_not_transposed_back": fw(),
    "shapes_values_beyond_256_not_normalised": fw(Dv=264),
    "shapes_batch_of_one_squeezed": fw(B=1),
    "shapes_layout_guessed": fw(H=8),
    "shapes_dim_half_warp_twice": fw(D=80),
    "shapes_dim_256_half_read": fw(D=256),
    "shapes_small_dim_doubled": fw(D=8),
    "shapes_expanded_batch_rolls": fw(change=expanded(0)),
    # precision
    "precision_scores_in_half": fw(dtype=bf16, gain=8.0, S=64),
    "precision_softmax_in_bf16": fw(dtype=bf16, gain=4.0, S=64),
    "precision_probs_fp8": fw(dtype=bf16, S=64),
    "precision_probs_int8": fw(S=64),
    "precision_qk_int8": fw(),
    "precision_long_keys_int8": fw(S=200),
    "precision_keys_fp8": fw(),
    "precision_values_int4": fw(),
    "precision_exp_quadratic": fw(),
    "precision_exp_table": fw(),
    "precision_exp_bit_trick": fw(),
    "precision_accumulator_in_half": fw(dtype=bf16, S=600),
    "precision_row_sum_in_half": fw(dtype=bf16, S=1200, D=8, change=uncentred),
    "precision_float16_through_bf16": fw(dtype=f16),
    "precision_bf16_through_float16": fw(dtype=bf16, change=lambda q, k, v: (q, k, v * 2e5)),
    "precision_output_truncated": fw(dtype=bf16, L=64, measure=bias_of_rounding),
    "precision_double_in_float": fw(dtype=f64),
    "precision_double_softmax_in_float": fw(dtype=f64),
    "precision_float_in_tf32": fw(),
    "precision_float_in_bf16": fw(),
    "precision_float_probs_in_bf16": fw(),
    "precision_query_scaled_in_half": fw(dtype=bf16, D=24, gain=6.0, S=64),
    "precision_float16_scores_overflow": fw(dtype=f16, gain=20.0, change=lambda q, k, v: (q * 50, k * 50, v)),
    "precision_float16_accumulator_overflow": fw(dtype=f16, S=64, change=lambda q, k, v: (q, k, v * 2000 + 8000)),
    "precision_reciprocal_approximate": fw(S=33),
    "precision_float16_subnormals_flushed": fw(dtype=f16, change=lambda q, k, v: (q, k, v * 2e-5)),
    "precision_biased_scores_in_half": fw(fine_bias, dtype=bf16),
    "precision_long_values_fp8": fw(S=600),
    "precision_small_weights_flushed": fw(S=600),
    "precision_partial_sums_in_bf16": fw(),
    # mode
    "mode_no_grad_not_causal": fw(causal=True, inside=torch.no_grad),
    "mode_no_grad_last_tile_lost": fw(S=140, inside=torch.no_grad),
    "mode_inference_scale_ignored": fw(scale=0.7, inside=torch.inference_mode),
    "mode_training_bottom_right": fw(L=5, causal=True, grad=True),
    "mode_training_float_mask_ignored": fw(float_mask, grad=True),
    "mode_autocast_bool_mask_cast": fw(rows_mask, inside=autocast),
    "mode_autocast_scores_rounded": fw(inside=autocast, gain=8.0, S=64),
    "mode_compile_scale_ignored": fw(scale=0.7, wrap=compiled),
    "mode_compile_not_normalised": fw(wrap=compiled),
    "mode_threads_lose_remainder": fw(S=9, inside=lambda: threads(2)),
    "mode_threads_skip_last_head": fw(B=1, H=3, inside=lambda: threads(2)),
    "mode_other_thread_not_causal": fw(causal=True, wrap=in_thread),
    "mode_other_thread_unscaled": fw(wrap=in_thread),
    "mode_deterministic_gqa_tiled": fw(H=4, kv=2, gqa=True, inside=deterministic),
    "mode_default_dtype_leaks": fw(inside=default_double),
    "mode_no_grad_mask_ignored": fw(right_padding, inside=torch.no_grad),
    "mode_autocast_decode_scaled_twice": fw(L=1, inside=autocast),
    "mode_vmap_raises": fw(wrap=vmapped),
    # gradients
    "gradients_q_detached": bw(),
    "gradients_k_detached": bw(),
    "gradients_v_detached": bw(),
    "gradients_weights_detached": bw(),
    "gradients_k_unscaled": bw(),
    "gradients_given_scale_ignored": bw(scale=0.7),
    "gradients_softmax_term_missing": bw(),
    "gradients_only_v_zero": bw(want="v"),
    "gradients_wrong_when_v_frozen": bw(want="qk"),
    "gradients_only_q_unscaled": bw(want="q"),
    "gradients_mask_missing": bw(float_mask, want="qkvm"),
    "gradients_mask_of_first_batch": bw(float_mask, want="qkvm"),
    "gradients_mask_scaled": bw(float_mask, want="qkvm"),
    "gradients_second_incomplete": second,
    "gradients_second_zero": second,
    "gradients_divided_by_batch": bw(),
    "gradients_causal_forgotten": bw(causal=True),
    "gradients_second_backward_wrong": bw(twice=True),
    "gradients_output_gradient_assumed_contiguous": bw(flip=True),
    "gradients_dead_rows_nan": bw(dead_mask),
    "gradients_key_accumulated_in_half": bw(dtype=bf16, L=600),
    "gradients_keys_beyond_512_zero": bw(S=520, L=4),
    "gradients_last_key_tile_zero": bw(S=40),
    "gradients_query_tail_overwritten": bw(S=100),
    "gradients_output_gradient_overwritten": gradient_overwritten,
    "gradients_shared_key_value_once": bw(shared=True),
    "gradients_missing_for_long_keys": bw(S=1100, L=2, D=4),
    "gradients_double_in_float": bw(dtype=f64),
    "gradients_from_rounded_weights": bw(),
    "gradients_v_ignores_mask": bw(causal=True),
    "gradients_value_dim_scale": bw(Dv=24),
    "gradients_k_cut_at_query_length": bw(L=4),
    "gradients_clipped": bw(size=10.0),
    # state
    "state_output_cached_by_shape": same_shape_twice,
    "state_output_cached_by_pointer": in_place_between(0),
    "state_keys_packed_by_id": in_place_between(1),
    "state_first_call_zero": first_call,
    "state_hundredth_call": many(100),
    "state_after_five_hundred_calls": many(500),
    "state_captured_on_third_call": same_shape_often,
    "state_output_buffer_reused": earlier_result(1),
    "state_output_ping_pong": earlier_result(2),
    "state_mask_sticks": mask_sticks,
    "state_scale_sticks": scale_sticks,
    "state_causal_cached_by_keys": more_rows,
    "state_padding_not_cleared": shorter,
    "state_prefix_cache_collision": prefix,
    "state_many_lengths": lengths_in_turn,
    "state_mask_converted_once": mask_in_place,
    "state_dtype_sticks": dtype_then(bf16, f32),
    "state_weights_workspace_shared": two_forwards_one_backward,
    "state_after_exception": after_exception,
    "state_dead_rows_stale": dead_after,
    "state_workspace_sized_by_first_call": longer,
    "state_running_amax": small_then_large_values,
    "state_dtype_switch_unscaled": dtype_then(f64, f32),
    # memory
    "memory_query_scaled_in_place": inputs_kept(),
    "memory_query_scaled_and_restored": inputs_kept(D=24),
    "memory_mask_overwritten": inputs_kept(infinite_float_mask),
    "memory_bool_mask_inverted_in_place": inputs_kept(rows_mask),
    "memory_zeroes_behind_keys": behind_keys,
    "memory_reads_behind_keys": fw(S=5, change=cache_slices),
    "memory_query_assumed_contiguous": fw(change=only(0)),
    "memory_keys_use_query_strides": fw(change=only(0)),
    "memory_values_use_key_strides": fw(change=only(1)),
    "memory_last_dim_assumed_dense": fw(change=strided_last),
    "memory_storage_offset_ignored": fw(change=with_offset),
    "memory_single_key_returns_view": alias_of_value,
    "memory_output_written_into_query": inputs_kept(),
    "memory_view_raises": fw(change=blhd),
    "memory_output_overlaps_itself": overlapping_output,
    "memory_masked_values_zeroed": masked_values_kept,
    "memory_keys_clamped_in_place": lambda f: _large_keys_kept(f),
    "memory_head_stride_from_length": fw(S=5, change=offset_cache),
    "memory_dead_call_returns_query": inputs_kept(all_dead),
    "memory_packed_values_overwritten": packed,
    "memory_mask_scaled_and_restored": inputs_kept(float_mask),
    "memory_row_statistics_behind_query": behind_query,
    # dropout
    "dropout_not_scaled": drop_mean(0.3),
    "dropout_divided_by_p": drop_mean(0.3),
    "dropout_scaled_twice": drop_mean(0.3),
    "dropout_ignored": drop_mean(0.3),
    "dropout_ignored_without_grad": drop_mean_no_grad,
    "dropout_before_softmax": drop_mean(0.3),
    "dropout_normalised_again": drop_mean(0.3),
    "dropout_on_output": lambda f: _drop_alike(f),
    "dropout_same_for_heads": drop_agrees(1),
    "dropout_same_for_batches": drop_agrees(0),
    "dropout_same_for_queries": drop_agrees(2),
    "dropout_same_for_key_tiles": drop_agrees(3, S=128),
    "dropout_resets_global_seed": drop_resets,
    "dropout_constant_pattern": drop_seeds,
    "dropout_keeps_p": drop_mean(0.3),
    "dropout_of_one_nan": drop_one,
    "dropout_rate_in_four_bits": drop_mean(0.06),
    "dropout_backward_draws_again": drop_gradient,
    "dropout_ignored_with_mask": drop_mean(0.3, masked=True),
    "dropout_spares_first_key": drop_first_key,
    "dropout_in_row_sum": drop_mean(0.3),
    # side effects
    "side_effects_default_dtype": changes(
        torch.get_default_dtype, restore=lambda _: torch.set_default_dtype(f32), dtype=f64
    ),
    "side_effects_thread_count": changes(
        torch.get_num_threads, lambda: torch.set_num_threads(2), lambda _: torch.set_num_threads(1)
    ),
    "side_effects_manual_seed": changes(torch.get_rng_state, lambda: torch.manual_seed(5)),
    "side_effects_consumes_random_numbers": changes(torch.get_rng_state),
    "side_effects_grad_mode": changes(torch.is_grad_enabled, restore=lambda _: torch.set_grad_enabled(True)),
    "side_effects_matmul_precision": changes(
        torch.get_float32_matmul_precision, restore=lambda old: torch.set_float32_matmul_precision(str(old))
    ),
    "side_effects_deterministic_off": changes(
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(True),
        lambda _: torch.use_deterministic_algorithms(False),
    ),
    "side_effects_requires_grad": requires_grad_kept,
    "side_effects_flush_denormal": denormals,
    "side_effects_python_random": changes(random.getstate, lambda: random.seed(5)),
    "side_effects_warnings_silenced": filters,
    "side_effects_autocast_off": changes(lambda: torch.is_autocast_enabled("cpu"), inside=autocast),
    "side_effects_inputs_kept_alive": inputs_freed,
    "side_effects_generator_restored": drop_calls,
    "side_effects_writes_leaf_gradient": leaf_grad_kept,
    "side_effects_anomaly_mode": changes(
        torch.is_anomaly_enabled, restore=lambda _: torch.autograd.set_detect_anomaly(False), grad=True
    ),
    "side_effects_mkldnn_off": changes(
        lambda: torch.backends.mkldnn.enabled,
        restore=lambda _: torch.backends.mkldnn.set_flags(_enabled=True),
        dtype=bf16,
    ),
    # special
    "special_zero_query_zero": fw(change=set_at(0, (slice(None), slice(None), 3), 0.0)),
    "special_zero_key_skipped": fw(change=set_at(1, (slice(None), slice(None), 3), 0.0)),
    "special_equal_keys_merged": fw(change=equal_keys),
    "special_nan_hidden": fw(change=set_at(2, (0, 0, 3, 0), float("nan"))),
    "special_inf_value_clamped": fw(change=set_at(2, (0, 0, 3, 0), INF)),
    "special_nan_scores_as_minus_inf": fw(change=set_at(1, (0, 0, 3, 0), float("nan"))),
    "special_no_keys_nan": fw(change=emptied(2, "kv")),
    "special_no_queries_raises": fw(change=emptied(2, "q")),
    "special_no_batch_raises": fw(change=emptied(0, "qkv")),
    "special_no_keys_raises": fw(change=emptied(2, "kv")),
    "special_masked_score_in_max": fw(hides_key(3), change=shifted(200.0, 3)),
    "special_softcap_on": fw(gain=12.0),
    "special_top_64": fw(S=200),
    "special_scores_clamped": fw(gain=60.0),
    "special_local_window": fw(B=1, H=1, L=4, S=600),
    "special_flat_rows_first_key": fw(change=all_equal_keys, B=1, H=1, L=1),
    "special_hard_attention_shortcut": fw(gain=6.0),
    "special_race_loses_last_tile": repeated,
    "special_atomic_order": differs_between_calls,
    "special_relative_precision_shift": fw(change=shifted(-3000.0)),
    "special_value_mean_in_dead_rows": fw(dead_mask),
    "special_key_mean_subtracted_with_mask": fw(some_zero),
    "special_self_attention_symmetric": fw(rows_mask, change=same_query_key),
}


def _large_keys_kept(f: Function) -> float:
    """Elements of large keys that change through a call."""
    q, k, v = inputs()
    k = k * 100
    before = k.clone()
    f(q * 0.01, k, v)
    return float((k != before).sum().item())


def _drop_alike(f: Function) -> float:
    """With equal value columns the dropped output has equal columns too, if the weights are dropped."""
    q, k, v = inputs()
    torch.manual_seed(0)
    out = f(q, k, v[..., :1].expand_as(v), dropout_p=0.5)
    return (out - out[..., :1]).abs().max().item()


# --------------------------------------------------------------------------------------------------------------------
# The base itself.
# --------------------------------------------------------------------------------------------------------------------


def check_base() -> bool:
    """Whether the three cores agree with SDPA and with the reference on ordinary calls."""
    good = True
    cases: list[tuple[dict[str, object], dict[str, object], Masker | None]] = [
        ({}, {}, None),
        ({"L": 5, "S": 130}, {"is_causal": True}, None),
        ({"L": 9, "S": 5}, {"is_causal": True}, None),
        ({"L": 70, "S": 70, "D": 17, "Dv": 24}, {"scale": 0.3}, rows_mask),
        ({"H": 6, "kv": 2}, {"enable_gqa": True}, full_mask),
        ({"H": 4, "kv": 1, "S": 100}, {"enable_gqa": True, "is_causal": True}, None),
        ({"S": 70}, {}, dead_mask),
        ({"S": 70}, {}, float_mask),
        ({"S": 70}, {}, right_padding),
        ({"S": 70, "H": 3}, {}, alibi),
    ]
    for core in (textbook, tiled, manual):
        top = {f64: 0.0, f32: 0.0, bf16: 0.0, f16: 0.0}
        for shape, kw, masker in cases:
            for dtype in top:
                q, k, v = (x.requires_grad_() for x in inputs(**shape, dtype=dtype))
                m = None if masker is None else masker(q, k)
                md = m.to(dtype) if m is not None and m.dtype != torch.bool else m
                found = []
                for function in (core, F.scaled_dot_product_attention):
                    out = function(q, k, v, attn_mask=md, **kw)
                    g = torch.ones(out.shape, dtype=dtype)
                    g[..., ::2] = -1
                    found.append((out, *torch.autograd.grad(out, (q, k, v), g)))
                gap = max(distance(a, b.detach().double(), dtype) for a, b in zip(*found, strict=True))
                gold = reference(q, k, v, md, kw.get("is_causal", False), kw.get("scale"), kw.get("enable_gqa", False))
                gap = max(gap, distance(found[0][0], gold.detach()))
                top[dtype] = max(top[dtype], gap)
        limit = {f64: 1e-12, f32: 1e-5, bf16: 2e-2, f16: 3e-3}
        fine = all(top[d] < limit[d] for d in top)
        good &= fine
        numbers = "  ".join(f"{str(d)[6:]} {top[d]:.1e}" for d in top)
        print(f"base {core.__name__:10s} against SDPA, outputs and gradients: {numbers}  {'ok' if fine else 'FAILS'}")
    return good


def main() -> int:
    """Run all the witnesses and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only kernels whose name contains one of these")
    chosen = parser.parse_args().names
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*nested tensors.*")
    start = time.time()
    failed = [] if check_base() else ["base"]
    missing = [x.name for x in KERNELS if x.name not in WITNESSES]
    failed += missing + [n for n in WITNESSES if n not in {x.name for x in KERNELS}]
    print(f"\n{'name':48s} {'kind':8s} {'deviation':>10s} {'control':>10s}   where")
    for kernel in KERNELS:
        if kernel.name in missing or (chosen and not any(c in kernel.name for c in chosen)):
            continue
        witness = WITNESSES[kernel.name]
        control = witness(textbook)
        deviation = witness(kernel.function)
        if kernel.exact:
            fine = control < 1e-2 and deviation > max(1e-5, 8 * control)
        else:
            fine = control < 1e-2 and deviation > max(1e-12, 1.8 * control)
        if not fine:
            failed.append(kernel.name)
        kind = "exact" if kernel.exact else "rounding"
        line = f"{kernel.name:48s} {kind:8s} {deviation:10.2e} {control:10.2e}   {kernel.where}"
        print(line + ("" if fine else "   <-- WITNESS FAILS"))
    print(f"\n{len(KERNELS)} kernels, {len(failed)} failures, {time.time() - start:.0f} s")
    for theme in THEMES:
        count = Counter(x.exact for x in KERNELS if x.theme == theme)
        print(f"{theme:14s} {count[True]:3d} exact {count[False]:3d} rounding")
    if failed:
        print("failed:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
