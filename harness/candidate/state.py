"""Global state that a user's kernel may change, put back so that no case, and no later call, sees another's."""

import gc
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

log = logging.getLogger(__name__)

IMPORTS = ("environment", "sys.path")  # what a user's file may set for its own later imports
WATCH_S = 5e-3
BUSY_THREAD = "a busy thread"  # it takes WATCH_S to see whether there is one
SDP_BACKENDS = ("flash", "mem_efficient", "math", "cudnn")  # the CPU's choice of SDPA follows these flags too
LIMITS = tuple({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
# Those that someone may handle; asking for all 64 would take longer than all the rest.
SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT, signal.SIGALRM),
    *(signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2, signal.SIGSEGV, signal.SIGFPE),
)


@dataclass(frozen=True)
class Setting:
    name: str
    read: Callable[[], Any]  # compared by ==
    restore: Callable[[Any], object]


@contextmanager
def preserved(keep: Collection[str] = ()) -> Iterator[None]:
    """All settings but those to `keep`, by name, are afterwards what they were before."""
    before = read_all()
    try:
        yield
    finally:
        put_back(before, keep)


def put_back(before: dict[str, Any], keep: Collection[str] = ()) -> None:
    for setting in SETTINGS:
        if setting.name not in keep and setting.read() != before[setting.name]:
            try:
                setting.restore(before[setting.name])
            except (RuntimeError, OSError, ValueError, TypeError) as failure:
                log.warning("%s was changed and cannot be put back: %s", setting.name, failure)


def read_all() -> dict[str, Any]:
    return {setting.name: setting.read() for setting in SETTINGS}


def changed(before: dict[str, Any], keep: Collection[str] = ()) -> list[str]:
    """What is not as it was, by name: those that could not be put back, and those that nobody can put back."""
    now = read_all()
    settings = [name for name in now if name not in keep and now[name] != before[name]]
    return settings + [name for name, is_left in LEFTOVERS.items() if name not in keep and is_left()]


def _deterministic() -> tuple[bool, bool, bool]:
    fills: Any = torch.utils.deterministic
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warn_only, fills.fill_uninitialized_memory


def _set_deterministic(value: tuple[bool, bool, bool]) -> None:
    fills: Any = torch.utils.deterministic
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])
    fills.fill_uninitialized_memory = value[2]


def _autocast() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def _set_autocast(value: tuple[bool, torch.dtype, bool]) -> None:
    torch.set_autocast_enabled("cpu", value[0])
    torch.set_autocast_dtype("cpu", value[1])
    torch.set_autocast_cache_enabled(value[2])


def _backends() -> dict[str, bool]:
    return {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in SDP_BACKENDS}


def _set_backends(value: dict[str, bool]) -> None:
    for name, is_on in value.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_on)


# By torch's own functions under torch.backends, whose attributes refuse to be set once torch.testing was imported.
PRECISIONS = (("generic", "all"), ("mkldnn", "all"), ("mkldnn", "matmul"))


def _precision() -> tuple[str, ...]:
    return tuple(torch._C._get_fp32_precision_getter(*place) for place in PRECISIONS)


def _set_precision(value: tuple[str, ...]) -> None:
    for place, precision in zip(PRECISIONS, value, strict=True):
        torch._C._set_fp32_precision_setter(*place, precision)


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to answer while its old and new settings disagree
        return "mixed"


def _flushes_denormals() -> bool:
    """torch has no getter, but the flag is the thread's own and shows in any product."""
    # The 1.0 is computed: Python would fold a product of constants when it compiles, under whatever flag held then.
    smallest, one = sys.float_info.min * sys.float_info.epsilon, float(len(SDP_BACKENDS) // len(SDP_BACKENDS))
    return smallest * one == 0.0


def _set_torch_random(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _numpy_random() -> tuple[str, bytes, int, int, float]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return name, keys.tobytes(), *rest  # type: ignore[union-attr]


def _set_numpy_random(state: tuple[str, bytes, int, int, float]) -> None:
    np.random.set_state((state[0], np.frombuffer(state[1], dtype=np.uint32), *state[2:]))


def _folder() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # someone removed it
        return None


def _set_environment(value: dict[str, str]) -> None:
    for name in os.environ.keys() - value.keys():
        del os.environ[name]
    os.environ.update(value)


def _set_path(value: list[str]) -> None:
    sys.path[:] = value


def _set_warnings(value: list[Any]) -> None:
    warnings.filters[:] = value  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]  # as catch_warnings does: the filters are cached


def _set_signals(value: dict[int, Any]) -> None:
    for number, handler in value.items():
        # A handler that is None was not installed by Python, so Python cannot put it back.
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _set_streams(value: tuple[Any, Any, Any]) -> None:
    sys.stdin, sys.stdout, sys.stderr = value


def _set_collector(value: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if value[0] else gc.disable)()
    gc.set_threshold(*value[1])


def _set_limits(value: dict[int, tuple[int, int]]) -> None:
    for number, limit in value.items():
        if resource.getrlimit(number) != limit:
            resource.setrlimit(number, limit)  # refused where the hard limit was lowered: that ends with the process


def _has_alarm() -> bool:
    return signal.getitimer(signal.ITIMER_REAL) != (0.0, 0.0)


def _has_busy_thread() -> bool:
    """One that waits (for a compiler's next task, say) disturbs nobody; one that computes spoils the next timing."""
    if threading.active_count() == 1:
        return False
    before = time.process_time()
    time.sleep(WATCH_S)
    return time.process_time() - before > WATCH_S / 2


SETTINGS = (
    # Unset, not set to the old one: set_default_device leaves a mode behind that slows every call.
    Setting("default device", torch.get_default_device, lambda _: torch.set_default_device(None)),
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("threads", torch.get_num_threads, torch.set_num_threads),
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("anomaly mode", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    Setting("autocast", _autocast, _set_autocast),
    Setting("fast path", torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    Setting("SDPA backends", _backends, _set_backends),
    Setting("oneDNN", torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    Setting("deterministic algorithms", _deterministic, _set_deterministic),
    Setting("matmul precision", _matmul_precision, torch.set_float32_matmul_precision),
    Setting("fp32 precision", _precision, _set_precision),
    Setting("denormals", _flushes_denormals, torch.set_flush_denormal),
    Setting("torch's RNG", lambda: torch.get_rng_state().numpy().tobytes(), _set_torch_random),
    Setting("numpy's RNG", _numpy_random, _set_numpy_random),
    Setting("numpy's errors", np.geterr, lambda value: np.seterr(**value)),
    Setting("random's RNG", random.getstate, random.setstate),
    Setting("working directory", _folder, os.chdir),
    Setting("environment", lambda: dict(os.environ), _set_environment),
    Setting("sys.path", lambda: list(sys.path), _set_path),
    Setting("warnings", lambda: list(warnings.filters), _set_warnings),
    Setting("signal handlers", lambda: {number: signal.getsignal(number) for number in SIGNALS}, _set_signals),
    Setting("resource limits", lambda: {number: resource.getrlimit(number) for number in LIMITS}, _set_limits),
    Setting("timers", _has_alarm, lambda _: signal.setitimer(signal.ITIMER_REAL, 0)),
    Setting("CPU affinity", _affinity, lambda value: os.sched_setaffinity(0, value)),
    Setting("standard streams", lambda: (sys.stdin, sys.stdout, sys.stderr), _set_streams),
    Setting("garbage collector", lambda: (gc.isenabled(), gc.get_threshold()), _set_collector),
    Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
)
LEFTOVERS: dict[str, Callable[[], bool]] = {
    "inference mode": torch.is_inference_mode_enabled,
    "a dispatch mode": lambda: torch._C._len_torch_dispatch_stack() > 0,
    "a function mode": lambda: torch._C._len_torch_function_stack() > 0,
    BUSY_THREAD: _has_busy_thread,
}
