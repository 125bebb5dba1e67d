"""Random numbers where there should be none, and dropout that is done wrongly."""

from dataclasses import replace

import torch
from torch import Tensor

from harness.battery.call import generator_of
from harness.candidate.request import Request
from harness.cell.golden import in_float64, weights_of
from harness.diagnosis.evidence import CERTAIN, Evidence, Witness, distance

P = 0.5
NEAR = 0.02
KEYS = 64


def told_chance(witness: Witness, evidence: Evidence) -> list[str]:
    """Whether the same call gives the same answer again, to a process that was asked nothing else between."""
    again = witness.evidence(evidence.request, evidence.before).reply
    if again.failure is not None or not evidence.has_shapes:
        return []
    away = distance(again.tensors, evidence.reply.tensors, evidence.compared)
    return [] if away <= CERTAIN * evidence.noise else ["the same call gives another answer each time"]


def told_dropout(witness: Witness) -> str:
    """What is done to weights at dropout_p 0.5, read by one-hot values; empty if that is as it should be."""
    generator = generator_of("dropout")
    q, k = (torch.randn(1, 2, KEYS, 16, generator=generator) for _ in range(2))
    request = Request(q, k, torch.eye(KEYS).expand(1, 2, KEYS, KEYS).contiguous(), dropout_p=P, seed=1)
    reply, second = (witness.evidence(replace(request, seed=seed)).reply for seed in (1, 2))
    true = weights_of(in_float64(request))
    if reply.failure is not None or second.failure is not None or reply.out.shape != true.shape:
        return ""
    used = reply.out.double()
    share = float((used == 0).double().mean())
    if share == 0:
        return "dropout_p is ignored: no weight is dropped"
    if abs(share - (1 - P)) > 3 * NEAR:
        return f"{100 * share:.0f} % of the weights are dropped where dropout_p is {P:g}"
    if torch.equal(reply.out, second.out):
        return "the same weights are dropped whatever torch's seed is"
    factor = _factor(used, true)
    if abs(factor * (1 - P) - 1) > NEAR:
        return f"the weights that are kept are {factor:.3g} times what they were, not {1 / (1 - P):g} times"
    return ""


def _factor(used: Tensor, true: Tensor) -> float:
    kept = used != 0
    return float((used / true)[kept].median())
