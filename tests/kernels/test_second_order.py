"""Gradients of gradients: right, whatever the kernel, compared with torch's plain attention."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import harness
from harness.kernels.call import Unsupported
from harness.kernels.front import make_call
from harness.kernels.tiled import run_tiled
from harness.kernels.tiles import Tiling
from harness.variants.dropin import EagerMultiheadAttentionWithInProj


def doubles(B=2, H=4, H_kv=2, L=20, S=24):
    generator = torch.Generator().manual_seed(0)
    sizes = ((B, H, L, 8), (B, H_kv, S, 8), (B, H_kv, S, 6))
    return [torch.randn(size, dtype=torch.float64, generator=generator, requires_grad=True) for size in sizes]


def penalty(out, inputs):
    """The squared gradients of a loss that is linear in the output, and their own gradients."""
    first = torch.autograd.grad(out.sum(), inputs, create_graph=True)
    value = sum(g.square().sum() for g in first)
    return value, torch.autograd.grad(value, inputs)


def assert_alike(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", ["eager", "tiled", "grouped", "auto"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_gradient_penalty_of_a_linear_loss_equals_torchs(kernel, causal):
    q, k, v = doubles(S=20)
    with sdpa_kernel(SDPBackend.MATH):
        expected = penalty(F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True), (q, k, v))
    assert_alike(penalty(harness.attention(q, k, v, causal=causal, kernel=kernel), (q, k, v)), expected)


def test_where_auto_takes_tiled():
    q, k, v = doubles(1, 1, 1, 512, 512)
    with sdpa_kernel(SDPBackend.MATH):
        expected = penalty(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v))
    assert_alike(penalty(harness.attention(q, k, v, causal=True), (q, k, v)), expected)


def test_of_a_frozen_drop_in_equals_torchs():
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).requires_grad_(False)
    ours = EagerMultiheadAttentionWithInProj(8, 2, batch_first=True, dtype=torch.float64, kernel="tiled")
    ours.load_state_dict(theirs.state_dict())
    ours.requires_grad_(False)
    x = torch.randn(2, 16, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)
    with sdpa_kernel(SDPBackend.MATH):
        found, expected = (penalty(m(x, x, x, attn_mask=mask, need_weights=False)[0], (x,)) for m in (ours, theirs))
    assert_alike(found, expected)


def test_of_one_tensor_that_is_query_key_and_value():
    x = doubles(1, 2, 2, 12, 12)[0]
    found, expected = (penalty(harness.attention(x, x * 1, x, kernel=kernel), (x,)) for kernel in ("tiled", "eager"))
    assert_alike(found, expected)


def test_of_masks_and_sinks():
    q, k, v = doubles()
    mask = torch.randn(2, 1, 20, 24, dtype=torch.float64).masked_fill(torch.rand(20, 24) < 0.3, -torch.inf)
    leaves = (q, k, v, mask.requires_grad_(), torch.randn(4, dtype=torch.float64, requires_grad=True))
    rules: dict[str, Any] = {"mask": mask, "sinks": leaves[4], "softcap": 3.0, "window": (9, 2)}
    found, expected = (penalty(harness.attention(q, k, v, kernel=name, **rules), leaves) for name in ("tiled", "eager"))
    assert_alike(found, expected)


def test_first_and_second_gradients_drop_the_same_weights():
    q, k, v = doubles()
    out = run_tiled(q, k, v, make_call(q, k, v, causal=True, dropout_p=0.4), Tiling(8, 1))
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    assert_alike(torch.autograd.grad(out, (q, k, v), grad, create_graph=True), expected)
    with pytest.raises(Unsupported, match="batch of gradients: take eager"):
        torch.autograd.grad(out, (q, k, v), torch.stack([grad, grad]), is_grads_batched=True)


@pytest.mark.parametrize("kernel", ["eager", "tiled", "grouped"])
def test_batches_of_gradients_equal_one_after_another(kernel):
    q, k, v = doubles()
    out = harness.attention(q, k, v, causal=True, kernel=kernel)
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    found = torch.autograd.grad(out, (q, k, v), grads, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(out, (q, k, v), g, retain_graph=True) for g in grads]
    assert_alike(found, tuple(torch.stack(each) for each in zip(*one_by_one, strict=True)))
