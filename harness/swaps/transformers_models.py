"""Hugging Face models: our kernels through transformers' own attention interface.

Under the one implementation name "harness" every attention module runs the kernel that was attached to it. The name
comes with a mask function, for without one transformers gives no mask at all: a bool mask, True = attends, that always
spells out causality and windows.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.utils.output_capturing import _active_collector

from harness.kernels.call import Kernel, Unsupported, one_dtype
from harness.kernels.front import attention
from harness.swaps import deepseek
from harness.swaps.converters import DROP_IN, Places, Request, SwapError, is_convertible, places_of, unreached
from harness.swaps.report import SwappedModule
from harness.swaps.weights import parameter_count

OPTIONS = deepseek.OPTIONS
REACHED = "an attention of transformers that goes through its attention interface"
IMPLEMENTATION = "harness"
ATTRIBUTE = "harness_attention"  # of each attention module: what the swap attached to it

# Keywords of a call that say nothing about its numbers: what is hidden is in the mask, windows and packing too.
SILENT = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "sliding_window",
        "use_cache",
    }
)


@dataclass(frozen=True)
class Attached:
    kernel: Kernel | None  # None: the swap left this module out, and it goes on as before
    previous: str  # the implementation before the swap


def run_attached(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **rules: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls, with query (B, H, L, D); gives (B, L, H, D_v) and, where asked for, the weights."""
    attached = _attached(module)
    if attached is None:
        raise SwapError(
            f"{type(module).__name__} is to run the implementation {IMPLEMENTATION!r}, but no swap attached a kernel to"
            " it: call harness.swap on this model, or give it another implementation"
        )
    if attached.kernel is None:
        run, mask = _previous_run(attached.previous, module, attention_mask, query.dtype)
        return run(module, query, key, value, mask, **rules)
    return _run_kernel(attached.kernel, attached.previous, module, query, key, value, attention_mask, **rules)


def _run_kernel(
    kernel: Kernel,
    previous: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    if unknown := sorted(name for name in others.keys() - SILENT if others[name] is not None):
        raise Unsupported(f"{type(module).__name__} passes {', '.join(unknown)}: the swap does not know what that does")
    if mask is not None and not isinstance(mask, Tensor):
        raise Unsupported(f"attention_mask is {type(mask).__name__}: must be a tensor that broadcasts to (B, H, L, S)")
    wants_weights = _wants_weights(module.config, output_attentions)
    if wants_weights and not kernel.gives_weights:
        raise Unsupported(f"output_attentions: kernel {kernel.name} gives no attention weights")

    # Our mask function never leaves the mask out. Who does means all keys where eager ran before, and elsewhere what
    # SDPA would do: causal, aligned top-left, but for a single query.
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and mask is None and query.shape[2] > 1 and previous != "eager"
    query, key, value = one_dtype(query, key, value)
    if indices is not None:
        mask = _only_at(indices, mask, key.shape[2])
    out = attention(
        query,
        key,
        value,
        mask=mask if position_bias is None else _with_bias(mask, position_bias),
        causal=causal,
        q_start=0 if causal else None,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        dropout_p=dropout if module.training else 0.0,
        return_weights=wants_weights,
        kernel=kernel,
    )
    out, weights = out if wants_weights else (out, None)
    return out.transpose(1, 2).contiguous(), weights  # (B, L, H, D_v)


def _wants_weights(config: Any, output_attentions: bool | None) -> bool:
    """Whether somebody will look at this call's weights.

    The keyword alone does not tell: many models (GPT-2, OPT, StableLM ...) never hand it down to their attentions,
    whose second output transformers collects by hooks. Eager always gives it; ours where it is being collected.
    """
    asked = config.output_attentions if output_attentions is None else output_attentions
    return bool(asked) or any(key.endswith("attentions") for key in _active_collector.get() or ())


def _only_at(indices: Tensor, mask: Tensor | None, keys: int) -> Tensor:
    """The mask without the keys that an indexer (DeepSeek-V3.2) did not choose: indices are (B, L, chosen)."""
    chosen = indices.new_zeros((*indices.shape[:2], keys), dtype=torch.bool).scatter(-1, indices.long(), True)
    chosen = chosen[:, None]  # (B, 1, L, S)
    if mask is None or mask.dtype == torch.bool:
        return chosen if mask is None else mask & chosen
    return mask.masked_fill(~chosen, float("-inf"))


def _with_bias(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask


def _previous_run(
    previous: str, module: nn.Module, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Callable[..., Any], Tensor | None]:
    """What the module ran before the swap, and our mask as that takes it."""
    if previous != "eager":
        return AttentionInterface().get_interface(previous, None), mask
    if mask is not None and mask.dtype == torch.bool:
        # What transformers' own mask function for eager would have made.
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    return _eager_of(module), mask


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """The eager function beside the module's class, which only its forward knows by name."""
    forward = inspect.unwrap(type(module).forward)
    names = [name for name in forward.__code__.co_names if name.endswith("eager_attention_forward")]
    if len(names) != 1:
        raise SwapError(f"{type(module).__name__} names {len(names)} eager functions: cannot leave it out of a swap")
    return forward.__globals__[names[0]]


def visible_keys(*args: Any, **options: Any) -> Tensor:
    """transformers' bool mask (B, 1, L, S), never left out in favour of a flag."""
    return sdpa_mask(*args, **{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


AttentionInterface.register(IMPLEMENTATION, run_attached)
AttentionMaskInterface.register(IMPLEMENTATION, visible_keys)


def attach(name: str, model: nn.Module, request: Request) -> tuple[list[SwappedModule], dict[str, str]]:
    """Gives every attention of `model` that is asked for the kernel; a row for each, and nothing that is left.

    The model gets a copy of its config until the swap is undone: another model may share the old one.
    """
    assert isinstance(model, PreTrainedModel)
    places = places_of(name, model)
    found = {module: names for module, names in places.items() if _is_known(module)}
    wanted = [module for module, names in found.items() if any(request.wants(place, module) for place in names)]
    _refuse_unreachable(places, found, request)
    if not wanted:
        return [], {}
    swap = _Attachment(name, model)
    try:
        swap.take_over(found, wanted)
        rows = [swap.attach(module, found[module], request) for module in wanted]
        if not swap.replaced and (ignored := sorted(request.options.keys() & {*OPTIONS})):
            raise SwapError(f"options {', '.join(ignored)}: only latent attention heeds them, and there is none")
    except BaseException:
        swap.undo_all()
        raise
    return rows, {}


def _is_known(module: nn.Module) -> bool:
    """Whether its forward looks its attention function up in the interface, or is our own."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return isinstance(module, deepseek.LatentAttention) or "ALL_ATTENTION_FUNCTIONS" in getattr(code, "co_names", ())


def _refuse_unreachable(places: Places, found: Places, request: Request) -> None:
    """An attention that computes by itself would run on unswapped, and nothing would tell."""
    reached = [*found, *(module for module in places if is_convertible(module, DROP_IN))]
    for place, module in unreached(places, reached, request, PreTrainedModel).items():
        raise SwapError(
            f"{place} is {type(module).__name__}, which does not go through transformers' attention interface:"
            " it cannot be swapped; leave it out with only= (harness verify --only)"
        )


def _attached(module: nn.Module) -> Attached | None:
    return getattr(module, ATTRIBUTE, None)


def _previous(module: nn.Module, name: str, partial: bool) -> str:
    config = vars(module).get("config")
    if not isinstance(config, PreTrainedConfig):
        raise SwapError(f"{name} is {type(module).__name__}, which holds no config to choose its attention by")
    previous: str = config._attn_implementation
    if partial and previous == "eager":
        _eager_of(module)
    elif partial and previous != "sdpa":
        raise SwapError(f"the model runs {previous}: only where it runs eager or sdpa can some layers be left out")
    return previous


@dataclass
class _Attachment:
    """One model's swap: what was before, and what is still swapped."""

    name: str
    model: PreTrainedModel
    configs: list[tuple[nn.Module, PreTrainedConfig]] = field(default_factory=list)
    attributes: list[tuple[nn.Module, Attached | None]] = field(default_factory=list)
    replaced: dict[nn.Module, nn.Module] = field(default_factory=dict)  # old -> new
    live: set[nn.Module] = field(default_factory=set)

    def take_over(self, found: Places, wanted: list[nn.Module]) -> None:
        """Every attention remembers what it ran; then all of them are called through our implementation."""
        partial = len(wanted) < len(found)
        previous = {module: _previous(module, found[module][0], partial) for module in found if not _attached(module)}
        copies: dict[int, Any] = {}  # deepcopy's memo: what was one config stays one
        for module in self.model.modules():
            if isinstance(old := vars(module).get("config"), PreTrainedConfig):
                self.configs.append((module, old))
                module.config = copy.deepcopy(old, copies)
        self.model.set_attn_implementation(IMPLEMENTATION)
        for module, names in found.items():
            config: Any = module.config
            if config._attn_implementation != IMPLEMENTATION:
                # Of a model put together from others, parts still hold the configs of those: theirs follow by hand.
                holder = self._holder(module)
                if holder.config._attn_implementation != IMPLEMENTATION:
                    kind = type(holder).__name__
                    raise SwapError(f"{names[0]}: {kind} supports no attention implementation but its own")
                config._attn_implementation = IMPLEMENTATION
            self.attributes.append((module, _attached(module)))  # not None: swapped before
            if module in previous:
                setattr(module, ATTRIBUTE, Attached(None, previous[module]))

    def _holder(self, module: nn.Module) -> PreTrainedModel:
        """The innermost library's model around it: the one that makes its masks."""
        models = [each for each in self.model.modules() if isinstance(each, PreTrainedModel)]
        return [each for each in models if any(part is module for part in each.modules())][-1]

    def attach(self, module: nn.Module, names: list[str], request: Request) -> SwappedModule:
        counter = request.counter()
        kernel = counter.as_kernel()
        new = deepseek.convert(module, kernel, request)
        if new is None:
            setattr(module, ATTRIBUTE, Attached(kernel, getattr(module, ATTRIBUTE).previous))
        else:
            self.replaced[module] = new
            self._put(module, new)
        self.live.add(module)
        now = module if new is None else new
        return SwappedModule(
            name=names[0],
            was=type(module).__name__,
            became=f"{type(now).__name__} [{kernel.name}]",
            params_before=parameter_count(module),
            params_after=parameter_count(now),
            counter=counter,
            undo=lambda: self._undo(module),
        )

    def _undo(self, module: nn.Module) -> None:
        """Back to what ran before; with the last one everything else goes too."""
        if module not in self.live:
            return
        self.live.remove(module)
        if (new := self.replaced.pop(module, None)) is not None:
            module.training = new.training
            self._put(new, module)
        before = dict(self.attributes)[module]
        setattr(module, ATTRIBUTE, before or Attached(None, getattr(module, ATTRIBUTE).previous))
        if not self.live:
            self.undo_all()

    def undo_all(self) -> None:
        for old, new in self.replaced.items():
            old.training = new.training
            self._put(new, old)
        for module, attached in self.attributes:
            if attached is not None:
                setattr(module, ATTRIBUTE, attached)
            elif hasattr(module, ATTRIBUTE):
                delattr(module, ATTRIBUTE)
        for module, config in self.configs:
            module.config = config
        self.replaced, self.attributes, self.configs, self.live = {}, [], [], set()

    def _put(self, old: nn.Module, new: nn.Module) -> None:
        for place, module in list(self.model.named_modules(remove_duplicate=False)):
            if module is old:
                self.model.set_submodule(place, new)
