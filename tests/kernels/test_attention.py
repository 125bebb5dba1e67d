"""`harness.attention`: weights, dead rows, precision, dropout, grouped heads, shapes, errors, kernels by name."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import harness
from harness.cell.peak import peak_bytes
from harness.cell.rule import judge
from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.front import make_call

KERNELS = ["eager", "sdpa", "grouped", "tiled"]
B, H, H_kv, L, S, D, D_v = 2, 6, 2, 5, 7, 8, 3
INF = float("inf")


def qkv(seed: int = 0, *, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, L, D), (B, H_kv, S, D), (B, H_kv, S, D_v)
    return tuple(torch.randn(s, generator=generator).to(dtype).requires_grad_(requires_grad) for s in shapes)


def repeated(t: Tensor) -> Tensor:
    return t.repeat_interleave(H // H_kv, 1)


# Weights


def test_weights_are_the_softmax_and_multiply_v():
    q, k, v = qkv()
    out, weights = harness.attention(q, k, v, return_weights=True)
    assert out.shape == (B, H, L, D_v) and weights.shape == (B, H, L, S)
    torch.testing.assert_close(weights, torch.softmax(q @ repeated(k).mT / D**0.5, -1))
    torch.testing.assert_close(out, weights @ repeated(v))
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, L))


def test_weights_come_in_the_inputs_dtype_and_sum_to_one():
    out, weights = harness.attention(*qkv(dtype=torch.bfloat16), causal=True, return_weights=True)
    assert out.dtype == weights.dtype == torch.bfloat16
    torch.testing.assert_close(weights.float().sum(-1), torch.ones(B, H, L), rtol=0, atol=0.02)


def test_a_sink_takes_its_share_of_the_weights():
    q, k, v = qkv()
    sinks = torch.linspace(-2, 2, H)
    out, weights = harness.attention(q, k, v, sinks=sinks, return_weights=True)
    logits = (q @ repeated(k).mT / D**0.5).double().exp()
    share = logits / (logits.sum(-1, keepdim=True) + sinks.double().exp().view(1, H, 1, 1))
    torch.testing.assert_close(weights, share.float())
    torch.testing.assert_close(out, weights @ repeated(v))
    assert bool((weights.sum(-1) < 1).all())


def test_softcap_acts_before_the_mask():
    q, k, v = qkv()
    bias = torch.full((S,), 50.0).index_fill(0, torch.tensor([0]), 0.0)  # a capped bias could not silence key 0
    _, weights = harness.attention(q, k, v, mask=bias, softcap=1.0, return_weights=True)
    scores = torch.tanh(q @ repeated(k).mT / D**0.5)
    torch.testing.assert_close(weights, torch.softmax(scores + bias, -1))
    assert float(weights[..., 0].max()) < 1e-20


def test_sdpa_kernel_says_that_it_has_no_weights():
    with pytest.raises(NotImplementedError, match="returns no attention weights"):
        harness.attention(*qkv(), return_weights=True, kernel="sdpa")


# Positions


def test_causal_is_aligned_to_the_last_key_by_default():
    _, weights = harness.attention(*qkv(), causal=True, return_weights=True)
    expected = torch.ones(L, S).tril(S - L).bool()
    assert torch.equal(weights > 0, expected.expand(B, H, L, S))


def test_window_counts_self():
    _, weights = harness.attention(*qkv(), window=2, return_weights=True)
    expected = torch.ones(L, S).tril(S - L).triu(S - L - 1).bool()
    assert torch.equal(weights > 0, expected.expand(B, H, L, S))


def test_window_pair_counts_beside_self_and_minus_one_is_unbounded():
    _, weights = harness.attention(*qkv(), window=(-1, 1), q_start=0, return_weights=True)
    expected = torch.ones(L, S).tril(1).bool()
    assert torch.equal(weights > 0, expected.expand(B, H, L, S))


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_batch_row_may_have_its_own_start(kernel):
    q, k, v = qkv()
    together = harness.attention(q, k, v, causal=True, q_start=torch.tensor([0, 2]), kernel=kernel)
    for b, start in enumerate([0, 2]):
        alone = harness.attention(*(t[b : b + 1] for t in (q, k, v)), causal=True, q_start=start, kernel=kernel)
        torch.testing.assert_close(together[b : b + 1], alone)


def test_a_start_of_no_dimensions_is_an_int():
    q, k, v = qkv()
    given = harness.attention(q, k, v, causal=True, q_start=torch.tensor(1))
    assert torch.equal(given, harness.attention(q, k, v, causal=True, q_start=1))


def test_a_decode_step_takes_the_path_without_a_mask():
    q, k, v = qkv()
    assert not make_call(q[:, :, :1], k, v, causal=True, window=S).hides
    assert make_call(q[:, :, :1], k, v, causal=True, window=S - 1).hides
    assert make_call(q[:, :, :2], k, v, causal=True).hides


# Dead rows

DEAD = {  # rows 0 and 1 see nothing, the others see something
    "bool": {"mask": torch.arange(L)[:, None] >= 2},
    "bool 4-D": {"mask": (torch.arange(L)[:, None] >= 2).expand(B, 1, L, S)},
    "float": {"mask": torch.zeros(L, S).index_fill(0, torch.tensor([0, 1]), -INF)},
    "causal": {"causal": True, "q_start": -2},
    "causal tensor": {"causal": True, "q_start": torch.tensor([-2, -2])},
    "window": {"window": (0, 0), "q_start": -2},
    "mask and causal": {"causal": True, "q_start": 0, "mask": torch.arange(S) >= 2},
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", DEAD.values(), ids=DEAD)
def test_dead_rows_give_zero_and_zero_gradients(options, kernel):
    q, k, v = qkv(requires_grad=True)
    out = harness.attention(q, k, v, kernel=kernel, **options)
    assert bool((out[:, :, :2] == 0).all()) and bool((out[:, :, 2:] != 0).all())
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert bool((gradients[0][:, :, :2] == 0).all())
    # What flows into dead rows goes nowhere.
    for g in torch.autograd.grad(harness.attention(q, k, v, kernel=kernel, **options)[:, :, :2].sum(), (q, k, v)):
        assert bool((g == 0).all())


@pytest.mark.parametrize("options", DEAD.values(), ids=DEAD)
def test_dead_rows_have_zero_weights_also_beside_a_sink(options):
    q, k, v = qkv()
    sinks = torch.zeros(H, requires_grad=True)
    for beside in (None, sinks):
        out, weights = harness.attention(q, k, v, sinks=beside, return_weights=True, **options)
        assert bool((weights[:, :, :2] == 0).all()) and bool((out[:, :, :2] == 0).all())
        assert bool((weights[:, :, 2:].sum(-1) > 0).all())
    (gradient,) = torch.autograd.grad(out[:, :, :2].sum(), sinks)
    assert bool((gradient == 0).all())


def test_dead_rows_of_a_float_mask_give_it_no_gradient():
    mask = torch.zeros(L, S).index_fill(0, torch.tensor([0, 1]), -INF).requires_grad_()
    (gradient,) = torch.autograd.grad(harness.attention(*qkv(), mask=mask).pow(2).sum(), mask)
    assert bool(gradient.isfinite().all()) and bool((gradient[:2] == 0).all()) and bool((gradient[2:] != 0).any())


# Precision


def half_scores(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, None]:
    """The textbook without the one line that goes to fp32."""
    weights = torch.softmax(q @ repeated(k).mT * call.scale, dim=-1)
    return weights @ repeated(v), None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_scored_in_fp32(dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = ((8 * torch.randn(1, H, 64, 64, generator=generator)).to(dtype) for _ in range(3))
    inputs = (q, k[:, :H_kv], v[:, :H_kv])
    reference = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
    for kernel in KERNELS:
        assert harness.check(functools.partial(harness.attention, kernel=kernel), reference, inputs).status == "ok"
    worse = functools.partial(harness.attention, kernel=Kernel("half", half_scores))
    assert harness.check(worse, reference, inputs).status == "degraded"  # so the test above can fail


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_mask_is_not_rounded_to_half_precision(dtype, kernel):
    q, k, v = qkv(dtype=dtype)
    mask = 200 + torch.randn(L, S, generator=torch.Generator().manual_seed(1))
    r = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    g = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask.double(), enable_gqa=True)
    assert judge("out", harness.attention(q, k, v, mask=mask, kernel=kernel), [r], [g]).status == "ok"
    rounded = harness.attention(q, k, v, mask=mask.to(dtype), kernel=kernel)
    assert judge("out", rounded, [r], [g]).status != "ok"


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_smallest_finite_mask_hides_among_others_but_kills_no_row(kernel):
    """transformers masks with finfo.min: a row of nothing else is uniform, and no half type turns it into -inf."""
    q, k, v = qkv(dtype=torch.float16)
    lowest = torch.full((L, S), torch.finfo(torch.float32).min)
    out = harness.attention(q, k, v, mask=lowest, kernel=kernel)
    torch.testing.assert_close(out, repeated(v).float().mean(2, keepdim=True).half().expand_as(out))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_mask_of_another_float_dtype_is_taken(kernel):
    q, k, v = qkv()
    mask = torch.randn(L, S, generator=torch.Generator().manual_seed(1))
    expected = harness.attention(q, k, v, mask=mask)
    torch.testing.assert_close(harness.attention(q, k, v, mask=mask.double(), kernel=kernel), expected)
    wide = harness.attention(q.double(), k.double(), v.double(), mask=mask, kernel=kernel)
    torch.testing.assert_close(wide.float(), expected)


# Dropout


def test_dropout_of_zero_is_exact_and_draws_nothing():
    state = torch.get_rng_state()
    assert torch.equal(harness.attention(*qkv(), dropout_p=0.0), harness.attention(*qkv()))
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_scales_what_it_keeps():
    plain = harness.attention(*qkv(), return_weights=True)[1]
    torch.manual_seed(0)
    out, dropped = harness.attention(*qkv(), dropout_p=0.25, return_weights=True)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], plain[kept] / 0.75)
    assert 0.15 < 1 - float(kept.float().mean()) < 0.35
    torch.testing.assert_close(out, dropped @ repeated(qkv()[2]))


def test_dropout_repeats_with_the_seed_and_differs_without():
    def at(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return harness.attention(*qkv(), dropout_p=0.5)

    assert torch.equal(at(0), at(0)) and not torch.equal(at(0), at(1))


def test_dropout_preserves_the_mean():
    torch.manual_seed(0)
    mean = torch.stack([harness.attention(*qkv(), dropout_p=0.3) for _ in range(2000)]).mean(0)
    torch.testing.assert_close(mean, harness.attention(*qkv()), rtol=0, atol=0.1)


def test_dropout_of_one_drops_everything():
    assert bool((harness.attention(*qkv(), dropout_p=1.0) == 0).all())


# Grouped heads


@pytest.mark.parametrize("kernel", KERNELS)
def test_grouped_heads_are_interleaved_not_tiled(kernel):
    q, k, v = qkv()
    grouped = harness.attention(q, k, v, causal=True, kernel=kernel)
    full = harness.attention(q, repeated(k), repeated(v), causal=True, kernel=kernel)
    torch.testing.assert_close(grouped, full)
    n = H // H_kv
    tiled = harness.attention(q, k.repeat(1, n, 1, 1), v.repeat(1, n, 1, 1), causal=True, kernel=kernel)
    assert float((grouped - tiled).abs().max()) > 0.1


def test_k_and_v_are_never_copied():
    heads, keys, width = 16, 4096, 64
    q, k, v = torch.randn(1, heads, 1, width), torch.randn(1, 1, keys, width), torch.randn(1, 1, keys, width)
    one = k.nbytes
    scores = 4 * heads * keys

    def repeating() -> Tensor:
        return harness.attention(q, k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1))

    assert peak_bytes(lambda: harness.attention(q, k, v)) < min(one, 4 * scores)
    assert peak_bytes(repeating) > 2 * heads * one  # so the measurement would have seen it


# Shapes, devices and modes


@pytest.mark.parametrize("kernel", KERNELS)
def test_layout_in_memory_does_not_matter(kernel):
    q, k, v = qkv()
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    spread = torch.stack([q, q], -1).flatten(-2)[..., ::2]
    assert not any(t.is_contiguous() for t in (*strided, spread))
    mask = (torch.rand(S, L, generator=torch.Generator().manual_seed(0)) > 0.3).T
    expected = harness.attention(q, k, v, mask=mask.contiguous(), causal=True, kernel=kernel)
    torch.testing.assert_close(harness.attention(*strided, mask=mask, causal=True, kernel=kernel), expected)
    torch.testing.assert_close(harness.attention(spread, k, v, mask=mask, causal=True, kernel=kernel), expected)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 2}], ids=["none", "causal", "window"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(B, 0, S), (B, L, 0), (B, 0, 0), (0, L, S)])
def test_nothing_to_attend_or_nobody_attending(batch, queries, keys, options, kernel):
    q, k = torch.randn(batch, H, queries, D), torch.randn(batch, H_kv, keys, D)
    v = torch.randn(batch, H_kv, keys, D_v)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = harness.attention(q, k, v, kernel=kernel, **options)
    assert out.shape == (batch, H, queries, D_v) and bool((out == 0).all())
    for leaf, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves, materialize_grads=True), strict=True):
        assert gradient.shape == leaf.shape and bool((gradient == 0).all())


def test_no_keys_gives_empty_weights():
    q, k, v = qkv()
    out, weights = harness.attention(q, k[:, :, :0], v[:, :, :0], return_weights=True)
    assert weights.shape == (B, H, L, 0) and bool((out == 0).all())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(), (1,), (S,), (L, 1), (L, S), (H, 1, 1), (H, L, S), (B, 1, 1, S), (B, H, L, S)])
def test_masks_of_every_rank(shape, kernel):
    q, k, v = qkv()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) > 0.4
    full = mask.expand(B, H, L, S)
    expected = F.scaled_dot_product_attention(q, k, v, full, enable_gqa=True)
    torch.testing.assert_close(harness.attention(q, k, v, mask=mask, kernel=kernel), expected)
    bias = torch.zeros(shape).masked_fill(~mask, -INF)
    torch.testing.assert_close(harness.attention(q, k, v, mask=bias, kernel=kernel), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_meta_device_gives_the_shape(kernel):
    q, k, v = (t.to("meta") for t in qkv(dtype=torch.bfloat16))
    out = harness.attention(q, k, v, causal=True, window=3, kernel=kernel)
    assert out.is_meta and out.shape == (B, H, L, D_v) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("kernel", KERNELS)
def test_inference_mode_and_no_grad_give_the_same(kernel):
    expected = harness.attention(*qkv(requires_grad=True), causal=True, kernel=kernel).detach()
    with torch.no_grad():
        torch.testing.assert_close(harness.attention(*qkv(), causal=True, kernel=kernel), expected)
    with torch.inference_mode():
        out = harness.attention(*qkv(), causal=True, kernel=kernel)
        assert out.is_inference()
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiled_gives_the_same(kernel):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return harness.attention(q, k, v, causal=True, window=4, kernel=kernel)

    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=False)
    q, k, v = qkv(requires_grad=True)
    out, expected = compiled(q, k, v), function(q, k, v)
    torch.testing.assert_close(out, expected)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_inputs_are_left_alone():
    given = qkv()
    before = [t.clone() for t in given]
    harness.attention(*given, mask=torch.zeros(L, S), causal=True, softcap=2.0)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


# Errors: name, value and rule

q0, k0, v0 = qkv()
BAD_TENSORS = {
    "q 3-D": ((q0[0], k0, v0), "q (6, 5, 8), k (2, 2, 7, 8), v (2, 2, 7, 3): each must have 4 dimensions"),
    "dtypes": ((q0.double(), k0, v0), "q torch.float64, k torch.float32, v torch.float32: must be one floating dtype"),
    "integers": (
        (q0.long(), k0.long(), v0.long()),
        "q torch.int64, k torch.int64, v torch.int64: must be one floating",
    ),
    "batch": ((q0[:1], k0, v0), "q (1, 6, 5, 8), k (2, 2, 7, 8), v (2, 2, 7, 3): must be (B, H, L, D), (B, H_kv"),
    "width": ((q0[..., :4], k0, v0), "q (2, 6, 5, 4), k (2, 2, 7, 8), v (2, 2, 7, 3): must be (B, H, L, D), (B, H_kv"),
    "lengths": ((q0, k0, v0[:, :, :4]), "v (2, 2, 4, 3): must be (B, H, L, D), (B, H_kv, S, D), (B, H_kv, S, D_v)"),
    "v heads": ((q0, k0, v0[:, :1]), "v (2, 1, 7, 3): must be (B, H, L, D), (B, H_kv, S, D), (B, H_kv, S, D_v)"),
    "groups": ((q0[:, :5], k0, v0), "query heads (5) must be a multiple of key/value heads (2)"),
    "no kv heads": ((q0, k0[:, :0], v0[:, :0]), "query heads (6) must be a multiple of key/value heads (0)"),
}
BAD_OPTIONS = {
    "mask dtype": ({"mask": torch.ones(L, S).int()}, "mask torch.int32: must be bool (True = attends) or floating"),
    "mask shape": ({"mask": torch.ones(S, L)}, "mask (7, 5): must broadcast to (B, H, L, S) = (2, 6, 5, 7)"),
    "mask rank": ({"mask": torch.ones(1, B, H, L, S)}, "mask (1, 2, 6, 5, 7): must broadcast to (B, H, L, S)"),
    "mask batch": ({"mask": torch.ones(B, L, S)}, "mask (2, 5, 7): must broadcast to (B, H, L, S) = (2, 6, 5, 7)"),
    "sinks": ({"sinks": torch.zeros(H_kv)}, "sinks (2,): must be (H,) = (6,)"),
    "dropout": ({"dropout_p": 1.5}, "dropout_p = 1.5: must be within [0, 1]"),
    "dropout nan": ({"dropout_p": float("nan")}, "dropout_p = nan: must be within [0, 1]"),
    "softcap": ({"softcap": 0.0}, "softcap = 0.0: must be positive"),
    "softcap nan": ({"softcap": float("nan")}, "softcap = nan: must be positive"),
    "q_start length": (
        {"q_start": torch.zeros(3).long()},
        "q_start torch.int64 (3,): must be an int or a (B,) integer",
    ),
    "q_start dtype": ({"q_start": torch.zeros(B)}, "q_start torch.float32 (2,): must be an int or a (B,) integer"),
    "q_start 0-D": ({"q_start": torch.tensor(1.5)}, "q_start torch.float32 (): must be an int or a (B,) integer"),
    "q_start float": ({"q_start": 1.5}, "q_start = 1.5: must be an int or a (B,) integer tensor"),
    "window": ({"window": 0}, "window = 0: must be at least 1 (self)"),
    "window pair": ({"window": (2, -2)}, "window = (2, -2): counts must be >= 0, or -1 for unbounded"),
    "window triple": ({"window": (1, 2, 3)}, "window = (1, 2, 3): must be a number of keys or a pair (left, right)"),
}


@pytest.mark.parametrize(("tensors", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors_are_named(tensors, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        harness.attention(*tensors)


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        harness.attention(*qkv(), **options)


# Kernels


def test_a_kernel_may_be_given_in_every_form(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from torch.nn.functional import scaled_dot_product_attention as fast\n")
    expected = harness.attention(*qkv(), causal=True)
    mine = Kernel("mine", lambda q, k, v, call: (F.scaled_dot_product_attention(q, k, v, enable_gqa=True), None))
    for kernel in ("auto", "eager", "sdpa", F.scaled_dot_product_attention, f"{path}:fast"):
        torch.testing.assert_close(harness.attention(*qkv(), causal=True, kernel=kernel), expected)
    torch.testing.assert_close(harness.attention(*qkv(), kernel=mine), harness.attention(*qkv()))


def test_an_unknown_kernel_lists_the_known():
    with pytest.raises(
        ValueError, match=r"unknown kernel 'flash9'; known: auto, .*eager.*, sdpa.*, or file.py:function"
    ):
        harness.attention(*qkv(), kernel="flash9")
