"""`harness.attention`: checks the arguments, finds the kernel, runs it behind the shield."""

import importlib
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.fx import Proxy

from harness.kernels import plugin, shield
from harness.kernels.call import AttentionCall, Kernel, Unsupported
from harness.kernels.names import is_plugin, kernel_names, read_options, split_name
from harness.kernels.transforms import is_transformed
from harness.registry import UnknownName

# Before any call: torch.compile(fullgraph=True) of a process' first one could not import.
_MODULES = {name: importlib.import_module(f"harness.kernels.{name}") for name in kernel_names()}

AnyKernel = str | Kernel | Callable[..., Tensor]


def find_kernel(kernel: AnyKernel) -> Kernel:
    """A name (`sparse?topk=0.5` with options), `file.py:function`, `package.module:function`, a Kernel, or a callable.

    A callable has SDPA's signature.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, str):
        name = getattr(kernel, "__name__", type(kernel).__name__)
        return plugin.from_function(kernel, name, shielded=False, origin="a callable")
    if is_plugin(kernel):
        return plugin.load(kernel)
    name, query = split_name(kernel)
    if name not in kernel_names():
        raise UnknownName(f"unknown kernel {name!r}; known: {', '.join(kernel_names())}, or file.py:function")
    options = read_options(kernel)
    module = _MODULES[name]
    # With options, and where work left out is counted, each caller has a kernel of its own.
    found: Kernel = module.make(name=kernel, **options) if query or module.KERNEL.tally is not None else module.KERNEL
    return found


def _recorded_name(kernel: AnyKernel) -> str:
    if isinstance(kernel, str):
        return kernel
    if isinstance(kernel, Kernel) and kernel.origin == "harness":
        return kernel.name
    raise Unsupported("torch.fx.symbolic_trace records a kernel by its name: give a name in the place of a function")


class AttentionRules(TypedDict, total=False):
    """What `attention` may be told besides q, k and v; its docstring says what each means."""

    mask: Tensor | None
    causal: bool
    q_start: int | Tensor | None
    window: int | tuple[int, int] | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout_p: float


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_weights: bool = False,
    kernel: AnyKernel = "auto",
    **rules: Unpack[AttentionRules],
) -> Any:
    """softmax(q k^T * scale + mask) v, with q (B, H, L, D), k (B, H_kv, S, D), v (B, H_kv, S, D_v).

    mask      bool (True = attends) or float (added to the scores), broadcastable to (B, H, L, S)
    causal    query i stands at position q_start + i and sees keys up to it
    q_start   int or (B,) tensor; default S - L, so that the last query sees the last key
    window    W visible keys, self included (0 <= i - j < W), or (left, right) counts beside self, -1 = unbounded
    scale     default D ** -0.5
    softcap   c * tanh(score / c), before any mask
    sinks     (H,) logits that join each softmax and carry no value
    dropout_p the share of the weights that is dropped; default 0

    A row that may attend nothing gives 0 with gradient 0; NaN or inf behind a mask never leaks; half-precision
    inputs are scored in fp32. With return_weights also the (B, H, L, S) weights that multiplied v.
    """
    if isinstance(q, Proxy):
        # torch.fx records a call of this function, as of torch's own.
        options = {"return_weights": return_weights, "kernel": _recorded_name(kernel), **rules}
        return q.tracer.create_proxy("call_function", attention, (q, k, v), options)
    call = make_call(q, k, v, need_weights=return_weights, **rules)
    out, weights = run(find_kernel(kernel), q, k, v, call)
    if not return_weights:
        return out
    assert weights is not None
    return out, weights


def run(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """The kernel behind the shield, for arguments that are already checked."""
    if torch.compiler.is_exporting() and q.shape[1] != k.shape[1]:
        # An exported length may be any, and torch cannot prove that rows of several heads in one keep theirs apart.
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    if not q.is_meta and torch.is_autocast_enabled("cpu" if q.is_cpu else q.device.type):
        # It would round the fp32 scores to half precision again.
        with torch.autocast(q.device.type, enabled=False):
            return shield.run(kernel, q, k, v, call)
    return shield.run(kernel, q, k, v, call)


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    q_start: int | Tensor | None = None,
    window: int | tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    need_weights: bool = False,
) -> AttentionCall:
    """The checked and normalised form of `attention`'s arguments."""
    B, L, S, D = _check_tensors(q, k, v, mask, sinks)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p = {dropout_p}: must be within [0, 1]")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap = {softcap}: must be positive")
    start = _check_start(q_start, B, S - L)
    left, right = _check_window(window)
    if mask is not None and mask.is_floating_point() and mask.dtype != q.dtype:
        # Rounded to half precision, a float32 mask would move the scores, and finfo(float32).min become -inf.
        mask = mask.to(torch.promote_types(q.dtype, torch.float32))
    if isinstance(start, int):
        # What hides nothing is dropped, so that a decode step takes the path without a mask.
        causal = causal and start < S - 1
        right = None if right is not None and start + right >= S - 1 else right
        left = None if left is not None and start + L - 1 - left <= 0 else left
    return AttentionCall(
        scale=int(D) ** -0.5 if scale is None else float(scale),  # torch.jit.trace makes sizes tensors
        q_start=start,
        mask=mask,
        causal=causal,
        left=left,
        right=right,
        softcap=softcap,
        sinks=sinks,
        dropout_p=dropout_p,
        need_weights=need_weights,
    )


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> tuple[int, int, int, int]:
    """B, L, S and D."""
    shapes = q.shape, k.shape, v.shape  # read once: each time makes a new one
    if not len(shapes[0]) == len(shapes[1]) == len(shapes[2]) == 4:
        raise ValueError(f"{_shapes(q, k, v)}: each must have 4 dimensions (batch, heads, length, channels)")
    dtype = q.dtype
    if not (dtype == k.dtype == v.dtype and dtype.is_floating_point):
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: must be one floating dtype")
    (B, H, L, D), (B_k, H_kv, S, D_k), (B_v, H_v, S_v, _) = shapes
    if B_k != B or D_k != D or B_v != B or H_v != H_kv or S_v != S:
        raise ValueError(f"{_shapes(q, k, v)}: must be (B, H, L, D), (B, H_kv, S, D), (B, H_kv, S, D_v)")
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"query heads ({H}) must be a multiple of key/value heads ({H_kv})")
    if mask is not None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(f"mask {mask.dtype}: must be bool (True = attends) or floating (added to the scores)")
        target = (B, H, L, S)
        lined_up = zip(reversed(mask.shape), reversed(target), strict=False)
        if mask.ndim > 4 or any(size not in (1, full) for size, full in lined_up):
            raise ValueError(f"mask {tuple(mask.shape)}: must broadcast to (B, H, L, S) = {target}")
    if sinks is not None and sinks.shape != (H,):
        raise ValueError(f"sinks {tuple(sinks.shape)}: must be (H,) = ({H},)")
    return B, L, S, D


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"


def _check_start(q_start: int | Tensor | None, batch: int, default: int) -> int | Tensor:
    if q_start is None:
        return default  # a tensor where torch.jit.trace records lengths
    if isinstance(q_start, Tensor):
        if q_start.is_floating_point() or q_start.dtype == torch.bool or q_start.shape not in ((), (batch,)):
            raise ValueError(f"q_start {q_start.dtype} {tuple(q_start.shape)}: must be an int or a (B,) integer tensor")
        return int(q_start) if q_start.ndim == 0 and not is_transformed() else q_start
    if not isinstance(q_start, int):
        raise ValueError(f"q_start = {q_start!r}: must be an int or a (B,) integer tensor")
    return q_start


def _check_window(window: int | tuple[int, int] | None) -> tuple[int | None, int | None]:
    """As counts of visible keys left and right of self."""
    if window is None:
        return None, None
    if isinstance(window, int):
        if window < 1:
            raise ValueError(f"window = {window}: must be at least 1 (self)")
        return window - 1, 0
    if len(window) != 2:
        raise ValueError(f"window = {window}: must be a number of keys or a pair (left, right)")
    left, right = window
    if left < -1 or right < -1:
        raise ValueError(f"window = {window}: counts must be >= 0, or -1 for unbounded")
    return (None if left == -1 else left), (None if right == -1 else right)
