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
from diffusers import ModelMixin
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from harness.kernels.call import Counter, Kernel
from harness.kernels.front import attention
from harness.swaps.converters import DROP_IN, Request, SwapError, is_convertible, places_of, unreached
from harness.swaps.report import SwappedModule
from harness.swaps.weights import parameter_count

OPTIONS: tuple[str, ...] = ()
REACHED = "an attention of diffusers with a processor"
SDPA = "scaled_dot_product_attention"
# Signs of an attention that does not go through SDPA; the last runs SDPA where the redirection cannot see it.
LEAVE_OUT = "leave it out with only= (harness verify --only)"
OTHER_WAYS = ("softmax", "flex_attention", "multi_head_attention_forward")


def attach(name: str, model: nn.Module, request: Request) -> tuple[list[SwappedModule], dict[str, str]]:
    """Gives every wanted attention of `model` a processor that runs our kernel; changes all of them or none.

    A row for each, and what attends without a processor and stays as it is: full name -> its class.
    """
    rows: list[SwappedModule] = []
    changes: list[tuple[nn.Module, Any]] = []
    places = places_of(name, model)
    # Not every attention class has get_processor.
    processors = {module: old for module in places if callable(old := getattr(module, "processor", None))}
    for module, old in processors.items():
        full_name = places[module][0]
        if request.wants(full_name, module):
            counter = request.counter()
            new = redirect(old, full_name, counter)
            changes.append((module, new))
            was, parameters = type(old).__name__, parameter_count(module)
            became = f"{was} [{request.kernel.name}]"
            undo = functools.partial(_put_back, module, old, new)
            rows.append(SwappedModule(full_name, was, became, parameters, parameters, counter=counter, undo=undo))
    for module, new in changes:
        _set_processor(module, new)
    reached = [*processors, *(module for module in places if is_convertible(module, DROP_IN))]
    left = unreached(places, reached, request, ModelMixin)
    return rows, {place: type(module).__name__ for place, module in left.items()}


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
    kind = processor.harness_original if isinstance(processor, Redirected) else type(processor)
    if kind.__module__.startswith("diffusers.") and not names_sdpa(kind):
        raise SwapError(f"{place}: its {kind.__name__} never calls {SDPA}: it cannot be swapped; {LEAVE_OUT}")
    new = _rebuild(kind)
    vars(new).update(vars(processor))
    vars(new).update(harness_place=place, harness_counter=counter)
    return new


@functools.cache
def names_sdpa(kind: type) -> bool:
    """Whether a processor's code, or a function or method of diffusers that it names, names SDPA or the dispatcher."""
    todo: list[Any] = [base.__dict__["__call__"] for base in kind.__mro__ if "__call__" in vars(base)]
    seen: set[Any] = set()
    while todo:
        function = inspect.unwrap(todo.pop())
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        if {SDPA, "dispatch_attention_fn"} & {*code.co_names}:
            return True
        named = [getattr(kind, name, None) or function.__globals__.get(name) for name in code.co_names]
        todo += [each for each in named if inspect.isfunction(each) and each.__module__.startswith("diffusers.")]
    return False


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
        raise SwapError(f"{place} never called {SDPA}: it cannot be swapped; {LEAVE_OUT}")
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
            raise SwapError(f"{self.place} computes attention by {name}, not by {SDPA}: {LEAVE_OUT}")
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
