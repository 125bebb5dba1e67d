"""One question to the kernel and the finding that it leads to."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from harness.battery.axes import Point
from harness.battery.call import Call, generator_of, make_call
from harness.battery.result import FAILING, Finding
from harness.candidate.examinee import Examinee
from harness.candidate.request import Failure, Reply, Request
from harness.cell.bare import Held, Unanswered, answered
from harness.cell.rule import TensorVerdict

NOT_THE_KERNELS = ("skipped", "torch itself does not answer this call")


@dataclass(frozen=True)
class Step:
    """`run` asks and judges; it raises for nothing that the kernel does."""

    group: str
    check: str
    run: Callable[[Examinee], Finding]

    def done(self, examinee: Examinee) -> Finding:
        started = time.perf_counter()
        finding = self.run(examinee)
        return replace(finding, group=self.group, check=self.check, seconds=time.perf_counter() - started)


def call_step(group: str, point: Point, seed: int) -> Step:
    """A call of the design."""
    return Step(group, "the rule", lambda examinee: judge_call(examinee, make_call(point, seed), seed))


def judge_call(examinee: Examinee, call: Call, seed: int, *, directions: bool = False) -> Finding:
    """By the rule, and by what else the reply tells; with `directions` also in those in which bugs move a result."""
    request = call.request
    beyond = examinee.domain.refusal(request.facts)
    answer = examinee.post(request)
    held = unanswered = None
    try:  # while the kernel computes
        held = Held.of(request, generator_of(seed, call.words), rows=call.rows, directions=directions)
    except Unanswered as error:
        unanswered = error
    reply = answer()
    if held is None and reply.failure is None:
        return Finding("", "", call.words, "skipped", f"torch itself does not answer this call: {unanswered}")
    finding = found_in(reply, held, call, beyond)
    return replace(finding, requests=(request,)) if finding.status in FAILING else finding


def found_in(reply: Reply, held: Held | None, call: Call, beyond: str | None) -> Finding:
    """What a reply to the call shows; `beyond`: why it lies outside the kernel's domain, if it does."""
    request = call.request
    if reply.failure is not None:
        return failed(call.words, reply.failure, request, may_refuse=beyond is not None or not call.is_documented)
    if trace := traces(reply):
        return Finding("", "", call.words, "mismatch", trace)
    assert held is not None
    finding = told(call.words, held.judge(reply.tensors))
    if beyond is None:
        return finding
    if finding.status in ("mismatch", "error"):
        reason = f"outside the declared domain ({beyond}) it must refuse or be right: {finding.reason}"
        finding = replace(finding, reason=reason)
    return replace(finding, is_outside=True)


def told(words: str, verdicts: Iterable[TensorVerdict]) -> Finding:
    """The worst of a call's tensors speaks for it."""
    worst = max(verdicts, key=lambda verdict: verdict.rank)
    reason = "" if worst.status == "ok" else f"{worst.tensor}: {worst.reason}"
    return Finding("", "", words, worst.status, reason, worst.tensor, worst.err_ratio)


def traces(reply: Reply) -> str:
    """What a call left behind that it must not."""
    if reply.written:
        return f"wrote into {', '.join(reply.written)}, or beside it"
    if reply.shares:
        return f"its result lies in the memory of {', '.join(reply.shares)}"
    return f"left changed: {', '.join(reply.changed)}" if reply.changed else ""


def failed(words: str, failure: Failure, request: Request, *, may_refuse: bool = False) -> Finding:
    """No result: a refusal, an error, or a call that torch does not answer either."""
    if failure.kind == "refused":
        return Finding("", "", words, "refused", failure.message.splitlines()[0] if failure.message else "no reason")
    if failure.kind == "error" and may_refuse:
        return Finding("", "", words, "refused", failure.message.splitlines()[0], is_outside=True)
    if failure.kind == "contract":
        return Finding("", "", words, "mismatch", failure.message)
    if failure.kind == "error" and not answered(request):
        return Finding("", "", words, *NOT_THE_KERNELS)
    return Finding("", "", words, "error", f"{failure.kind}: {failure.message}")
