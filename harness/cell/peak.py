"""How much memory one call holds at once."""

from collections.abc import Callable

from torch._C import _autograd as autograd
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that the call itself held at once; older memory that it frees is not credited.

    Exact, from the CPU allocator's own events, so it can be gated like a count.
    """
    # The legacy profiler gives the same allocator events as torch.profiler, at a hundredth of the set-up time.
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    autograd._enable_profiler_legacy(config)
    try:
        call()
    finally:
        threads = autograd._disable_profiler_legacy()
    current = peak = 0
    for events in threads:
        for event in events:
            if str(event.kind()) == "memory_alloc":  # frees are negative
                current += event.cpu_memory_usage()
                peak = max(peak, current)
    return peak
