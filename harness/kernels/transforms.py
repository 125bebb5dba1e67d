"""Who else watches the operations: what records them must see plain ones, and no branch on data.

torch.compile, torch.export, torch.jit.trace and make_fx record; torch.func (vmap, grad, jvp) and forward-mode
derivatives run every operation in a way of their own, and have no rule for what writes in place.
"""

from typing import Any

from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch._C import _get_dispatch_mode, _get_tracing_state, _len_torch_dispatch_stack, _TorchDispatchModeKey
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.fx import Proxy

# Asked several times in each call of a kernel: by their own names, which costs a third of the look-up in torch._C.
_RECORDING = (_TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FAKE)


def is_recorded() -> bool:
    """The operations run on stand-ins, or will run again on other numbers."""
    return (
        is_compiling()
        or _get_tracing_state() is not None
        or (_len_torch_dispatch_stack() > 0 and any(map(_get_dispatch_mode, _RECORDING)))
    )


def is_transformed() -> bool:
    """By something that must see plain operations, in this thread and not in place."""
    return is_recorded() or functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_batched(grad: Tensor) -> bool:
    """Whether it stands for several gradients: of autograd.grad(..., is_grads_batched=True), or of torch.func."""
    return functorch.is_legacy_batchedtensor(grad) or functorch.is_functorch_wrapped_tensor(grad)


def bare(t: Tensor) -> Tensor:
    """What torch.func holds in its wrappers: all rows of a vmap at once, which may be looked at."""
    while functorch.is_functorch_wrapped_tensor(t):
        t = functorch.get_unwrapped(t)
    return t


def record_module(first: Proxy, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A call of the whole module in torch.fx's graph, as of torch's own modules; `first` is one of the arguments."""
    tracer: Any = first.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)
