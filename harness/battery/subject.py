"""The kernel that is asked: by its name, by `file.py:function`, or as a function."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from harness.candidate.client import Process
from harness.candidate.examinee import Examinee, InProcess
from harness.candidate.zygote import Zygote
from harness.kernels.front import attention, find_kernel
from harness.kernels.names import is_plugin

PATIENCE_S = 60.0  # for one answer
AnyKernel = str | Callable[..., Tensor] | Examinee


def examinee_of(kernel: AnyKernel, *, zygote: Zygote | None = None, **domain: Any) -> Examinee:
    """The only place that knows where a kernel runs. `domain` narrows what it declares itself.

    A user's kernel runs in a process of its own; a function that no other process could load (a closure, one typed at
    a prompt), and harness' own kernels, run here. `zygote`: what that process is forked from, if there is one.
    """
    name = kernel if isinstance(kernel, str) else place_of(kernel)
    examinee: Examinee
    if name is not None and is_plugin(name):
        examinee = Process(name, timeout_s=PATIENCE_S, zygote=zygote)
        examinee.start()
    elif name is not None:
        examinee = InProcess(adapted(name), name)
    elif callable(kernel):
        examinee = InProcess(kernel, getattr(kernel, "__name__", type(kernel).__name__))
    else:
        assert not isinstance(kernel, str)
        examinee = kernel
    if domain:
        examinee.domain = examinee.domain.narrowed(**domain)
    return examinee


def place_of(kernel: object) -> str | None:
    """`file.py:name` of a function that stands at the top of a file; None where there is no such place."""
    name, module = getattr(kernel, "__qualname__", ""), sys.modules.get(getattr(kernel, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    stands_there = name.isidentifier() and getattr(module, name, None) is kernel
    return f"{file}:{name}" if stands_there and file is not None and file.endswith(".py") else None


def adapted(name: str) -> Callable[..., Tensor]:
    """A built-in kernel with SDPA's signature."""
    kernel = find_kernel(name)

    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        out: Tensor = attention(
            q,
            k,
            v,
            mask=attn_mask,
            causal=is_causal,
            q_start=0 if is_causal else None,  # aligned top-left, as SDPA's
            scale=scale,
            dropout_p=dropout_p,
            kernel=kernel,
        )
        return out

    function.__name__ = name
    return function
