"""Which gradient is wrong, and is it the forward pass' fault?"""

import torch
from torch import Tensor

from harness.battery.call import generator_of
from harness.candidate.request import Request
from harness.diagnosis.evidence import CERTAIN, Evidence, Witness, with_tensors

STEP = 1e-4  # of a central difference, in units of a tensor's own size
AGREES = 0.01  # of the size of what is compared


def told_gradients(witness: Witness, evidence: Evidence) -> list[str]:
    """Sentences: which are right and wrong; and where the output is wrong, whether they follow that output."""
    tensors, golden = evidence.reply.tensors, evidence.golden
    wrong = [name for name in golden if name != "out" and not _is_right(evidence, name)]
    right = [name for name in golden if name != "out" and name not in wrong]
    if not wrong:
        return ["the gradients are right"] if not _is_right(evidence, "out") else []
    told = [f"{_and(wrong)} {'is' if len(wrong) == 1 else 'are'} wrong" + (f", {_and(right)} right" if right else "")]
    if _is_right(evidence, "out"):
        told.append("the output is right: the fault is the backward pass' own")
        return told
    follows = {name: _follows(witness, evidence.request, name, tensors[name]) for name in wrong}
    if all(follows.values()):
        told.append("the gradients are those of the output that it gives: it is the forward pass' fault")
    elif any(each is False for each in follows.values()):
        own = [name for name, each in follows.items() if each is False]
        told.append(f"{_and(own)} also departs from the output that it gives: the backward pass is wrong, too")
    return told


def _and(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _is_right(evidence: Evidence, name: str) -> bool:
    got, golden = evidence.reply.tensors[name], evidence.golden[name]
    size = float(golden.square().mean().sqrt()) or 1.0
    error = float((got.double() - golden).square().mean().sqrt())
    return error <= CERTAIN * evidence.noise * size


def _follows(witness: Witness, request: Request, name: str, gradient: Tensor) -> bool | None:
    """Whether the gradient is the derivative of the kernel's own output, by a difference in float64; None: it cannot
    be told, for the kernel does not take float64.
    """
    wide = _in_float64(request)
    assert wide.cotangent is not None
    given = witness.evidence(wide).reply.tensors.get(name)
    if given is None:
        return None
    input_name = name.removeprefix("grad ")
    tensor = wide.tensors[input_name]
    along = torch.randn(tensor.shape, generator=generator_of("along", name), dtype=torch.float64)
    step = STEP * float(tensor.square().mean().sqrt() or 1.0)
    ends = []
    for sign in (1, -1):
        moved = with_tensors(wide, **{input_name: tensor + sign * step * along})
        reply = witness.evidence(moved).reply
        # In the same mode, with the same gradients asked for: a kernel may take another path without them.
        if reply.failure is not None or reply.out.dtype != torch.float64:
            return None
        ends.append(float((reply.out * wide.cotangent).sum()))
    difference = (ends[0] - ends[1]) / (2 * step)
    said = float((given * along).sum())
    size = float(given.norm() * along.norm()) / max(given.numel(), 1) ** 0.5
    return abs(difference - said) <= AGREES * max(size, abs(difference))


def _in_float64(request: Request) -> Request:
    def wide(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.dtype == torch.bool else t.double()

    names = ("q", "k", "v", "mask", "cotangent")
    return with_tensors(request, **{name: wide(getattr(request, name)) for name in names})
