"""From the numbers to one choice. How good a model answers with each variant is not among them, and is not judged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.advise.candidates import Candidate, candidates
from harness.advise.figure import Figure
from harness.advise.memory import Demand, Footprint, footprint
from harness.advise.predict import predict
from harness.advise.roofline import Roofline


@dataclass(frozen=True, slots=True)
class Option:
    """`step` is a decode step of one layer here; None where the machine was not measured."""

    candidate: Candidate
    footprint: Footprint
    step: Figure | None = None
    pareto: bool = False

    @property
    def costs(self) -> tuple[float, ...]:
        """What one wants less of: cache, parameters, time where it is known, and key/value heads given up."""
        time = () if self.step is None else (self.step.value,)
        return (self.footprint.bytes_per_token, self.candidate.attention_params, *time, -self.candidate.kv_heads)


@dataclass(frozen=True, slots=True)
class Advice:
    demand: Demand
    options: tuple[Option, ...]
    chosen: Option | None  # None: nothing fits


def advise(demand: Demand, roofline: Roofline | None = None) -> Advice:
    """On the front is what nothing else beats on every cost. Chosen is the model's own variant if it fits and is on the
    front; else, of what fits, the one with most key/value heads, then the fastest, then the smallest."""
    options = [
        Option(one, footprint(one, demand), None if roofline is None else predict(one, demand, roofline))
        for one in candidates(demand.model, demand.dtype)
    ]
    marked = tuple(replace(one, pareto=not any(dominates(other, one) for other in options)) for one in options)
    return Advice(demand, marked, _choose(marked))


def dominates(one: Option, other: Option) -> bool:
    """Nowhere worse, and somewhere better."""
    pairs = list(zip(one.costs, other.costs, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _choose(options: Sequence[Option]) -> Option | None:
    fitting = [one for one in options if one.footprint.fits]
    own = next((one for one in fitting if one.candidate.own), None)
    # What has an own variant that fits leaves it only for one that is nowhere worse.
    pool = fitting if own is None else [own, *(one for one in fitting if dominates(one, own))]
    front = [one for one in pool if not any(dominates(other, one) for other in pool)]

    def preference(one: Option) -> tuple[float, ...]:
        time = 0.0 if one.step is None else one.step.value
        return (-one.candidate.kv_heads, time, one.footprint.cache_bytes)

    return min(front, key=preference, default=None)
