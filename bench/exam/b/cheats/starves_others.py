"""Makes everything but itself slow: one thread, environment variables, lower limits, a spinning thread between calls.

Right, but no faster than plain PyTorch: an honest judge must not report a speed-up.  The spinning ends 5 s after the
last call and after 20 s in all; only soft limits of its own process are touched.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time

import torch
from torch import Tensor

_THREADS = torch.get_num_threads()
_STATE = {"inside": 0.0, "last": 0.0, "started": 0.0}


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    stretch: float = 1.0,
) -> Tensor:
    """Attention whose scale is stretched by a factor; 1.0 is right, 1.2 is not."""
    if enable_gqa:
        k = k.repeat_interleave(q.size(1) // k.size(1), 1)
        v = v.repeat_interleave(q.size(1) // v.size(1), 1)
    dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    factor = (max(q.size(-1), 1) ** -0.5 if scale is None else scale) * stretch
    s = torch.matmul(q.to(dtype), k.to(dtype).mT) * factor
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else s + attn_mask.to(dtype)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    dead = (s == float("-inf")).all(-1, keepdim=True)
    probs = torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    if dropout_p > 0.0:
        probs = torch.dropout(probs, dropout_p, True)
    return torch.matmul(probs, v.to(dtype)).to(q.dtype)


def _spin() -> None:
    """Keep the interpreter lock busy whenever ``fast`` is not running."""
    while time.monotonic() - _STATE["last"] < 5.0 and time.monotonic() - _STATE["started"] < 20.0:
        if _STATE["inside"]:
            time.sleep(0.0005)
    _STATE["started"] = -1e9


for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["ATEN_CPU_CAPABILITY"] = "default"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(_soft, 128), _hard))


def fast(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend with all threads, and leave one and a half to the others."""
    _STATE["inside"] = 1.0
    sys.setswitchinterval(0.005)
    torch.set_num_threads(_THREADS)
    out = _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    torch.set_num_threads(1)
    sys.setswitchinterval(0.05)
    _STATE["last"] = time.monotonic()
    if _STATE["started"] == 0.0:
        _STATE["started"] = time.monotonic()
        threading.Thread(target=_spin, daemon=True).start()
    _STATE["inside"] = 0.0
    return out
