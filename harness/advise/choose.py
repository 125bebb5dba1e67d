"""From the numbers to one choice. How good a model answers with each variant is not among them, and is not judged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.advise.candidates import Candidate, candidates
from harness.advise.memory import Footprint, Requirement, footprint
from harness.advise.roofline import Roofline
from harness.advise.work import DecodeStep, Figure, decode_step


@dataclass(frozen=True, slots=True)
class Alternative:
    """`step`: seconds that a decode step of one layer takes here, for one new token of each sequence; None where the
    machine was not measured."""

    candidate: Candidate
    footprint: Footprint
    step: Figure | None = None
    pareto: bool = False

    @property
    def costs(self) -> tuple[float, ...]:
        """What one wants less of and knows exactly: cache, parameters, and key/value heads given up."""
        return (self.footprint.bytes_per_token, self.candidate.attention_params, -self.candidate.kv_heads)


@dataclass(frozen=True, slots=True)
class Advice:
    demand: Requirement
    options: tuple[Alternative, ...]
    chosen: Alternative | None  # None: nothing fits


def advise(demand: Requirement, roofline: Roofline | None = None) -> Advice:
    """On the front is what nothing else beats on every cost. Chosen is the model's own variant if it fits and is on the
    front; else, of what fits, the one with most key/value heads, what is faster beyond the error, the smallest."""
    options = [
        Alternative(one, footprint(one, demand), None if roofline is None else roofline.seconds(step_of(one, demand)))
        for one in candidates(demand.model, demand.dtype)
    ]
    marked = tuple(replace(one, pareto=not any(dominates(other, one) for other in options)) for one in options)
    return Advice(demand, marked, _choose(marked))


def step_of(candidate: Candidate, demand: Requirement) -> DecodeStep:
    """Each layer finds the processor's cache full of the others' data."""
    return decode_step(candidate, batch=demand.batch, keys=demand.kept(demand.context), layers=demand.model.layers)


def dominates(one: Alternative, other: Alternative) -> bool:
    """Nowhere worse, and somewhere better; times within each other's error are neither."""
    pairs = list(zip(one.costs, other.costs, strict=True))
    nowhere_worse = all(a <= b for a, b in pairs) and not faster(other, one)
    return nowhere_worse and (any(a < b for a, b in pairs) or faster(one, other))


def faster(one: Alternative, other: Alternative) -> bool:
    """Beyond the error: the two intervals share no number."""
    return one.step is not None and other.step is not None and one.step.hi < other.step.lo


def _choose(options: Sequence[Alternative]) -> Alternative | None:
    fitting = [one for one in options if one.footprint.fits]
    own = next((one for one in fitting if one.candidate.own), None)
    # What has an own variant that fits leaves it only for one that is nowhere worse.
    pool = fitting if own is None else [own, *(one for one in fitting if dominates(one, own))]
    front = [one for one in pool if not any(dominates(other, one) for other in pool)]

    most = max((one.candidate.kv_heads for one in front), default=0)
    wide = [one for one in front if one.candidate.kv_heads == most]
    quick = [one for one in wide if not any(faster(other, one) for other in wide)]
    return min(quick, key=lambda one: one.footprint.cache_bytes, default=None)
