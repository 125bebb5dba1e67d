"""Kernels that crash, hang, eat memory or change the world, each in its own way; `good` and `also_good` are right."""

import ctypes
import gc
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

GIB = 1 << 30
HELD: list[Any] = []


def good(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def also_good(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


# Ends its process


def segfaults(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    print("about to read address 0")
    ctypes.string_at(0)
    return q


def aborts(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    os.abort()


def leaves_at_once(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    os._exit(0)


def damages_the_next(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Right, but a second later its process dies, in the middle of somebody else's case."""
    if not HELD:
        HELD.append(subprocess.Popen(["sh", "-c", f"sleep 1; kill -SEGV {os.getpid()}"]))
    return good(q, k, v, **options)


def takes_two_seconds(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if not HELD:
        time.sleep(2)
        HELD.append("slept")
    return good(q, k, v, **options)


# Never ends


def hangs_in_python(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    while True:
        time.sleep(0.01)


def hangs_in_c(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the GIL: no other thread of the process runs
    return q


def hangs_printing(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    while True:
        print("still here " * 100)


def ignores_signals(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    for number in (signal.SIGABRT, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    return hangs_in_c(q, k, v)


# Eats memory


def takes_100_gib(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return torch.empty(100 * GIB, dtype=torch.uint8)


def takes_100_gib_by_numpy(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return torch.from_numpy(np.ones(100 * GIB, dtype=np.uint8))


def takes_100_gib_by_bytes(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return torch.frombuffer(bytearray(100 * GIB), dtype=torch.uint8)


def takes_100_gib_in_steps(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return torch.cat([torch.ones(GIB // 32, dtype=torch.uint8) for _ in range(32 * 100)])


def takes_shared_memory(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Is no process's data: only a look from outside sees it."""
    held = []
    for _ in range(100):
        held.append(mmap.mmap(-1, GIB // 16))
        held[-1].write(bytes(GIB // 16))
        time.sleep(0.02)
    return q


def takes_it_by_a_child(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    program = "import time; held = [b'x' * (1 << 24) for _ in range(24)]; time.sleep(60)"
    children = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(4)]
    for child in children:
        child.wait()
    return q


# Raises


def raises(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    raise RuntimeError("no such tile")


def exits(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    sys.exit(0)


def interrupts(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    raise KeyboardInterrupt


# Meddles with its worker


def forks(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Once; parent and child both go on as if they were the worker."""
    if not HELD:
        HELD.append("forked")
        child, deadline = os.fork(), time.monotonic() + 1
        while child and os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
    return good(q, k, v, **options)


def closes_every_pipe(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    os.closerange(3, 256)
    return hangs_in_python(q, k, v)


def starts_a_session(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if not HELD:
        HELD.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
    return good(q, k, v, **options)


# Right, but leaves its traces


def prints_a_lot(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    for _ in range(2000):
        print("x" * 1000)
    return good(q, k, v, **options)


def closes_the_streams(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    sys.stdout.close()
    for handle in (0, 1, 2):
        if _is_open(handle):
            os.close(handle)
    return good(q, k, v, **options)


def _is_open(handle: int) -> bool:
    try:
        os.fstat(handle)
    except OSError:
        return False
    return True


def leaves_a_busy_thread(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    if threading.active_count() == 1:
        threading.Thread(target=_spin, daemon=True).start()
    return good(q, k, v, **options)


def _spin() -> None:
    while True:
        pass


def stays_in_inference_mode(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    HELD.append(torch.inference_mode())
    out = good(q, k, v, **options)
    HELD[-1].__enter__()
    return out


def changes_everything(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out = good(q, k, v, **options)
    change_everything()
    return out


def change_everything() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(3)
    torch.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    torch.set_autocast_enabled("cpu", True)
    torch.set_autocast_dtype("cpu", torch.float16)
    torch.set_autocast_cache_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.cuda.enable_flash_sdp(False)
    torch._C._set_mkldnn_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("medium")
    torch.set_flush_denormal(True)
    torch.manual_seed(99)
    np.random.seed(99)
    np.seterr(all="ignore")
    random.seed(99)
    os.chdir("/")
    os.environ["HARNESS_TEST_CHANGED"] = "1"
    os.environ.pop("PATH", None)
    sys.path.insert(0, "/nowhere")
    warnings.simplefilter("error")
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.stdout = sys.stderr
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    gc.disable()
    gc.set_threshold(1)
    sys.setrecursionlimit(5000)
