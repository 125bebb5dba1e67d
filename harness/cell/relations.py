"""Relations that hold between a right kernel's answers, whatever those are. None = does not apply to this call."""

from itertools import pairwise

import torch
from torch import Tensor

from harness.cell.probe import CheckResult, Probe, Question, floor_of, judge_relation

LARGE = (100.0, 800.0)  # added to scores: beyond what exp can take in float32, and in float64; exact in half types
SHIFT = 16.0  # added to every channel of every key: exact in bfloat16 for keys on the grid of `make_question`


def permuted_keys(probe: Probe) -> CheckResult | None:
    """Keys are a set: their order, with that of the values and of the mask's columns, means nothing."""
    question = probe.question.densely_masked()
    order = torch.randperm(question.k.shape[2], generator=probe.generator())
    mask = question.mask
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., order]
    return probe.same(question.but(k=question.k[:, :, order], v=question.v[:, :, order], mask=mask))


def linear_in_values(probe: Probe) -> CheckResult | None:
    """f(V1 - 2 V2) = f(V1) - 2 f(V2), with V2 the channels of V1 rolled by one: it is as noisy as V1."""
    question, v = probe.question, probe.question.v
    rolled = v.roll(1, dims=-1)
    mixed = question.but(v=v - 2 * rolled).ask(probe.kernel)
    expected = probe.answer.double() - 2 * question.but(v=rolled).ask(probe.kernel).double()
    return judge_relation(mixed, expected, probe.floor.times(2 * (1 + 2)))


def shifted_scores(probe: Probe) -> CheckResult | None:
    """The same vector added to every key adds q.d to all scores of a query, which the softmax takes out again."""
    question = probe.question.but(k=probe.question.k + SHIFT)
    floor = probe.floor + floor_of(question, probe.generator())
    return judge_relation(question.ask(probe.kernel), probe.answer, floor)


def large_scores(probe: Probe) -> CheckResult | None:
    """A constant added to every score changes nothing, also where its exponential alone would be infinite."""
    question = probe.question.densely_masked()
    mask, dtype = question.mask, question.q.dtype
    if mask is not None and mask.is_floating_point():
        return None  # half precision would round the mask's own values beside the constant
    constant = torch.tensor(LARGE[dtype == torch.float64], dtype=dtype)
    L, S = question.q.shape[2], question.k.shape[2]
    added = constant.expand(L, S) if mask is None else torch.where(mask, constant, float("-inf"))
    shifted = question.but(mask=added[(None,) * (4 - added.ndim)])
    floor = probe.floor + floor_of(shifted, probe.generator())
    return judge_relation(shifted.ask(probe.kernel), probe.answer, floor)


def row_alone(probe: Probe) -> CheckResult | None:
    """A batch row computed alone is the row in the batch: nothing comes from its neighbours."""
    rows = torch.arange(probe.question.q.shape[0])
    alone = torch.cat([probe.question.batch(row[None]).ask(probe.kernel) for row in rows])
    return judge_relation(alone, probe.answer, probe.floor.times(2))


def permuted_batch(probe: Probe) -> CheckResult | None:
    flipped = torch.arange(probe.question.q.shape[0]).flip(0)
    answer = probe.question.batch(flipped).ask(probe.kernel)
    return judge_relation(answer, probe.answer[flipped], probe.floor + probe.floor.batch(flipped))


def split_prefill(probe: Probe) -> CheckResult | None:
    """Queries in parts, each with the keys so far if the mask is causal, are all queries at once."""
    whole, L = probe.whole, probe.whole.q.shape[2]
    decoding = probe.phase == "decode"
    # Decoding goes by single tokens at the end; prefill comes in chunks: one query, a tile's border, the last alone.
    borders = sorted({0, *((L - 3, L - 2, L - 1) if decoding else (1, min(16, L), L - 1)), L} & set(range(L + 1)))
    if len(borders) <= 2:
        return None
    parts = [whole.rows(start, stop).ask(probe.kernel) for start, stop in pairwise(borders)]
    at_once = whole.ask(probe.kernel) if decoding else probe.answer
    return judge_relation(torch.cat(parts, dim=2), at_once, probe.whole_floor.times(2))


def repeated_groups(probe: Probe) -> CheckResult | None:
    """Grouped heads are heads of which some share a key and a value."""
    question, groups = probe.question, probe.question.q.shape[1] // probe.question.k.shape[1]
    if groups == 1:
        return None
    k, v = (t.repeat_interleave(groups, dim=1) for t in (question.k, question.v))
    return probe.same(question.but(k=k, v=v))


def views(probe: Probe) -> CheckResult | None:
    """The strides of modules and caches: heads behind tokens, a slice of a longer buffer, a slice of the channels."""
    return probe.same(as_views(probe.question)[0])


def expanded_batch(probe: Probe) -> CheckResult | None:
    """One row expanded over the batch, with a stride of 0, gives that row's answer everywhere."""
    question, B = probe.question, probe.question.q.shape[0]
    one = question.batch(torch.tensor([0]))
    mask = None if one.mask is None else one.mask.expand(B, *one.mask.shape[1:])
    expanded = one.but(**{name: getattr(one, name).expand(B, -1, -1, -1) for name in "qkv"}, mask=mask)
    first = torch.zeros(B, dtype=torch.long)
    return judge_relation(expanded.ask(probe.kernel), probe.answer[first], probe.floor.batch(first).times(2))


def as_views(question: Question) -> tuple[Question, dict[str, Tensor]]:
    """The same values in strided tensors, and the buffers that those are views of, NaN where they do not look."""
    q, k, v = question.q, question.k, question.v
    B, H, L, D = q.shape
    behind = q.new_full((B, L + 2, H, D), float("nan"))
    longer = k.new_full((B, k.shape[1], k.shape[2] + 5, D), float("nan"))
    wider = v.new_full((*v.shape[:3], v.shape[3] + 3), float("nan"))
    buffers = {"q": behind, "k": longer, "v": wider}
    seen = {"q": behind[:, 1:-1].transpose(1, 2), "k": longer[:, :, 2:-3], "v": wider[..., :-3]}
    mask = question.mask
    if mask is not None:
        filler = float("nan") if mask.is_floating_point() else True
        buffers["mask"] = mask.new_full((*mask.shape[:-1], mask.shape[-1] + 7), filler)
        seen["mask"] = buffers["mask"][..., 3:-4]
    for name, view in seen.items():
        view.copy_(question.tensors[name])
    return question.but(**seen), buffers
