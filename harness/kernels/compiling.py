"""Running what torch compiles: few graphs for many shapes, and a plain answer where there is no working compiler.

The first graph of a process takes some ten seconds to make, later ones a few. torch keeps the machine code in
TORCHINDUCTOR_CACHE_DIR (by default a folder of the user's in the system's temporary folder) for later processes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from harness.kernels.call import Unsupported

GRAPHS = 64  # of one function: dtypes, absent arguments, sizes of 1, with and without gradients; torch stops at 8


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    graph = torch.compile(function, dynamic=True, fullgraph=True)

    def run(*arguments: Any) -> Tensor:
        with _few_graphs(), refusing_without_compiler():
            return graph(*arguments)

    return run


@contextmanager
def _few_graphs() -> Iterator[None]:
    import torch.fx.experimental._config as symbols

    # No two lengths are taken for one because they happen to be equal: each coincidence would be a graph of its own.
    # And at the limit torch would run the plain code with no more than a warning, which is not what was asked for.
    with (
        symbols.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        torch._dynamo.config.patch(recompile_limit=GRAPHS, fail_on_recompile_limit_hit=True),
    ):
        yield


@contextmanager
def refusing_without_compiler() -> Iterator[None]:
    """A missing or failing C++ compiler is the machine's lack, not an error of the kernel's."""
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler

    try:
        yield
    except (InvalidCxxCompiler, CppCompileError) as error:
        raise Unsupported(_why(error)) from error
    except (BackendCompilerFailed, InductorError) as error:
        if not any(name in str(error) for name in ("InvalidCxxCompiler", "CppCompileError", "No working C++ compiler")):
            raise
        raise Unsupported(_why(error)) from error


def _why(error: Exception) -> str:
    return f"torch.compile needs a working C++ compiler (CXX): {' '.join(str(error).split())[:300]}"


def plain(t: Tensor) -> Tensor:
    """Contiguous and of its own memory: torch would compile anew for each layout."""
    return t.clone(memory_format=torch.contiguous_format)
