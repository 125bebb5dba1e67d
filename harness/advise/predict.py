"""How long a decode step of one layer takes here: the roofline of this machine over the parts of the step."""

from harness.advise.candidates import Candidate
from harness.advise.figure import Figure
from harness.advise.memory import Demand
from harness.advise.roofline import Roofline
from harness.advise.work import Shape, decode_parts


def predict(candidate: Candidate, demand: Demand, roofline: Roofline) -> Figure:
    """Seconds for one new token of each sequence. Each layer finds the cache full of the others' data."""
    parts = decode_parts(candidate, batch=demand.batch, keys=demand.kept(demand.context))
    a_layer = sum(part.bytes for part in parts)
    return roofline.seconds(parts, working_set=a_layer * demand.model.layers)


def shapes_of(candidates: list[Candidate], demand: Demand) -> list[Shape]:
    """What the roofline must know to predict all of them."""
    return [
        part.shape
        for candidate in candidates
        for part in decode_parts(candidate, batch=demand.batch, keys=demand.kept(demand.context))
    ]
