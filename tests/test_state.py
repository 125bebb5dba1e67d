"""What a user's kernel changes globally is put back."""

import os
from pathlib import Path

import pytest
import torch

import harness
from harness.state import preserved

VANDAL = """
import os
import torch
import torch.nn.functional as F

def vandal(q, k, v, **options):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    torch.manual_seed(1)
    os.chdir("/")
    return F.scaled_dot_product_attention(q, k, v, **options)

class Stop(BaseException):
    pass

def stopper(q, k, v, **options):
    raise Stop("no more")
"""
CONFIG = {
    "name": "state",
    "timing": {"enabled": False},
    "grid": {"variant": ["mha", "gqa"], "embed_dim": 16, "heads": 2, "kv_heads": 1, "seq_len": 8, "mask": "causal"},
}


def snapshot() -> tuple[object, ...]:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        fast_path,
        os.getcwd(),
        torch.get_rng_state().sum().item(),
    )


def vandalise() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(3)
    os.chdir("/")
    raise RuntimeError("on purpose")


def test_everything_is_put_back_even_after_an_exception():
    before = snapshot()
    with pytest.raises(RuntimeError, match="on purpose"), preserved():
        vandalise()
    assert snapshot() == before


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


def test_whatever_a_kernel_raises_is_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("vandal.py").write_text(VANDAL)
    frame = harness.run(CONFIG, "run", kernels=["vandal.py:stopper", "eager"])
    assert list(frame["status"]) == ["error", "ok", "error", "ok"]
    assert "Stop: no more at " in frame["error"][0]
