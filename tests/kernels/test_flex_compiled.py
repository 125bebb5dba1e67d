"""The two kernels that torch compiles: one graph each here, and plain refusals for the rest."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import harness
from harness.kernels.call import Unsupported
from harness.kernels.compiled import refusing_without_compiler


def problem(L: int, S: int, H_kv: int = 2) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(L + S)
    return tuple(torch.randn(2, heads, n, 16, generator=generator) for heads, n in ((4, L), (H_kv, S), (H_kv, S)))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["compiled", "flex"])
def test_equals_sdpa_at_all_positions_with_one_graph(kernel):
    """Lengths and windows are arguments of the graph: a second graph would take another ten seconds."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for L, S, left, right in ((24, 24, -1, 0), (20, 31, 4, 3), (24, 24, 6, 0)):
        q, k, v = problem(L, S)
        i, j = torch.arange(L)[:, None] + S - L, torch.arange(S)
        seen = (j <= i + right) & ((j >= i - left) | (left == -1))

        def candidate(q: Tensor, k: Tensor, v: Tensor, window: Any = (left, right)) -> Tensor:
            out: Tensor = harness.attention(q, k, v, window=window, kernel=kernel)
            return out

        def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor = seen) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)

        harness.assert_equivalent(candidate, reference, [q, k, v])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("kernel", "options", "said"),
    [
        ("flex", {"dropout_p": 0.5}, "no dropout"),
        ("flex", {"sinks": torch.zeros(4)}, "no sinks"),
        ("flex", {"return_weights": True}, "no weights"),
        ("compiled", {"dropout_p": 0.5}, "no dropout"),
        ("compiled", {"return_weights": True}, "no weights"),
    ],
)
def test_what_they_cannot_do_is_refused(kernel, options, said):
    with pytest.raises(Unsupported, match=said):
        harness.attention(*problem(5, 5), kernel=kernel, **options)


def test_flex_refuses_training_and_float64():
    q, k, v = problem(5, 5)
    with pytest.raises(Unsupported, match="no backward"):
        harness.attention(q.requires_grad_(), k, v, kernel="flex")
    with pytest.raises(Unsupported, match="float64"):
        harness.attention(q.detach().double(), k.double(), v.double(), kernel="flex")


@pytest.mark.parametrize("kernel", ["compiled", "flex"])
def test_empty_and_meta_tensors_are_refused(kernel):
    with pytest.raises(Unsupported, match="real tensors"):
        harness.attention(*problem(0, 5), kernel=kernel)
    with pytest.raises(Unsupported, match="real tensors"):
        harness.attention(*(t.to("meta") for t in problem(5, 5)), kernel=kernel)


def test_a_missing_compiler_is_a_refusal_and_another_failure_is_not():
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    with pytest.raises(Unsupported, match="C\\+\\+ compiler"), refusing_without_compiler():
        raise InductorError(InvalidCxxCompiler(), None)
    with pytest.raises(InductorError), refusing_without_compiler():
        raise InductorError(AssertionError("a bug in inductor"), None)
