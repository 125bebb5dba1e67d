"""Step 3: was everything replaced that should be, and did every weight come along?"""

from torch import nn

from harness.report.format import count
from harness.swaps import SwapReport
from harness.swaps.weights import WeightSource, same_bits


def problem_of_swap(reference: nn.Module, swapped: nn.Module, report: SwapReport, attentions: int) -> str | None:
    done = len(report.swapped)
    if done != attentions:
        names = ", ".join(row.name or "the model" for row in report.swapped)
        return f"{done} of {attentions} replaced: {names}"
    before, after = parameters_of(reference), parameters_of(swapped)
    if before != after:
        return f"{after:,} parameters instead of {before:,}"
    return _moved_weight(reference, swapped, report)


def parameters_of(model: nn.Module) -> int:
    """Tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def describe_swap(report: SwapReport, parameters: int) -> str:
    done = len(report.swapped)
    became = ", ".join(dict.fromkeys(row.became for row in report.swapped))
    return f"{done} of {done} replaced by {became}; {count(parameters)} parameters as before, the same bits"


def _moved_weight(reference: nn.Module, swapped: nn.Module, report: SwapReport) -> str | None:
    """The first weight or buffer that is not, bit for bit, what it was; every one has a source."""
    sources = report.sources()
    old = {**dict(reference.named_parameters(remove_duplicate=False)), **dict(reference.named_buffers())}
    new = {**dict(swapped.named_parameters()), **dict(swapped.named_buffers())}  # shared ones under their first name
    for name, tensor in new.items():
        source = sources.get(name, WeightSource(name))
        if source.name not in old:
            return f"{name} has no counterpart in the original"
        if not same_bits(tensor, source.of(old[source.name])):
            return f"{name} is not the original's {source.name}, bit for bit"
    return None
