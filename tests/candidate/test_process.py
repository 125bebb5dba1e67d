"""A kernel in a process of its own answers as here; what it does there is seen from here."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.candidate.client import Process
from harness.candidate.examinee import InProcess
from harness.candidate.request import Failure, Request
from harness.candidate.wire import Arena, BrokenLayout, Place, collect, publish
from harness.kernels.plugin import PluginError, find_function

KERNELS = '''
import os, time, torch
import torch.nn.functional as F

def plain(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores if attn_mask is None else scores + attn_mask).softmax(-1) @ v

buffer = []
def misbehaves(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """By the scale that it is asked with."""
    if scale == 1.0:
        q += 1
    if scale == 2.0:
        q.as_strided((1,), (1,), q.storage_offset() - 1).zero_()  # before the view
    if scale == 3.0:
        torch.rand(1)
    if scale == 4.0:
        torch.set_default_dtype(torch.float64)
    if scale == 5.0:
        os._exit(7)
    if scale == 6.0:
        time.sleep(60)
    if scale == 7.0:
        return v
    if scale == 8.0:
        raise NotImplementedError("not for eights")
    if scale == 9.0:
        return [1]
    out = plain(q, k, v, enable_gqa=enable_gqa)
    if scale == 10.0:
        if not buffer:
            buffer.append(torch.empty_like(out))
        return buffer[0].copy_(out)
    return out
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "kernels.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture(scope="module")
def misbehaving(file: Path) -> Iterator[Process]:
    process = Process(f"{file}:misbehaves", timeout_s=5)
    yield process
    process.stop()


def inputs(**options: object) -> Request:
    q, k, v = (torch.randn(2, n, 5, 8, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2))
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    return Request(strided, k[:, :, 1:], v[:, :, 1:], **options)  # type: ignore[arg-type]


@pytest.mark.fresh
def test_the_same_bits_as_here(file):
    spec = f"{file}:plain"
    here, there = InProcess(find_function(spec)[0], spec), Process(spec)
    c, mask = torch.randn(2, 4, 5, 8), torch.randn(5, 4)
    wanted = ("q", "k", "v", "mask")
    asks = [
        inputs(),
        inputs(mask=mask, mode="grad", gradients=wanted, cotangent=c, directions=tuple(map(torch.randn_like, (
            inputs().q, inputs().k, inputs().v, mask)))),
        inputs(mode="inference", repeats=3, scale=0.3),
        inputs(mode="thread"),
    ]  # fmt: skip
    for ask in asks:
        mine, theirs = here.ask(ask), there.ask(ask)
        assert mine.failure is theirs.failure is None
        assert mine.tensors.keys() == theirs.tensors.keys()
        for name, tensor in mine.tensors.items():
            assert torch.equal(tensor, theirs.tensors[name]), name
        assert (theirs.written, theirs.shares, theirs.changed) == ((), (), ())
    held = there.ask(inputs(mode="grad", gradients=("q", "v"), hold=True))
    there.ask(asks[1])  # in between
    assert held.ticket is not None
    found = there.differentiate(held.ticket, c)
    assert isinstance(found, dict)
    expected = here.ask(inputs(mode="grad", gradients=("q", "v"), cotangent=c))
    assert all(torch.equal(found[name], expected.tensors[name]) for name in ("grad q", "grad v"))
    assert torch.equal(there.reread(held.ticket), expected.out)
    there.stop()


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_writes_into_and_beside_an_input_are_seen(misbehaving, scale):
    ask = inputs(scale=scale)
    before = ask.q.clone()
    assert misbehaving.ask(ask).written == ("q",)
    assert torch.equal(ask.q, before)  # and reach nothing here


@pytest.mark.parametrize(("scale", "name"), [(3.0, "torch's RNG"), (4.0, "default dtype")])
def test_changed_state_is_told_and_put_back(misbehaving, scale, name):
    assert misbehaving.ask(inputs(scale=scale)).changed == (name,)
    assert misbehaving.ask(inputs()).changed == ()


@pytest.mark.parametrize(
    ("scale", "kind", "says"),
    [
        (5.0, "died", "the kernel's process left with exit code 7"),
        (6.0, "timeout", "no answer within 5 s"),
        (8.0, "refused", "not for eights"),
        (9.0, "contract", "kernel returned list instead of a tensor"),
    ],
)
def test_failures_are_told_and_the_next_question_is_answered(misbehaving, scale, kind, says):
    failure = misbehaving.ask(inputs(scale=scale)).failure
    assert isinstance(failure, Failure) and failure.kind == kind
    assert failure.message.startswith(says)
    assert misbehaving.ask(inputs()).failure is None


def test_memory_of_an_input_or_of_an_earlier_result_is_told(misbehaving):
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    square = Request(q, k, v, scale=7.0)
    assert misbehaving.ask(square).shares == ("v",)
    first = misbehaving.ask(inputs(scale=10.0, hold=True))
    assert first.ticket is not None
    other = inputs(scale=10.0)
    misbehaving.ask(Request(-other.q, other.k, other.v, scale=10.0))
    assert not torch.equal(misbehaving.reread(first.ticket), first.out)


def test_a_kernel_that_cannot_be_loaded(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_module")
    with pytest.raises(PluginError, match=r"broken\.py: importing it raised ModuleNotFoundError"):
        Process(f"{path}:f").start()


def test_places_that_cannot_be_are_refused():
    arena = Arena.make()
    places = publish(arena, {"out": torch.arange(6.0).view(2, 3)})
    assert torch.equal(collect(arena, places)["out"], torch.arange(6.0).view(2, 3))
    for change in ({"start": 1 << 40}, {"span": -1}, {"dtype": "object"}, {"size": [1 << 40, 3]}, {"stride": [9, 9]}):
        with pytest.raises(BrokenLayout):
            collect(arena, {"out": places["out"] | change})
    with pytest.raises(BrokenLayout):
        Place.read("nonsense")
    arena.close()
