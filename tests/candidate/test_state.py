"""What a user's kernel changes globally is put back."""

import gc
import os
import random
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import harness
from harness.candidate import state
from harness.candidate.state import preserved
from tests.hostile_kernels import change_everything

VANDAL = """
import os
import torch
import torch.nn.functional as F

def vandal(q, k, v, **options):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    torch.manual_seed(1)
    os.chdir("/")
    return F.scaled_dot_product_attention(q, k, v, **options)

def loner(q, k, v, **options):
    torch.set_num_threads(1)
    return F.scaled_dot_product_attention(q, k, v, **options)

class Stop(BaseException):
    pass

def stopper(q, k, v, **options):
    raise Stop("no more")
"""
CONFIG = {
    "name": "state",
    "timing": {"enabled": False},
    "battery": {"enabled": False},
    "grid": {"variant": ["mha", "gqa"], "embed_dim": 16, "heads": 2, "kv_heads": 1, "seq_len": 8, "mask": "causal"},
}


def vandalise() -> None:
    change_everything()
    raise RuntimeError("on purpose")


def test_everything_is_put_back_even_after_an_exception():
    before = state.read_all()
    with pytest.raises(RuntimeError, match="on purpose"), preserved():
        vandalise()
    after = state.read_all()
    assert {name for name in before if after[name] != before[name]} == set()


def test_the_vandal_changes_every_setting():
    """Else the test above would not show that it is put back."""
    with preserved():
        before = state.read_all()
        change_everything()
        after = state.read_all()
    # A default device leaves a mode behind, under which some states cannot be read alike; all the others must differ.
    assert {name for name in before if after[name] == before[name]} == set()


def test_what_is_to_be_kept_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with preserved(keep=state.IMPORTS):
        sys.path.append("/nowhere")
        torch.set_default_dtype(torch.float64)
    assert sys.path[-1] == "/nowhere" and torch.get_default_dtype() == torch.float32


def test_a_setting_that_cannot_be_put_back_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    before = state.read_all()
    with preserved():
        os.chdir(tmp_path)
        gone.rmdir()
        random.seed(1)
        gc.disable()
    assert state.changed(before) == ["working directory"]
    assert "working directory was changed and cannot be put back" in caplog.text


def test_what_nobody_can_put_back_is_noticed():
    before = state.read_all()
    assert state.changed(before) == []
    with torch.inference_mode():
        assert "inference mode" in state.changed(before)
    with FakeTensorMode():
        assert state.LEFTOVERS["a dispatch mode"]()
    assert state.changed(before) == []


def test_a_thread_that_computes_is_noticed_and_one_that_waits_is_not():
    done = threading.Event()
    waiting = threading.Thread(target=done.wait)
    waiting.start()
    assert not state.LEFTOVERS["a busy thread"]()
    stop = time.monotonic() + 30
    busy = threading.Thread(target=lambda: [None for _ in iter(lambda: done.is_set() or time.monotonic() > stop, True)])
    busy.start()
    noticed = any(state.LEFTOVERS["a busy thread"]() for _ in range(20))  # on a crowded machine not at once
    done.set()
    waiting.join()
    busy.join()
    assert noticed


def test_a_default_device_is_put_back():
    with preserved():
        torch.set_default_device("meta")
        assert torch.empty(1).is_meta
    assert not torch.empty(1).is_meta


def test_one_kernel_cannot_change_the_numbers_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("vandal.py").write_text(VANDAL)
    alone = harness.run(CONFIG, "alone", kernels=["eager"])
    beside = harness.run(CONFIG, "beside", kernels=["vandal.py:vandal", "eager"])
    shared = beside[beside["kernel"] == "eager"]
    assert list(shared["err_ratio"]) == list(alone["err_ratio"])
    assert set(beside["status"]) == {"ok"}


def test_a_kernel_that_leaves_torch_at_one_thread_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("vandal.py").write_text(VANDAL)
    frame = harness.run(CONFIG, "run", kernels=["vandal.py:loner", "eager"])
    assert list(frame["status"]) == ["mismatch", "ok", "mismatch", "ok"]
    assert frame["error"][0].endswith("kernel set torch's threads to 1")


def test_whatever_a_kernel_raises_is_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("vandal.py").write_text(VANDAL)
    frame = harness.run(CONFIG, "run", kernels=["vandal.py:stopper", "eager"])
    assert list(frame["status"]) == ["error", "ok", "error", "ok"]
    assert "Stop: no more at " in frame["error"][0]
