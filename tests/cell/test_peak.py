"""Peak memory of one call, exact to the byte."""

import pytest
import torch

from harness.cell.peak import peak_bytes

KB = 1024


def allocate(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, 64, 1000, KB, 1_000_003])
def test_one_allocation(size: int):
    assert peak_bytes(lambda: allocate(size)) == size


@pytest.mark.parametrize(
    ("dtype", "item"), [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2), (torch.bool, 1)]
)
def test_bytes_and_not_elements(dtype: torch.dtype, item: int):
    assert peak_bytes(lambda: torch.zeros(10, 7, dtype=dtype)) == 70 * item


def test_nothing_allocated_is_zero():
    tensor = torch.ones(KB)
    assert peak_bytes(lambda: None) == 0
    assert peak_bytes(lambda: tensor.view(32, 32).T[3:]) == 0
    assert peak_bytes(lambda: tensor.mul_(tensor)) == 0
    assert peak_bytes(lambda: torch.empty(0)) == 0


def test_what_lives_together_adds_up():
    def both() -> object:
        first, second = allocate(3 * KB), allocate(5 * KB)
        return first, second

    assert peak_bytes(both) == 8 * KB


def test_what_is_freed_before_does_not():
    def one_after_the_other() -> None:
        allocate(3 * KB)
        allocate(5 * KB)
        allocate(2 * KB)

    assert peak_bytes(one_after_the_other) == 5 * KB


def test_the_peak_is_in_the_middle():
    def mountain() -> object:
        kept = allocate(KB)
        high = [allocate(KB) for _ in range(9)]
        high.clear()
        return kept, allocate(2 * KB)

    assert peak_bytes(mountain) == 10 * KB


def test_what_stood_before_neither_counts_nor_is_credited():
    standing = [allocate(100 * KB)]

    def exchange() -> object:
        standing.clear()
        return allocate(60 * KB)

    assert peak_bytes(lambda: allocate(60 * KB)) == 60 * KB
    assert peak_bytes(exchange) == 60 * KB


def test_operations_and_their_temporaries():
    a, b = torch.ones(16, 16), torch.ones(16, 16)
    one = 16 * 16 * 4
    assert peak_bytes(lambda: a + b) == one
    assert peak_bytes(lambda: (a + b) * a) == 2 * one
    assert peak_bytes(lambda: ((a + b) * a) * b) == 2 * one


def test_a_backward_pass_counts():
    weight, factor = torch.ones(16, 16, requires_grad=True), torch.ones(16, 16)
    one = 16 * 16 * 4

    def step() -> object:
        return torch.autograd.grad((weight * factor).sum(), weight)

    forward = peak_bytes(lambda: (weight * factor).sum())
    assert forward == one + 4
    assert peak_bytes(step) > forward


def test_the_same_call_gives_the_same_number():
    q = torch.randn(2, 4, 32, 16)
    call = lambda: torch.softmax(q @ q.mT, -1) @ q  # noqa: E731
    assert len({peak_bytes(call) for _ in range(5)}) == 1


def test_a_call_that_raises_leaves_the_profiler_off():
    def broken() -> None:
        allocate(KB)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        peak_bytes(broken)
    assert peak_bytes(lambda: allocate(7 * KB)) == 7 * KB
