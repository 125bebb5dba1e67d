"""How a kernel behaves beside its numbers: memory, inputs, dropout, delegation, hidden rows and keys."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from harness.candidate.request import Request
from harness.case import HALF
from harness.cell.bare import Held
from harness.cell.draws import torch_threads
from harness.cell.probe import OK, CheckResult, Probe, Question, floor_of, judge_relation
from harness.cell.relations import as_views
from harness.cell.rule import worst_of
from harness.cell.side import gradients_of
from harness.swaps.weights import same_bits

DROPOUT = 0.25  # not a half: there dropping p and keeping p look alike
SIGMAS = 6.0
TORCHS_OWN = ("scaled_dot_product", "multi_head_attention")  # in the names of torch's attention functions


def repeated_call(probe: Probe) -> CheckResult | None:
    """The same bits again, at once and after another call; and what was returned stays as it was."""
    question, answer = probe.long.question, probe.long.answer
    again = question.ask(probe.kernel).clone()
    flipped = torch.arange(question.q.shape[0]).flip(0)
    question.batch(flipped).ask(probe.kernel)
    kept = same_bits(probe.long.first, answer)  # before the last call, which might put the same bits there again
    later = question.ask(probe.kernel)
    # Of a single query few numbers are rounded: all queries together leave less to luck.
    whole = probe.whole.ask(probe.kernel).clone()
    if not (same_bits(again, answer) and same_bits(probe.whole.ask(probe.kernel), whole)):
        return CheckResult("mismatch", "the same call gave other bits the second time")
    if not same_bits(later, answer):
        return CheckResult("mismatch", "the same call gave other bits after a call with other inputs")
    if not (kept and same_bits(probe.first, probe.answer)):
        return CheckResult("mismatch", "a result was overwritten by later calls")
    return OK


def inputs_untouched(probe: Probe) -> CheckResult | None:
    """Nothing is written, not even beside a view in its buffer, and the result is memory of its own."""
    question, buffers = as_views(probe.long.question)
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    out = question.ask(probe.kernel)
    for name, buffer in buffers.items():
        if not same_bits(buffer, before[name]):
            return CheckResult("mismatch", f"wrote into the buffer that {name} is a view of")
        if out.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr():
            return CheckResult("mismatch", f"the result shares memory with {name}")
    return OK


def two_threads(probe: Probe) -> CheckResult | None:
    """The work dealt out to two threads is the work of one."""
    question = probe.long.question
    answers = []
    for threads in (1, 2):
        with torch_threads(threads):
            answers.append(question.ask(probe.kernel))
    # The largest of some rows' floors stands for all rows: over thousands of rows it would grow by a fifth.
    floor = floor_of(question.sampled_rows(), probe.generator()).largest_row()
    return judge_relation(answers[1], answers[0], floor.times(2))


def dropout(probe: Probe) -> CheckResult | None:
    """Dropped weights are p of all, and the others grow so that the expectation stays.

    Values are one-hot, keys taking turns on the channels: a row's sum is the sum of its weights, and a channel that one
    visible key has to itself is that key's weight.
    """
    question, (S, D_v) = probe.whole, probe.whole.v.shape[2:]
    one_hot = torch.eye(D_v, dtype=question.v.dtype)[torch.arange(S) % D_v]  # (S, D_v)
    question = question.but(v=one_hot.expand_as(question.v).contiguous())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(probe.seed)
        out = question.ask(probe.kernel, dropout_p=DROPOUT).double()
    weights: Tensor = question.in_float64().ask("eager", return_weights=True)[1]  # (B, H, L, S)
    padded = torch.nn.functional.pad(weights, (0, -S % D_v)).unflatten(-1, (-1, D_v))
    squares = padded.square().sum(-2)  # (B, H, L, D_v)
    u = torch.finfo(question.v.dtype).eps
    alone = ((padded > 0).sum(-2) == 1) & (padded.sum(-2) > torch.finfo(question.v.dtype).tiny)

    if not bool(out.isfinite().all()):
        return CheckResult("mismatch", f"not finite with dropout_p = {DROPOUT}")
    kept = 1 - DROPOUT
    if torch.equal(out, question.ask(probe.kernel).double()):
        reason = f"dropout_p = {DROPOUT} changes nothing"
        # SDPA's signature has the argument even where a kernel is meant for inference alone.
        return CheckResult("mismatch" if probe.is_built_in else "skipped", reason)
    mean, expected = float(out.sum(-1).mean()), float(weights.sum(-1).mean())
    sigma = float((squares.sum() * DROPOUT / kept).sqrt()) / weights[..., 0].numel()
    if not abs(mean - expected) <= SIGMAS * sigma + u:
        reason = f"weights sum to {mean:.4f} on average instead of {expected:.4f}, sigma {sigma:.2g}"
        return CheckResult("mismatch", reason)
    n, dropped = int(alone.sum()), int((out[alone] == 0).sum())
    if not abs(dropped - n * DROPOUT) <= SIGMAS * (n * DROPOUT * kept) ** 0.5:
        return CheckResult("mismatch", f"{dropped} of {n} weights dropped at dropout_p = {DROPOUT}")
    return OK


def half_precision(probe: Probe) -> CheckResult | None:
    """The call alone, without the modules whose rounding of q, k and v hides what a kernel does in half precision.

    By the rule, and in the directions in which bugs move a result; numbers are as a model has them, not of few bits.
    """
    question = probe.whole
    if str(question.q.dtype).removeprefix("torch.") not in HALF:
        return None
    generator = probe.generator()
    drawn = {n: torch.randn(question.tensors[n].shape, generator=generator).to(question.q.dtype) for n in "qkv"}
    question = question.but(**drawn).densely_masked()
    out = question.ask(probe.kernel)
    request = Request(question.q, question.k, question.v, mask=question.mask, scale=question.scale)
    verdicts = Held.of(request, generator, directions=True).judge({"out": out})
    worst = worst_of(verdicts)
    figures = {name: getattr(worst, name) for name in ("max_abs_err", "err_budget", "err_ratio", "block_ratio")}
    return CheckResult(worst.status, worst.reason, **figures)


def delegation(probe: Probe) -> CheckResult | None:
    """A built-in kernel that calls torch's attention would be compared with itself, unless it says so."""
    spy = _Spy()
    # A compiled kernel runs uncompiled here: dynamo would trace the spy along with it. It has been called before, so
    # where nobody has imported dynamo yet, nothing is compiled: the import alone takes 2 seconds.
    is_loaded = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if is_loaded else contextlib.nullcontext(), spy:
        probe.question.ask(probe.kernel)
    if not spy.seen:
        return OK
    reason = f"calls torch's {', '.join(sorted(spy.seen))}"
    allowed = probe.kernel.delegates or not probe.is_built_in
    return CheckResult("ok" if allowed else "mismatch", reason)


def dead_rows(probe: Probe) -> CheckResult | None:
    """A query that may attend nothing gives 0, and gradients of 0; the other queries do not notice."""
    question = probe.question.densely_masked()
    if question.mask is None or not (probe.keeps_nan_out or probe.rule.has_dead_rows):
        return None
    L = question.q.shape[2]
    killed = torch.arange(L) % 3 == min(1, L - 1)  # (L,)
    hidden = float("-inf") if question.mask.is_floating_point() else False
    question = question.but(mask=question.mask.masked_fill(killed[:, None], hidden))
    allowed = question.allowed()
    assert allowed is not None
    dead = ~allowed.any(-1)  # (B, H, L)
    out = question.ask(probe.kernel)
    if not bool((out[dead] == 0).all()):
        return CheckResult("mismatch", "a query that may attend nothing does not give 0")
    if probe.phase == "train":
        for name, gradient in _gradients(probe, question, dead):
            if not bool((gradient == 0).all()):
                return CheckResult("mismatch", f"a query that may attend nothing has a gradient in {name}")
    return judge_relation(out, probe.answer, probe.floor.times(2), rows=~dead)


def hidden_nan(probe: Probe) -> CheckResult | None:
    """A key and a value of NaN change nothing for queries that may not see them."""
    question, allowed = probe.question, probe.question.allowed()
    if allowed is None or not probe.keeps_nan_out:
        return None
    least_seen = int(allowed.sum(dim=(0, 1, 2)).argmin())
    blind = ~allowed[..., least_seen]  # (B, H, L)
    if not bool(blind.any()):
        return None
    k, v = question.k.clone(), question.v.clone()
    k[:, :, least_seen] = v[:, :, least_seen] = float("nan")
    answer = torch.where(blind[..., None], question.but(k=k, v=v).ask(probe.kernel), probe.answer)
    result = judge_relation(answer, probe.answer, probe.floor.times(2), rows=blind)
    leaked = result.reason == "not finite"
    return CheckResult("mismatch", "NaN leaks from behind the mask") if leaked else result


class _Spy(TorchFunctionMode):
    """Notes which of torch's own attention functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if any(part in name for part in TORCHS_OWN):
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


def _gradients(probe: Probe, question: Question, dead: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Of everything that the dead rows give, with respect to q, k and v."""
    leaves = {name: question.tensors[name].detach().requires_grad_() for name in "qkv"}
    with torch.enable_grad():
        out = question.but(**leaves).ask(probe.kernel)
        if not out.requires_grad:
            return  # a kernel that cuts the graph: the comparison of gradients says so
        gradients = gradients_of([out[dead].sum()], list(leaves.values()), [out.new_ones(())])
    yield from zip(leaves, gradients, strict=True)
