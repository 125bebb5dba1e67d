"""Tuned thresholds put into a swapped model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from torch import Tensor, nn

from harness.kernels.call import AttentionCall, Kernel, Unsupported
from harness.kernels.names import is_plugin
from harness.kernels.options import split_name
from harness.swaps import SwapReport, swap
from harness.tuning import file
from harness.tuning.file import Tuned, TuningError
from harness.tuning.heads import HeadKernels


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
        raise Unsupported("tuned thresholds belong to the layers of a model: use harness.tuning.use.swap_tuned")

    return Kernel(f"{tuned.kernel} (tuned)", run, approximate=True)


def layer_kernel(tuned: Tuned, layer: str) -> Kernel:
    options = [{**tuned.options, **head.options} for head in tuned.layers[layer]]
    return HeadKernels(layer, tuned.kernel, options).as_kernel()


def give_layers_their_own(
    tuned: Tuned, report: SwapReport, *, heads: int | None = None, around: Callable[[Kernel], Kernel] = lambda k: k
) -> None:
    """`heads` of the model's layers, where they are known before it runs."""
    refuse_other_layers(tuned, [row.name for row in report.swapped], heads)
    for row in report.swapped:
        assert row.counter is not None
        row.counter.kernel = around(layer_kernel(tuned, row.name))


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


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
