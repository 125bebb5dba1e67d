"""How long a decode step of one layer takes here: the roofline of this machine over the parts of the step."""

from harness.advise.candidates import Candidate
from harness.advise.figure import Figure
from harness.advise.memory import Demand
from harness.advise.roofline import Roofline
from harness.advise.work import DecodeStep, decode_step


def predict(candidate: Candidate, demand: Demand, roofline: Roofline) -> Figure:
    """Seconds for one new token of each sequence."""
    return roofline.seconds(step_of(candidate, demand))


def step_of(candidate: Candidate, demand: Demand) -> DecodeStep:
    """Each layer finds the processor's cache full of the others' data."""
    keys = demand.kept(demand.context)
    return decode_step(candidate, batch=demand.batch, keys=keys, layers=demand.model.layers)
