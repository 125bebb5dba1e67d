"""Tuned thresholds put to use: a layer in which every head has its own, and a swapped model with such layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from torch import Tensor, nn

from harness.kernels.blocksparse.kernel import is_spoilt
from harness.kernels.call import AttentionCall, BlockCount, Kernel, Tally, Unsupported
from harness.kernels.front import find_kernel
from harness.kernels.names import is_plugin, split_name
from harness.models.tuning import file
from harness.models.tuning.file import Tuned, TuningError, fingerprint, kernel_name
from harness.swaps import SwapReport, swap


def head_slice(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, heads: Sequence[int]) -> tuple[Any, ...]:
    """What these query heads see of a call; key heads are repeated where several share one."""
    H, G = q.shape[1], q.shape[1] // k.shape[1]
    at = torch.tensor(heads, device=q.device)
    mask, sinks = call.mask, call.sinks
    if mask is not None and mask.ndim >= 3 and mask.shape[-3] == H:
        mask = mask.index_select(-3, at)
    if sinks is not None:
        sinks = sinks.index_select(0, at)
    shared = torch.div(at, G, rounding_mode="floor")
    parts = q.index_select(1, at), k.index_select(1, shared), v.index_select(1, shared)
    return (*parts, replace(call, mask=mask, sinks=sinks))


class HeadKernels:
    """Heads with the same thresholds run together."""

    def __init__(self, layer: str, name: str, options: Sequence[Mapping[str, Any]]) -> None:
        self.layer, self.name, self.heads = layer, name, len(options)
        self.tally = Tally()
        groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
        for head, of_head in enumerate(options):
            groups.setdefault(tuple(sorted(of_head.items())), []).append(head)
        self.groups = [(find_kernel(kernel_name(name, dict(key))), heads) for key, heads in groups.items()]

    def as_kernel(self) -> Kernel:
        return Kernel(f"{self.name} (tuned)", self.run, approximate=True, tally=self.tally)

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, None]:
        if q.shape[1] != self.heads:
            raise TuningError(f"{self.layer}: tuned for {self.heads} heads, called with {q.shape[1]}")
        count, out = BlockCount(0, 0, 0), q.new_empty(*q.shape[:3], v.shape[3])
        for kernel, heads in self.groups:
            if len(self.groups) == 1:
                out, _ = kernel.run(q, k, v, call)
            else:
                out[:, heads], _ = kernel.run(*head_slice(q, k, v, call, heads))
            assert kernel.tally is not None
            count += kernel.tally.last
        self.tally.add(count, call=call, is_spoilt=is_spoilt(out, call))
        return out, None


def swap_tuned(model: nn.Module, tuned: Tuned | str | Path, **options: Any) -> tuple[nn.Module, SwapReport]:
    """`harness.swap`, every layer with its own thresholds."""
    found = tuned if isinstance(tuned, Tuned) else file.load(tuned)
    swapped, report = swap(model, kernel=placeholder(found), **options)
    try:
        give_layers_their_own(found, report)
    except BaseException:
        report.undo()  # in place, it would be left half done
        raise
    return swapped, report


def tuned_name(kernel: str) -> Path | None:
    """The file in `sparse?tuned=FILE`; None in any other kernel's name."""
    name, query = split_name(kernel)
    options = dict(parse_qsl(query, keep_blank_values=True))
    if is_plugin(name) or "tuned" not in options:
        return None
    path = Path(options.pop("tuned"))
    if options:
        raise TuningError(f"{kernel!r}: tuned brings all options along; leave out {', '.join(options)}")
    if (wanted := file.load(path).kernel) != name:
        raise TuningError(f"{kernel!r}: {path} is tuned for kernel {wanted}, not for {name}")
    return path


def placeholder(tuned: Tuned) -> Kernel:
    """What stands in each layer until `give_layers_their_own` tells which layer it is."""
    file.refuse_bad_options(tuned)  # also of those that come from no file

    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, None]:
        raise Unsupported(
            "tuned thresholds belong to the layers of a model: use harness.models.tuning.heads.swap_tuned"
        )

    return Kernel(f"{tuned.kernel} (tuned)", run, approximate=True)


def give_layers_their_own(
    tuned: Tuned, report: SwapReport, *, heads: int | None = None, around: Callable[[Kernel], Kernel] = lambda k: k
) -> None:
    """`heads` of the model's layers, where they are known before it runs."""
    refuse_other_layers(tuned, [row.name for row in report.swapped], heads)
    for row in report.swapped:
        options = [{**tuned.options, **head.options} for head in tuned.layers[row.name]]
        row.counter.kernel = around(HeadKernels(row.name, tuned.kernel, options).as_kernel())


def refuse_other_layers(tuned: Tuned, names: list[str], heads: int | None) -> None:
    about = f"tuned for {tuned.family} ({tuned.model})"
    theirs = list(tuned.layers)
    if missing := [name for name in names if name not in tuned.layers]:
        raise TuningError(
            f"{about} with {len(theirs)} layers ({_some(theirs)}); this model has {len(names)} ({_some(names)}),"
            f" and of {_some(missing)} the file knows nothing"
        )
    if unknown := [name for name in theirs if name not in names]:
        raise TuningError(f"{about} with {len(theirs)} layers; this model has {len(names)}, without {_some(unknown)}")
    for name in names:
        if heads is not None and len(tuned.layers[name]) != heads:
            found = len(tuned.layers[name])
            raise TuningError(f"{about} with {found} heads in {name}; this model has {heads} heads")


def warn_of_other_weights(tuned: Tuned, model: nn.Module) -> str:
    """Thresholds of a fine-tuned sibling may do; that they are not this model's own must be known."""
    if (found := fingerprint(model)) == tuned.weights:
        return ""
    theirs, ours = (text.removeprefix("sha256:")[:8] or "none" for text in (tuned.weights, found))
    return f"; warning: tuned on other weights (sha256 {theirs}, this model's {ours})"


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
