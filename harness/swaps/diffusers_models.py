"""Models of diffusers: every attention keeps its processor, whose `scaled_dot_product_attention` becomes our kernel.

A processor projects, normalises and rotates in its own way and then calls SDPA, by itself (CogVideoX, HunyuanDiT) or
through diffusers' dispatcher (Flux, Wan). So a copy of each processor gets a subclass of its own class that runs the
old code with that one call redirected. What computes attention in any other way raises: a bypass never passes.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from harness.kernels.call import Counter, Kernel
from harness.kernels.front import attention
from harness.swaps.converters import Request, SwapError
from harness.swaps.report import SwappedModule
from harness.swaps.weights import parameter_count

OPTIONS: tuple[str, ...] = ()
SDPA = "scaled_dot_product_attention"
# Signs of an attention that does not go through SDPA; the last runs SDPA where the redirection cannot see it.
OTHER_WAYS = ("softmax", "flex_attention", "multi_head_attention_forward")


def attach(name: str, model: nn.Module, request: Request) -> list[SwappedModule]:
    """Gives every wanted attention of `model` a processor that runs our kernel; changes all of them or none."""
    rows: list[SwappedModule] = []
    changes: list[tuple[nn.Module, Any]] = []
    for place, module in model.named_modules():
        full_name = ".".join(part for part in (name, place) if part)
        old = getattr(module, "processor", None)  # not every attention class has get_processor
        if callable(old) and request.wants(full_name, module):
            counter = request.counter()
            new = redirect(old, full_name, counter)
            changes.append((module, new))
            was, parameters = type(old).__name__, parameter_count(module)
            became = f"{was} [{request.kernel.name}]"
            undo = functools.partial(_put_back, module, old, new)
            rows.append(SwappedModule(full_name, was, became, parameters, parameters, counter=counter, undo=undo))
    for module, new in changes:
        _set_processor(module, new)
    return rows


def _put_back(module: nn.Module, old: Any, new: Any) -> None:
    if isinstance(old, nn.Module):
        old.training = new.training  # all else that can change is shared by the two
    _set_processor(module, old)


def _set_processor(module: nn.Module, processor: Any) -> None:
    if hasattr(module, "set_processor"):
        module.set_processor(processor)  # type: ignore[operator]
    else:
        module.processor = processor


class Redirected:
    """What the processors made here have in common; the processor's own class comes next in their ancestry."""

    harness_original: type
    harness_place: str
    harness_counter: Counter

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made on the fly and pickle would not find it by its name.
        return _rebuild, (self.harness_original,), vars(self)


def redirect(processor: Any, place: str, counter: Counter) -> Any:
    """A copy of `processor` (sharing its weights, if it has any) that sends its SDPA calls to the counter's kernel."""
    if inspect.isroutine(processor):
        raise SwapError(f"{place}: its processor is the function {processor.__qualname__}: must be an object")
    refuse_other_backends(processor, place)
    new = _rebuild(processor.harness_original if isinstance(processor, Redirected) else type(processor))
    vars(new).update(vars(processor))
    vars(new).update(harness_place=place, harness_counter=counter)
    return new


def _rebuild(kind: type) -> Any:
    made: Any = redirected(kind)
    return made.__new__(made)


@functools.cache
def redirected(kind: Any) -> type:
    # diffusers drops every keyword that the signature of __call__ does not name: `wraps` keeps that signature.
    @functools.wraps(kind.__call__)
    def call(self: Redirected, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    # Under its old name: diffusers looks at names of processors, and shows them in its messages.
    return type(kind.__name__, (Redirected, kind), {"__call__": call, "harness_original": kind})


# Traced by dynamo, the redirection would see a graph's operations instead of SDPA.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def run(processor: Redirected, *args: Any, **kwargs: Any) -> Any:
    refuse_other_backends(processor, processor.harness_place)
    kind: Any = processor.harness_original
    place = f"{processor.harness_place} ({kind.__name__})"
    redirection = Redirection(processor.harness_counter.as_kernel(), place)
    with redirection:
        result = kind.__call__(processor, *args, **kwargs)
    if redirection.calls == 0:
        raise SwapError(f"{place} never called {SDPA}: it cannot be swapped; leave it out with only=")
    return result


def refuse_other_backends(processor: Any, place: str) -> None:
    """Another backend than SDPA would run instead of our kernel. The attribute marks those that use the dispatcher."""
    if not hasattr(processor, "_attention_backend"):
        return
    backend = processor._attention_backend or _AttentionBackendRegistry.get_active_backend()[0]
    if backend != AttentionBackendName.NATIVE:
        raise SwapError(f"{place}: diffusers' attention backend is {str(backend.value)!r}: must be 'native' for a swap")
    if getattr(processor, "_parallel_config", None) is not None:
        raise SwapError(f"{place}: context parallelism is on, and a swap cannot take part in it")


class Redirection(TorchFunctionMode):
    """While active, SDPA is our kernel; off again while the kernel runs, so that it may call SDPA itself."""

    def __init__(self, kernel: Kernel, place: str) -> None:
        super().__init__()
        self.kernel, self.place, self.calls = kernel, place, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == SDPA:
            self.calls += 1
            return sdpa(self.kernel, *args, **(kwargs or {}))
        if name in OTHER_WAYS or name.startswith("_scaled_dot_product"):
            raise SwapError(f"{self.place} computes attention by {name}, not by {SDPA}: leave it out with only=")
        return func(*args, **(kwargs or {}))


def sdpa(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` by another kernel: is_causal counts from the first key, autocast casts."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value, attn_mask = (autocast(t, device) for t in (query, key, value, attn_mask))  # type: ignore[assignment]
        with torch.autocast(device, enabled=False):
            return sdpa(kernel, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if not 2 <= query.ndim <= 4:
        raise SwapError(f"{SDPA} with q {tuple(query.shape)}: must have 2 to 4 dimensions")
    missing = (None,) * (4 - query.ndim)  # (L, D) or (H, L, D): what broadcasts from the right fits all the same
    q, k, v = query[missing], key[missing], value[missing]  # (B, H, L, D)
    if not enable_gqa and k.shape[1] not in (1, q.shape[1]):
        raise SwapError(f"{SDPA} with {q.shape[1]} query and {k.shape[1]} key heads: must be equal without enable_gqa")
    out: Tensor = attention(
        q, k, v, mask=attn_mask, causal=is_causal, q_start=0, scale=scale, dropout_p=dropout_p, kernel=kernel
    )
    return out.reshape(*query.shape[:-1], value.shape[-1])


def autocast(tensor: Tensor | None, device: str) -> Tensor | None:
    """As torch does before SDPA: floating tensors but float64 take the dtype of autocast."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
