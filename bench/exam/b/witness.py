"""Prove, against a float64 textbook, that every kernel of ``wrong`` is wrong; exit 1 if a witness fails.

Each witness is a function that says whether a kernel misbehaves.  It must say so of its own wrong kernel, and must
not say so of the honest kernel that the set is built from, nor of PyTorch's own SDPA (on its math backend).
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from wrong import KERNELS, attend

Fn = Callable[..., Tensor]
Witness = Callable[[Fn], bool]
WITNESSES: dict[str, Witness] = {}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
BF, HF, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INF = float("inf")


def textbook(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention in float64, written from the documentation of SDPA."""
    q, k, v = q.double(), k.double(), v.double()
    if enable_gqa:
        k = k.repeat_interleave(q.size(1) // k.size(1), 1)
        v = v.repeat_interleave(q.size(1) // v.size(1), 1)
    s = torch.einsum("bhld,bhsd->bhls", q, k) * (1 / math.sqrt(q.size(-1)) if scale is None else scale)
    seen = torch.ones(s.shape[-2:], dtype=torch.bool)
    if is_causal:
        seen = torch.arange(s.size(-1)) <= torch.arange(s.size(-2)).unsqueeze(-1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        seen = seen & (attn_mask != -INF)
        s = s + torch.where(attn_mask == -INF, torch.zeros_like(attn_mask), attn_mask).double()
    seen = seen.expand(s.shape)
    if s.size(-1) == 0:
        return torch.einsum("bhls,bhsd->bhld", s, v)
    alive = seen.any(-1, keepdim=True)
    s = torch.where(seen, s, torch.where(alive, -INF, 0.0).double())
    probs = torch.where(alive, torch.softmax(s, -1), torch.zeros_like(s))
    return torch.einsum("bhls,bhsd->bhld", probs, v)


def rand(*shape: int, dtype: torch.dtype = F32, seed: int = 0, gain: float = 1.0) -> Tensor:
    """A reproducible normal tensor that leaves the global generator alone."""
    generator = torch.Generator().manual_seed(seed + 7919 * len(shape) + sum(shape))
    return (torch.randn(shape, generator=generator, dtype=F64) * gain).to(dtype)


def qkv(
    batch: int = 2,
    heads: int = 2,
    rows: int = 5,
    keys: int = 7,
    dim: int = 8,
    dim_v: int | None = None,
    heads_kv: int | None = None,
    dtype: torch.dtype = F32,
    gain: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v."""
    kv = heads_kv or heads
    return (
        rand(batch, heads, rows, dim, dtype=dtype, seed=1, gain=gain),
        rand(batch, kv, keys, dim, dtype=dtype, seed=2),
        rand(batch, kv, keys, dim_v or dim, dtype=dtype, seed=3),
    )


def gap(out: Tensor, ref: Tensor) -> float:
    """The largest error relative to the largest entry, infinite if shape or finiteness differ."""
    if out.shape != ref.shape or not torch.equal(out.isnan(), ref.isnan()):
        return INF
    if ref.numel() == 0:
        return 0.0
    out, ref = torch.nan_to_num(out.double()), torch.nan_to_num(ref.double())
    return float((out - ref).abs().max() / ref.abs().max().clamp(min=1e-30))


def forward_error(fn: Fn, *args: Any, **kwargs: Any) -> float:
    """The error of the output of one call."""
    try:
        out = fn(*args, **kwargs)
    except (RuntimeError, ValueError, IndexError, ZeroDivisionError):
        return INF
    low = args[0].dtype
    return INF if out.dtype != low else gap(out, textbook(*args, **kwargs))


def off(fn: Fn, *args: Any, **kwargs: Any) -> bool:
    """Whether the output is wrong beyond rounding."""
    return forward_error(fn, *args, **kwargs) > TOLERANCE[args[0].dtype]


def rough(fn: Fn, *args: Any, **kwargs: Any) -> bool:
    """Whether the output is more than twice and a half as far off as honest kernels are."""
    honest = max(forward_error(f, *args, **kwargs) for f in (attend, torch_sdpa))
    return forward_error(fn, *args, **kwargs) > 2.5 * honest + 1e-15


def gradients(fn: Fn, tensors: dict[str, Tensor], wanted: str, weight: Tensor, **kwargs: Any) -> list[Tensor]:
    """Gradients of a weighted sum of the output with respect to the wanted inputs; zeros where none flows."""
    leaves = {n: t.detach().clone().requires_grad_(n in wanted.split()) for n, t in tensors.items()}
    out = fn(**leaves, **kwargs)
    targets = [leaves[n] for n in wanted.split()]
    if not out.requires_grad:
        return [torch.zeros_like(t) for t in targets]
    got = torch.autograd.grad((out * weight.to(out.dtype)).sum(), targets, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(got, targets, strict=True)]


def grad_error(fn: Fn, tensors: dict[str, Tensor], wanted: str, **kwargs: Any) -> float:
    """The largest error of the wanted gradients."""
    ref_out = textbook(**tensors, **kwargs)
    weight = rand(*ref_out.shape, seed=9)
    try:
        got = gradients(fn, tensors, wanted, weight, **kwargs)
    except RuntimeError:
        return INF
    exact = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    return max(gap(g, r) for g, r in zip(got, gradients(textbook, exact, wanted, weight, **kwargs), strict=True))


def named(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> dict[str, Tensor]:
    """Inputs by name."""
    return {"q": q, "k": k, "v": v} | ({} if attn_mask is None else {"attn_mask": attn_mask})


def torch_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's own, on the math backend, which has second derivatives."""
    with sdpa_kernel(SDPBackend.MATH):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, **options)


def witness(function: Witness) -> Witness:
    """Register the witness of the kernel that it is named after."""
    WITNESSES[function.__name__] = function
    return function


# numerics


@witness
def denominator_summed_in_half(fn: Fn) -> bool:
    return rough(fn, *qkv(1, 1, 3, 1500, 16, dtype=BF, gain=0.1))


@witness
def scores_rounded_to_half(fn: Fn) -> bool:
    return rough(fn, *qkv(1, 2, 16, 40, 24, dtype=BF, gain=12.0))


@witness
def query_scaled_in_half(fn: Fn) -> bool:
    return rough(fn, *qkv(1, 2, 16, 40, 24, dtype=BF, gain=30.0))


@witness
def exp2_with_single_precision_log2e(fn: Fn) -> bool:
    return rough(fn, *qkv(dtype=F64))


@witness
def double_computed_in_single(fn: Fn) -> bool:
    return rough(fn, *qkv(dtype=F64))


@witness
def running_maximum_starts_at_zero(fn: Fn) -> bool:
    return off(fn, *qkv(), attn_mask=torch.full((5, 7), -200.0))


@witness
def accumulator_kept_in_half(fn: Fn) -> bool:
    q, k, v = qkv(1, 2, 8, 1536, 16, dtype=BF, gain=0.2)
    return rough(fn, q, k, v + 1)


@witness
def small_weights_skipped(fn: Fn) -> bool:
    q, k, v = qkv(1, 1, 2, 6000, 4)
    mask = torch.full((2, 6000), -10.0)
    mask[:, 0] = 0.0
    return off(fn, q * 0.01, k, v + 1, attn_mask=mask)


@witness
def product_overflows_before_scaling(fn: Fn) -> bool:
    q, k, v = qkv(1, 1, 4, 6, 64, dtype=HF)
    return off(fn, q * 50, k.abs() * 50, v, scale=1e-5) or off(fn, (q.abs() * 60).half(), k.abs() * 60, v, scale=1e-5)


# masks


@witness
def masked_row_has_nan_gradient(fn: Fn) -> bool:
    mask = rand(5, 7) > -0.5
    mask[2] = False
    return grad_error(fn, named(*qkv(), attn_mask=mask), "q k v") > 1e-4


@witness
def float_mask_rounded_to_half(fn: Fn) -> bool:
    return rough(fn, *qkv(dtype=BF), attn_mask=500 + rand(5, 7))


@witness
def bias_scaled_with_the_scores(fn: Fn) -> bool:
    return off(fn, *qkv(), attn_mask=rand(5, 7), scale=0.3)


@witness
def batch_of_mask_taken_modulo(fn: Fn) -> bool:
    return off(fn, *qkv(3, 2), attn_mask=rand(3, 1, 5, 7) > 0)


@witness
def mask_strides_ignored(fn: Fn) -> bool:
    return off(fn, *qkv(), attn_mask=rand(2, 2, 7, 5).mT)


@witness
def mask_skipped_if_first_head_is_full(fn: Fn) -> bool:
    mask = rand(2, 2, 5, 7) > 0
    mask[0, 0] = True
    return off(fn, *qkv(), attn_mask=mask)


@witness
def query_mask_read_as_key_mask(fn: Fn) -> bool:
    return off(fn, *qkv(rows=6, keys=6), attn_mask=torch.arange(6).view(6, 1) % 2 == 0)


@witness
def three_dim_mask_read_as_batch(fn: Fn) -> bool:
    return off(fn, *qkv(2, 2), attn_mask=rand(2, 5, 7))


@witness
def masked_scores_lowered_by_ten_thousand(fn: Fn) -> bool:
    q, k, v = qkv(1, 1)
    mask = rand(5, 7) > 0
    mask[:, 0] = True
    return off(fn, q * 300, k * 300, v, attn_mask=mask)


# causal


@witness
def causal_dropped_for_one_query(fn: Fn) -> bool:
    return off(fn, *qkv(rows=1), is_causal=True)


@witness
def causal_rows_past_the_keys_are_zero(fn: Fn) -> bool:
    return off(fn, *qkv(rows=9, keys=4), is_causal=True)


@witness
def causal_strict_on_tile_boundary(fn: Fn) -> bool:
    return off(fn, *qkv(1, 1, 130, 130), is_causal=True)


@witness
def causal_tile_taken_for_full(fn: Fn) -> bool:
    return off(fn, *qkv(1, 1, 190, 190), is_causal=True)


@witness
def causal_dropped_off_the_fused_path(fn: Fn) -> bool:
    return off(fn, *qkv(dim_v=6), is_causal=True)


# gqa


@witness
def group_rounded_to_power_of_two(fn: Fn) -> bool:
    return off(fn, *qkv(heads=6, heads_kv=2), enable_gqa=True)


@witness
def key_gradient_of_last_head_only(fn: Fn) -> bool:
    return grad_error(fn, named(*qkv(heads=4, heads_kv=2)), "q k v", enable_gqa=True) > 1e-4


@witness
def mask_read_per_kv_head(fn: Fn) -> bool:
    return off(fn, *qkv(heads=4, heads_kv=2), attn_mask=rand(2, 4, 5, 7), enable_gqa=True)


@witness
def single_kv_head_shared_over_batch(fn: Fn) -> bool:
    return off(fn, *qkv(heads=4, heads_kv=1), enable_gqa=True)


@witness
def head_divided_by_kv_heads(fn: Fn) -> bool:
    return off(fn, *qkv(heads=8, heads_kv=2), enable_gqa=True)


# tiling


@witness
def last_tile_shifted_back(fn: Fn) -> bool:
    return off(fn, *qkv(keys=100))


@witness
def zero_padding_attended(fn: Fn) -> bool:
    return off(fn, *qkv(keys=33))


@witness
def small_rescale_skipped(fn: Fn) -> bool:
    return off(fn, *qkv(keys=300))


@witness
def empty_split_is_nan(fn: Fn) -> bool:
    return off(fn, *qkv(keys=200), attn_mask=torch.arange(200) >= 128 + torch.zeros(5, 1))


@witness
def lonely_last_key_lost(fn: Fn) -> bool:
    return off(fn, *qkv(keys=65))


@witness
def maximum_shared_by_a_tile(fn: Fn) -> bool:
    return off(fn, *qkv(), attn_mask=torch.arange(5).view(5, 1) * 100.0)


# sizes


@witness
def heads_past_the_grid_unwritten(fn: Fn) -> bool:
    return off(fn, *qkv(257, 256, 1, 2, 2))


@witness
def key_index_of_sixteen_bits(fn: Fn) -> bool:
    q, k, v = qkv(1, 1, 1, 65600, 4)
    mask = torch.arange(65600).view(1, -1) >= 65530
    return off(fn, q, k, v, attn_mask=mask)


@witness
def head_index_of_eight_bits(fn: Fn) -> bool:
    return off(fn, *qkv(1, 300, 2, 3, 4))


@witness
def causal_positions_in_half(fn: Fn) -> bool:
    q, k, v = qkv(1, 1, 300, 300, 8, dtype=BF)
    k[:, :, 257] = 6.0
    return off(fn, q.abs() + 1, k, v, is_causal=True)


@witness
def scale_of_padded_head_dim(fn: Fn) -> bool:
    return off(fn, *qkv(dim=20))


@witness
def odd_last_feature_lost(fn: Fn) -> bool:
    return off(fn, *qkv(dim=7))


@witness
def value_tail_unwritten(fn: Fn) -> bool:
    return off(fn, *qkv(dim_v=72))


@witness
def features_past_256_ignored(fn: Fn) -> bool:
    return off(fn, *qkv(dim=320))


@witness
def zero_scale_taken_for_none(fn: Fn) -> bool:
    return off(fn, *qkv(), scale=0.0)


@witness
def negative_scale_overflows(fn: Fn) -> bool:
    return off(fn, *qkv(gain=30.0), scale=-2.0)


# layouts


@witness
def key_strides_ignored(fn: Fn) -> bool:
    q, k, v = qkv()
    return off(fn, q, k.transpose(1, 2).contiguous().transpose(1, 2), v)


@witness
def output_takes_query_strides(fn: Fn) -> bool:
    q, k, v = qkv()
    return off(fn, q.transpose(1, 2).contiguous().transpose(1, 2), k, v)


@witness
def value_offset_ignored(fn: Fn) -> bool:
    q, k, v = rand(2, 2, 7, 24).chunk(3, -1)
    return off(fn, q, k, v)


@witness
def query_last_stride_taken_for_one(fn: Fn) -> bool:
    _, k, v = qkv()
    return off(fn, rand(2, 2, 5, 16)[..., ::2], k, v)


# modes


@witness
def keys_rounded_in_inference_mode(fn: Fn) -> bool:
    with torch.inference_mode():
        return rough(fn, *qkv())


@witness
def float_mask_made_boolean_without_grad(fn: Fn) -> bool:
    with torch.no_grad():
        return off(fn, *qkv(), attn_mask=rand(5, 7))


@witness
def autocast_lowers_the_inner_product(fn: Fn) -> bool:
    q, k, v = qkv(1, 2, 16, 40, 24, gain=12.0)
    q, k, v = (t.bfloat16().float() for t in (q, k, v))
    ref = textbook(q, k, v)
    with torch.autocast("cpu", BF):
        mine, honest = fn(q, k, v), attend(q, k, v)
    return gap(mine, ref) > 2.5 * gap(honest, ref)


@witness
def compiled_path_ignores_scale(fn: Fn) -> bool:
    torch.compiler.reset()
    with torch.no_grad():
        return off(torch.compile(fn, backend="eager"), *qkv(), scale=1.3)


def in_threads(fn: Fn, cases: list[tuple[Tensor, ...]], repeats: int) -> bool:
    """Whether any call is wrong when several threads call at once."""
    refs = [textbook(*case) for case in cases]
    bad = threading.Event()
    start = threading.Barrier(len(cases))

    def work(index: int) -> None:
        start.wait()
        with torch.no_grad():
            for _ in range(repeats):
                if bad.is_set() or gap(fn(*cases[index]), refs[index]) > 1e-4:
                    bad.set()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return bad.is_set()


@witness
def workspace_shared_between_threads(fn: Fn) -> bool:
    cases = [(rand(1, 4, 96, 32, seed=i), rand(1, 4, 96, 32, seed=i + 9), rand(1, 4, 96, 32, seed=i)) for i in range(4)]
    return in_threads(fn, cases, 60 if fn in (attend, torch_sdpa) else 600)


@witness
def setting_local_to_the_first_thread(fn: Fn) -> bool:
    return in_threads(fn, [qkv()], 1)


@witness
def rows_left_over_by_the_threads(fn: Fn) -> bool:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return off(fn, *qkv(1, 1, 5))
    finally:
        torch.set_num_threads(before)


# gradients


@witness
def mask_gradient_of_first_head(fn: Fn) -> bool:
    return grad_error(fn, named(*qkv(), attn_mask=rand(5, 7)), "q attn_mask") > 1e-4


@witness
def mask_alone_gets_no_gradient(fn: Fn) -> bool:
    return grad_error(fn, named(*qkv(), attn_mask=rand(2, 2, 5, 7)), "attn_mask") > 1e-4


@witness
def gradients_only_if_query_wants_them(fn: Fn) -> bool:
    return grad_error(fn, named(*qkv()), "k v") > 1e-4


@witness
def key_gradient_uses_default_scale(fn: Fn) -> bool:
    return grad_error(fn, named(*qkv()), "k", scale=0.5) > 1e-4


@witness
def logsumexp_saved_in_half(fn: Fn) -> bool:
    inputs = named(*qkv(1, 2, 16, 40, 24, dtype=BF, gain=12.0))
    return grad_error(fn, inputs, "q k v") > 2.5 * max(grad_error(f, inputs, "q k v") for f in (attend, torch_sdpa))


@witness
def second_order_sees_frozen_weights(fn: Fn) -> bool:
    def twice(f: Fn) -> Tensor:
        q, k, v = (t.requires_grad_() for t in qkv(1, 1, dtype=F64))
        first = torch.autograd.grad(f(q, k, v).square().sum(), (q, k, v), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v))
        return torch.cat([g.flatten() for g in second])

    return gap(twice(fn), twice(textbook)) > 1e-9


@witness
def incoming_gradient_strides_ignored(fn: Fn) -> bool:
    def grads(f: Fn, dtype: torch.dtype) -> Tensor:
        q, k, v = (t.to(dtype).requires_grad_() for t in qkv())
        incoming = rand(2, 5, 2, 8).to(dtype).transpose(1, 2)
        return torch.cat([g.flatten() for g in torch.autograd.grad(f(q, k, v), (q, k, v), incoming)])

    return gap(grads(fn, F32), grads(textbook, F64)) > 1e-4


@witness
def gradient_of_last_keys_lost(fn: Fn) -> bool:
    return grad_error(fn, named(*qkv(keys=100)), "q k v") > 1e-4


@witness
def query_gradient_accumulates_into_garbage(fn: Fn) -> bool:
    torch.use_deterministic_algorithms(True)
    try:
        return grad_error(fn, named(*qkv()), "q") > 1e-4
    finally:
        torch.use_deterministic_algorithms(False)


@witness
def backward_consumes_its_weights(fn: Fn) -> bool:
    q, k, v = (t.requires_grad_() for t in qkv())
    out = fn(q, k, v).square().sum()
    first = torch.autograd.grad(out, (q, k, v), retain_graph=True)
    again = torch.autograd.grad(out, (q, k, v), retain_graph=True)
    return any(gap(a, b) > 1e-4 for a, b in zip(again, first, strict=True))


# state


@witness
def causal_mask_cached_by_queries(fn: Fn) -> bool:
    return off(fn, *qkv(rows=5, keys=5), is_causal=True) or off(fn, *qkv(rows=5, keys=9), is_causal=True)


@witness
def keys_cached_by_address(fn: Fn) -> bool:
    with torch.no_grad():
        q, k, v = qkv()
        fn(q, k, v)
        k[:, :, 3] = 2.0
        return off(fn, q, k, v)


@witness
def bias_cached_by_shape_and_count(fn: Fn) -> bool:
    mask = rand(5, 7) > 0
    return off(fn, *qkv(), attn_mask=mask) or off(fn, *qkv(), attn_mask=mask.flip(-1))


@witness
def results_in_a_ring_of_four(fn: Fn) -> bool:
    with torch.no_grad():
        q, k, v = qkv()
        first = fn(q, k, v)
        for step in range(5):
            fn(q, k, v + step)
        return gap(first, textbook(q, k, v)) > 1e-4


@witness
def query_scaled_in_place_and_back(fn: Fn) -> bool:
    with torch.no_grad():
        q, k, v = qkv(dim=20)
        before = q.clone()
        fn(q, k, v)
        return not torch.equal(q, before)


@witness
def single_key_returns_the_values(fn: Fn) -> bool:
    with torch.no_grad():
        q, k, v = qkv(rows=1, keys=1)
        before = v.clone()
        fn(q, k, v).add_(1.0)
        return not torch.equal(v, before)


@witness
def tuning_run_accumulates(fn: Fn) -> bool:
    return off(fn, *qkv(rows=11, keys=13))


# randomness


@witness
def dropout_redrawn_in_backward(fn: Fn) -> bool:
    torch.manual_seed(0)
    q, k, v = (t.requires_grad_() for t in qkv(1, 1, 6, 6, 4, dtype=F64))
    out = fn(q, k, v, dropout_p=0.5)
    (grad,) = torch.autograd.grad(out.sum(), v)
    # the output is linear in v, so <grad, v> is the sum of the output under the same mask
    return abs(float(((grad * v).sum() - out.sum()).detach())) > 1e-9


@witness
def dropout_with_a_constant_seed(fn: Fn) -> bool:
    torch.manual_seed(0)
    return torch.equal(fn(*qkv(), dropout_p=0.5), fn(*qkv(), dropout_p=0.5))


@witness
def dropout_shared_by_all_heads(fn: Fn) -> bool:
    torch.manual_seed(0)
    q, k = torch.zeros(4, 4, 8, 4), torch.zeros(4, 4, 8, 4)
    out = fn(q, k, torch.eye(8).expand(4, 4, 8, 8), dropout_p=0.5) > 0
    return bool((out == out[:1, :1]).all())


@witness
def dropout_before_the_denominator(fn: Fn) -> bool:
    torch.manual_seed(0)
    out = fn(torch.zeros(2, 2, 64, 4), torch.zeros(2, 2, 64, 4), torch.ones(2, 2, 64, 4), dropout_p=0.5)
    return float(out.std()) < 1e-3


@witness
def seed_drawn_without_dropout(fn: Fn) -> bool:
    before = torch.get_rng_state()
    fn(*qkv())
    return not torch.equal(before, torch.get_rng_state())


# special


@witness
def nan_replaced_by_zero(fn: Fn) -> bool:
    q, k, v = qkv()
    q[0, 0, 1, 2] = float("nan")
    return off(fn, q, k, v)


@witness
def no_keys_give_nan(fn: Fn) -> bool:
    q, k, v = qkv()
    return off(fn, q, k[:, :, :0], v[:, :, :0])


@witness
def finite_minimum_taken_for_masked(fn: Fn) -> bool:
    mask = torch.zeros(5, 7)
    mask[1] = torch.finfo(F32).min
    return off(fn, *qkv(), attn_mask=mask)


def harmless(fn: Fn) -> bool:
    """Whether a kernel is right, output and gradients, on a small tame case with powers of two."""
    mask = (rand(1, 1, 8, 8) > -0.5) | torch.eye(8, dtype=torch.bool)
    cases = [(named(*qkv(1, 2, 8, 8, 16)), {}), (named(*qkv(1, 2, 8, 8, 16)), {"is_causal": True})]
    cases.append((named(*qkv(1, 2, 8, 8, 16), attn_mask=mask), {}))
    return all(
        not off(fn, *inputs.values(), **kwargs) and grad_error(fn, inputs, "q k v", **kwargs) < 1e-4
        for inputs, kwargs in cases
    )


def main() -> int:
    """Run all witnesses and report."""
    torch.set_num_threads(1)
    start, failures, tame = time.monotonic(), [], 0
    for kernel in KERNELS:
        check = WITNESSES.get(kernel.name)
        if check is None:
            failures.append(f"{kernel.name}: has no witness")
            continue
        began = time.monotonic()
        if not check(kernel.function):
            failures.append(f"{kernel.name}: not shown wrong")
        for name, fn in (("honest kernel", attend), ("SDPA", torch_sdpa)):
            if check(fn):
                failures.append(f"{kernel.name}: the witness accuses the {name}")
        quiet = harmless(kernel.function)
        tame += quiet
        took = time.monotonic() - began
        kind, note = "exact" if kernel.exact else "rounding", "" if quiet else "  (loud)"
        print(f"{kernel.name:45} {kind:9} {took:6.2f} s{note}")
    failures += [f"{name}: a witness without kernel" for name in WITNESSES.keys() - {k.name for k in KERNELS}]
    print(f"{len(KERNELS)} kernels, {tame} right on a small tame case, {time.monotonic() - start:.1f} s")
    for failure in failures:
        print("FAILED", failure)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
