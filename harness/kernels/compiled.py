"""Eager's lines as torch.compile makes them: inductor's code, in a form that needs few graphs.

Heads and batch become one dimension and the masks one tensor, so that shapes, windows and positions share a graph;
each dtype, each of bias, mask, softcap and sinks, and training take another.

The first graph of a process takes some ten seconds to make, later ones a few. torch keeps the machine code in
TORCHINDUCTOR_CACHE_DIR (by default a folder of the user's in the system's temporary folder) for later processes.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from harness.kernels.call import AttentionCall, Kernel, Unsupported

GRAPHS = 64  # of one function: dtypes, absent arguments, sizes of 1, with and without gradients; torch stops at 8


def compiled_by_torch(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """With few graphs for many shapes; Unsupported where there is no working compiler. Made at the first call."""
    graph = functools.cache(lambda: torch.compile(function, dynamic=True, fullgraph=True))

    def run(*arguments: Any) -> Tensor:
        with _few_graphs(), refusing_without_compiler():
            return graph()(*arguments)

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
    except (InvalidCxxCompiler, CppCompileError, BackendCompilerFailed, InductorError) as error:
        signs = ("InvalidCxxCompiler", "CppCompileError", "No working C++ compiler")
        if not any(sign in f"{type(error).__name__} {error}" for sign in signs):
            raise
        why = " ".join(str(error).split())[:300]
        raise Unsupported(f"torch.compile needs a working C++ compiler (CXX): {why}") from error


def plain(t: Tensor) -> Tensor:
    """Contiguous and of its own memory: torch would compile anew for each layout."""
    return t.clone(memory_format=torch.contiguous_format)


def compiled(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    if call.need_weights:
        raise Unsupported("the compiled kernel gives no weights")
    if call.dropout_p > 0:
        raise Unsupported("the compiled kernel has no dropout")
    (B, H, L), (H_kv, S), D_v, dtype = q.shape[:3], k.shape[1:3], v.shape[-1], q.dtype
    if q.is_meta or min(B, L, S) == 0:
        raise Unsupported("the compiled kernel needs real tensors that are not empty")
    wide = torch.promote_types(dtype, torch.float32)
    allowed, bias, sinks = call.allowed(q, k), call.bias, call.sinks

    def rows(t: Tensor) -> Tensor:
        """From what broadcasts to (B, H, L, S) to one row for each row of the products."""
        return plain(t.expand(B, H, L, t.shape[-1]).reshape(B * H_kv, H // H_kv * L, t.shape[-1]))

    out = _lines(
        rows(q.to(wide)),
        *(plain(t.to(wide).flatten(0, 1)) for t in (k, v)),  # (B*H_kv, S, D)
        torch.tensor(call.scale, dtype=wide, device=q.device),
        None if allowed is None else rows(~allowed.expand(B, H, L, S)),
        None if bias is None else rows(bias.to(wide).expand(B, H, L, S)),
        None if call.softcap is None else torch.tensor(call.softcap, dtype=wide, device=q.device),
        None if sinks is None else rows(sinks.to(wide).view(1, H, 1, 1)),
    )
    return out.view(B, H, L, D_v).to(dtype), None


@compiled_by_torch
def _lines(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    hidden: Tensor | None,
    bias: Tensor | None,
    softcap: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    scores = (q * scale) @ k.mT  # (B*H_kv, G*L, S)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    return weights @ v


KERNEL = Kernel("compiled", compiled)
