"""Relations that hold between a right kernel's answers, whatever those are. None = does not apply to this call."""

import dataclasses
from itertools import pairwise

import torch
from torch import Tensor

from harness.cell.probe import CheckResult, Probe, Question, RelationFloor, floor_of, judge_relation
from harness.cell.rule import GRADIENT_FACTOR
from harness.kernels.call import Kernel
from harness.kernels.front import run

CHUNK = 7  # queries of one call between a prefill and a single step
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


def chunk(probe: Probe) -> CheckResult | None:
    """Several queries with more keys than that: in the middle of a long prompt, or at the end when decoding."""
    whole, S = probe.long.whole, probe.long.whole.k.shape[2]
    size, decoding = min(CHUNK, S - 1), probe.phase == "decode"
    if size < 2:
        return None
    start = S - size if decoding else min(S - size, S // 2)
    part = whole.rows(start, start + size)
    if decoding:
        singles = [whole.rows(row, row + 1).ask(probe.kernel) for row in range(start, S)]
        expected = torch.cat(singles, dim=2)
    else:
        expected = probe.long.answer[:, :, start : start + size]
    return judge_relation(part.ask(probe.kernel), expected, floor_of(part, probe.generator()).times(2))


def more_queries_than_keys(probe: Probe) -> CheckResult | None:
    """All queries twice, one after the other, give all answers twice."""
    once = probe.whole.densely_masked()
    mask = once.mask
    if mask is not None and mask.shape[-2] > 1:
        mask = torch.cat([mask, mask], dim=-2)
    twice = once.but(q=torch.cat([once.q, once.q], dim=2), mask=mask)
    expected = once.ask(probe.kernel).repeat(1, 1, 2, 1)
    return judge_relation(
        twice.ask(probe.kernel), expected, RelationFloor(probe.whole_floor.terms.repeat(1, 1, 1, 2)).times(2)
    )


def causal_from_the_first_key(probe: Probe) -> CheckResult | None:
    """SDPA's `is_causal`: query 0 stands at key 0, also where there are fewer queries than keys, or more."""
    whole, L = probe.whole, probe.whole.q.shape[2]
    if not whole.causal or whole.mask is not None or whole.window is not None or L < 4:
        return None
    few, answer = L // 3, whole.ask(probe.kernel)
    fewer = whole.but(q=whole.q[:, :, :few], q_start=0)
    k, v = whole.k[:, :, :few], whole.v[:, :, :few]
    more = whole.but(k=k, v=v, q_start=0)
    beyond = whole.but(q=whole.q[:, :, few:], k=k, v=v, causal=False)  # the rest of the queries see all of the keys
    got = torch.cat([fewer.ask(probe.kernel), more.ask(probe.kernel)], dim=2)
    expected = torch.cat([answer[:, :, :few], answer[:, :, :few], beyond.ask(probe.kernel)], dim=2)
    floors = (probe.whole_floor.rows(0, few), floor_of(more, probe.generator()))
    floor = RelationFloor(torch.cat([each.terms for each in floors], dim=-1))
    return judge_relation(got, expected, floor.times(2))


def one_row_unpadded(probe: Probe) -> CheckResult | None:
    """Of a padded batch the first row is full: the others are still what they are alone, without their padding."""
    whole, (B, _, S, _) = probe.whole, probe.whole.k.shape
    if not whole.call.hides or S < 3:
        return None
    bare = whole.but(mask=None, causal=False, window=None)
    lengths = [S, *([S - S // 3] * (B - 1))]
    padded = bare.but(mask=(torch.arange(S) < torch.tensor(lengths)[:, None])[:, None, None])  # (B, 1, 1, S)
    rows = [bare.batch(torch.tensor([b])) for b in range(B)]
    alone = [
        row.but(k=row.k[:, :, :n], v=row.v[:, :, :n]).ask(probe.kernel) for row, n in zip(rows, lengths, strict=True)
    ]
    return judge_relation(padded.ask(probe.kernel), torch.cat(alone), floor_of(padded, probe.generator()).times(2))


def smallest_mask(probe: Probe) -> CheckResult | None:
    """Keys hidden by the smallest number of the dtype, as models do, are hidden; where all are, all count alike."""
    hidden = probe.whole.densely_masked()
    allowed, dtype = hidden.allowed(), hidden.q.dtype
    if allowed is None:
        return None
    smallest, bias = torch.finfo(dtype).min, hidden.mask
    assert bias is not None
    zeros = torch.zeros(allowed.shape, dtype=dtype)
    added = torch.where(allowed, bias.to(dtype) if bias.is_floating_point() else zeros, smallest)
    added[:, :, -1] = smallest
    rows = allowed.any(-1)
    rows[:, :, -1] = False
    out = hidden.but(mask=added).ask(probe.kernel)
    known = torch.where(rows[..., None], out, 0.0)  # what the other rows are may not even be a number
    result = judge_relation(known, hidden.ask(probe.kernel), probe.whole_floor.times(2), rows=rows)
    # A row without a better key is nearly a dead one, and like those it is asked of our own kernels alone. In float16
    # it is not uniform: -65504 swallows no score.
    if result.status != "ok" or dtype == torch.float16 or not probe.is_built_in:
        return result
    last = hidden.but(q=torch.zeros_like(hidden.q[:, :, -1:]), mask=None)
    return judge_relation(out[:, :, -1:], last.ask(probe.kernel), floor_of(last, probe.generator()).times(2))


def default_scale(probe: Probe) -> CheckResult | None:
    """Who is given no scale takes D ** -0.5."""
    question = probe.question.but(scale=probe.question.q.shape[-1] ** -0.5)
    call = dataclasses.replace(question.call, is_default_scale=True)
    out, _ = run(probe.kernel, question.q, question.k, question.v, call)
    return judge_relation(out, question.ask(probe.kernel), floor_of(question, probe.generator()).times(2))


def zero_scores(probe: Probe) -> CheckResult | None:
    """Queries of 0 and keys of 0 give the same scores: none."""
    question = probe.question
    no_q, no_k = question.but(q=torch.zeros_like(question.q)), question.but(k=torch.zeros_like(question.k))
    floor = floor_of(no_q, probe.generator())
    return judge_relation(no_q.ask(probe.kernel), no_k.ask(probe.kernel), floor.times(2))


def gradient_of_the_mask(probe: Probe) -> CheckResult | None:
    """What is added to the scores has their gradient, so that of q is scale * (that of the mask) @ k."""
    question = probe.whole.densely_masked()
    if probe.phase != "train":
        return None
    full, allowed = question.q.new_zeros(*question.q.shape[:3], question.k.shape[2]), question.allowed()
    if question.mask is not None and question.mask.is_floating_point():
        full = full + question.mask
    elif allowed is not None:
        full.masked_fill_(~allowed, float("-inf"))
    cotangent = torch.randn(*question.q.shape[:3], question.v.shape[3], generator=probe.generator()).to(full.dtype)

    def gradients(kernel: Kernel | str) -> tuple[Tensor, Tensor]:
        """Of q, and what it should be by that of the mask."""
        q, mask = question.q.detach().requires_grad_(), full.detach().requires_grad_()
        with torch.enable_grad():
            out = question.but(q=q, mask=mask).ask(kernel)
            of_q, of_mask = torch.autograd.grad(out, (q, mask), cotangent, materialize_grads=True)
        k = question.k.repeat_interleave(q.shape[1] // question.k.shape[1], dim=1)
        return of_q.double(), question.scale * (of_mask.double() @ k.double())

    direct, by_mask = gradients("eager")
    rounding, one_rounding = (direct - by_mask).abs().amax(-1), torch.finfo(full.dtype).eps * direct.abs().amax(-1)
    floor = RelationFloor(torch.stack([rounding, torch.zeros_like(rounding), one_rounding])).largest_row()
    direct, by_mask = gradients(probe.kernel)
    if not bool(by_mask.any()) and not probe.is_built_in:
        return CheckResult("skipped", "gives a mask no gradient")
    return judge_relation(by_mask, direct, floor.times(2 * GRADIENT_FACTOR))


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
