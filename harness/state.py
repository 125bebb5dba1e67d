"""Global state that a user's kernel may change, put back after each case so that no case sees another's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def preserved() -> Iterator[None]:
    dtype, device, threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    grad, fast_path = torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    random, folder = torch.get_rng_state(), os.getcwd()
    try:
        yield
    finally:
        # Unset, not set to the old one: set_default_device leaves a mode behind that slows every call.
        if torch.get_default_device() != device:
            torch.set_default_device(None)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.backends.mha.set_fastpath_enabled(fast_path)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_rng_state(random)
        os.chdir(folder)
