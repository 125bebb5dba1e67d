"""From a judgement that has failed to what is wrong: name, place, smallest call."""

import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from harness.battery.call import make_call
from harness.battery.conduct import conduct_steps
from harness.battery.plan import first_calls
from harness.battery.result import FAILING, Finding, Judgement
from harness.battery.steps import traces
from harness.battery.subject import AnyKernel, examinee_of
from harness.candidate.client import Process
from harness.candidate.request import Request
from harness.cell.bare import answered
from harness.cell.draws import torch_threads
from harness.diagnosis import repro
from harness.diagnosis.chance import told_chance, told_dropout
from harness.diagnosis.evidence import CERTAIN, Evidence, Witness, scores_of_call
from harness.diagnosis.gradients import told_gradients
from harness.diagnosis.naming import name_trace, names_of, usable
from harness.diagnosis.place import find_place
from harness.diagnosis.result import Diagnosis, Named, Place, Shrunk
from harness.diagnosis.shrink import Shrinker, Smallest
from harness.diagnosis.weights import weights_used
from harness.text import first_line

SECONDS = 10.0  # for all of it but the running of the script
NAMING, SHRINKING = 0.45, 0.5  # of them
MOST_LOOKED_AT = 1 << 20  # scores of a call that is one among several
MOST_CONDUCT = 14  # checks of conduct that are asked again
SMALL, RICH = 1 << 18, 1 << 12


def diagnose(
    kernel: AnyKernel, found: Judgement, *, seconds: float = SECONDS, scripts: bool = True
) -> Diagnosis | None:
    """What is wrong with the kernel of this judgement; None if nothing has failed.

    seconds   for all of it
    scripts   also write the smallest call as a script, and run that once
    """
    failures = [finding for finding in found.failures if not finding.is_outside] or list(found.failures)
    if not failures:
        return None
    examinee = examinee_of(kernel)
    with torch_threads(1):
        diagnosis = _Session(Witness(examinee, time.perf_counter() + seconds), found, failures, scripts).diagnosis()
    if examinee is not kernel and isinstance(examinee, Process):
        examinee.stop()
    return diagnosis


class _Session:
    def __init__(self, witness: Witness, found: Judgement, failures: Sequence[Finding], scripts: bool) -> None:
        self.witness, self.found, self.failures, self.scripts = witness, found, failures, scripts
        self.started = time.perf_counter()
        self.seconds = witness.until - self.started

    def _until(self, share: float) -> float:
        """So much of all the time from now on, and never beyond its end."""
        return min(self.witness.until, time.perf_counter() + share * self.seconds)

    def diagnosis(self) -> Diagnosis:
        finding, requests = self._again()
        if not requests:
            words = told_dropout(self.witness) if finding.check == "dropout" else ""
            return self._told(finding, words or _said_by(finding), (), None, None, ())
        last, before = requests[-1], requests[:-1]
        if before:
            self.witness.refresh()
        evidence = self.witness.evidence(last, before)
        if evidence.has_shapes and not evidence.is_plain_mismatch:  # the very same call was wrong a moment ago
            self.witness.asks_anew = True
            first = self.witness.evidence(last, before)
            self.witness.asks_anew = first.is_plain_mismatch
            evidence = first if first.is_plain_mismatch else evidence
        if trace := traces(evidence.reply):
            named = name_trace(evidence)
            return self._told(
                finding, trace, named, None, self._shrunk(requests, finding, None), (trace,) if named else ()
            )
        if evidence.reply.failure is not None or not evidence.has_shapes or not evidence.error:
            place, smallest = self._place(evidence), self._shrunk(requests, finding, None)
            words = _words(evidence, finding) if place is None else place.sentence
            return self._told(finding, words, (), place, smallest, ())
        place = self._place(evidence)
        named, weights = (), None
        if self.witness.asks_anew:
            notes = ["the first call of a process is wrong, the same call once more is right"]
        else:
            notes = told_chance(self.witness, evidence) if not before else []
        if notes:
            self.witness.asks_anew = True
        elif scores_of_call(last) <= MOST_LOOKED_AT and usable(evidence):
            named = self._named(evidence)
            if not before and not last.gradients:
                weights = weights_used(self.witness, last)
        if weights is not None:
            notes += list(weights.sentences())
            if place is not None and bool((weights.missing | weights.extra).any()):
                place = replace(place, picture=(*place.picture, *weights.picture))
        if last.gradients and not self.witness.asks_anew:
            notes += told_gradients(self.witness, evidence)
        smallest = self._shrunk(requests, finding, place)
        return self._told(finding, "", named, place, smallest, tuple(notes))

    # ---- what is asked ----------------------------------------------------------------------------------------------

    def _again(self) -> tuple[Finding, tuple[Request, ...]]:
        """The failure that tells most, and what shows it when it is asked again; no requests: none does."""
        ranked = sorted(self.failures, key=_rank)
        for finding in ranked:
            if (again := self._shown_again(finding)) is not None:
                return again
        # Nothing fails when it is asked alone: it may be what was asked before.
        for step in conduct_steps(self.found.seed)[:MOST_CONDUCT]:
            if not self.witness.has_time:
                break
            self.witness.refresh()
            finding = step.done(self.witness.examinee)
            if finding.status in FAILING:
                return self._shown_again(finding) or (finding, ())
        return ranked[0], ()

    def _shown_again(self, finding: Finding) -> tuple[Finding, tuple[Request, ...]] | None:
        """By its last call alone, or by all of them in order, each time to a kernel that remembers nothing."""
        if not finding.requests or any(request.reuse is not None for request in finding.requests):
            return None
        for requests in dict.fromkeys((finding.requests[-1:], finding.requests)):
            self.witness.refresh()
            again = self.witness.finding(requests[-1], requests[:-1])
            if again.status in FAILING:
                return replace(again, check=finding.check, group=finding.group, call=finding.call), requests
        return None

    def _named(self, evidence: Evidence) -> tuple[Named, ...]:
        if not evidence.is_plain_mismatch or not evidence.tells_guesses_apart:
            return ()
        if evidence.before:
            return names_of([evidence, *self._after_others(evidence)], [], self._until(NAMING))
        wrong, right = [evidence], []
        for request in self._related(evidence.request):
            other = self.witness.evidence(request)
            if not usable(other) or other.reply.failure is not None or not other.has_shapes:
                continue
            if other.is_plain_mismatch:
                wrong += [other] if other.tells_guesses_apart else []
            elif other.error <= CERTAIN * other.noise:
                right.append(other)
            if not self.witness.has_time:
                break
        wrong.sort(key=lambda each: _richness(each.request))
        return names_of(wrong, right, self._until(NAMING))

    def _after_others(self, evidence: Evidence) -> Iterator[Evidence]:
        """The same call after two others of its kind: which of them is remembered?"""
        self.witness.refresh()
        last = evidence.request
        other = self.witness.evidence(last, [_redrawn(last, number) for number in range(2)])
        if other.is_plain_mismatch:
            yield other

    def _related(self, request: Request) -> Iterator[Request]:
        """Calls that tell guesses apart: the others that failed, the same with other numbers, the first calls."""
        for finding in self.failures:
            if (
                len(finding.requests) == 1
                and finding.requests[0] is not request
                and scores_of_call(finding.requests[0]) <= SMALL
            ):
                yield finding.requests[0]
        for number in range(2):
            yield _redrawn(request, number)
        for point in first_calls():
            other = make_call(point, self.found.seed).request
            if scores_of_call(other) <= SMALL and bool(other.gradients) <= bool(request.gradients):
                yield other

    def _place(self, evidence: Evidence) -> Place | None:
        """Of the output, if that is wrong, else of the first gradient that is."""
        if evidence.reply.failure is not None or scores_of_call(evidence.request) > 8 * MOST_LOOKED_AT:
            return None
        for name, golden in evidence.golden.items():
            got = evidence.reply.tensors.get(name)
            if got is None:
                continue
            size = float(golden[golden.isfinite()].square().mean().sqrt()) if golden.numel() else 0.0
            limit = CERTAIN * evidence.noise * (size or 1.0)
            if place := find_place(name, got, golden, limit, evidence.request):
                return place
        return None

    def _shrunk(self, requests: tuple[Request, ...], finding: Finding, place: Place | None) -> Smallest:
        worst = () if place is None or place.tensor != "out" else place.index
        return Shrinker(self.witness, requests, finding, worst, self._until(SHRINKING)).run()

    # ---- what is said -----------------------------------------------------------------------------------------------

    def _told(
        self,
        finding: Finding,
        words: str,
        named: tuple[Named, ...],
        place: Place | None,
        smallest: Smallest | None,
        notes: tuple[str, ...],
    ) -> Diagnosis:
        headline = words
        if named:
            headline = f"computes what you get with {named[0].words}"
            if len(named) > 1:
                headline += f"; and, in other calls, with {' and with '.join(each.words for each in named[1:])}"
            elif not named[0].everywhere:
                headline += ", in the calls that fail"
        elif not headline and notes and (place is None or place.tensor != "out" or not _is_of_gradients(notes[0])):
            headline = notes[0]
        if not headline:
            headline = place.sentence if place is not None else first_line(finding.reason)
        if smallest is not None and smallest.needs and not (named and all(each.everywhere for each in named)):
            headline += f"; only with {', '.join(smallest.needs)}"
        if smallest is not None and len(smallest.requests) > 1:
            headline += f"; only after {len(smallest.requests) - 1} other call{'s' * (len(smallest.requests) > 2)}"
        shrunk = None if smallest is None else self._as_shrunk(smallest, headline)
        return Diagnosis(
            kernel=self.found.kernel,
            call=finding.call,
            check=finding.check,
            headline=headline,
            named=named,
            place=place,
            shrunk=shrunk,
            notes=notes,
            seconds=time.perf_counter() - self.started,
        )

    def _as_shrunk(self, smallest: Smallest, headline: str) -> Shrunk:
        last = smallest.requests[-1]
        script = None
        if self.scripts and ":" in self.found.kernel:
            tensor, limit = self._limit(smallest)
            script = repro.script_of(self.found.kernel, smallest.requests, tensor, limit, headline)
            if script is not None and not repro.fails_alone(script):
                script = None
        return Shrunk(
            call=call_words(last),
            numbers_of_q=last.q.numel(),
            reason=first_line(smallest.finding.reason),
            needs=smallest.needs,
            script=script or "",
            seconds=time.perf_counter() - self.started,
        )

    def _limit(self, smallest: Smallest) -> tuple[str, float]:
        """What is wrong, and the error in it that rounding explains: 2 N, or half of it where only a part failed."""
        if len(smallest.requests) > 1:
            self.witness.refresh()
        evidence = self.witness.evidence(smallest.requests[-1], smallest.requests[:-1])
        tensor = smallest.finding.tensor.removesuffix(" (all queries)") or "out"
        got, golden = evidence.reply.tensors.get(tensor), evidence.golden.get(tensor)
        if got is None or golden is None or got.shape != golden.shape:
            return tensor, 1e-6
        error = float((got.double() - golden).abs().nan_to_num(0.0).max()) if got.numel() else 0.0
        ratio = smallest.finding.err_ratio
        least = torch.finfo(smallest.requests[-1].q.dtype).eps * _largest(smallest.requests[-1])
        return tensor, max(least, 2 * error / ratio) if ratio and ratio > 2 else error / 2 or 1e-6


def _largest(request: Request) -> float:
    """Of the values: no result can be exact to less than their own rounding."""
    values = request.v[request.v.isfinite()]
    return float(values.abs().max()) if values.numel() else 0.0


def _is_of_gradients(note: str) -> bool:
    return note.startswith(("grad ", "the gradients", "second "))


def _said_by(finding: Finding) -> str:
    return f"{finding.check}: {first_line(finding.reason)}"


def _words(evidence: Evidence, finding: Finding) -> str:
    failure = evidence.reply.failure
    if failure is None:
        return first_line(finding.reason)
    torch_does = answered(evidence.request)
    if failure.kind == "contract":
        return first_line(failure.message)
    message = re.sub(r'; File "[^"]*/harness/candidate/[^;]*', "", first_line(failure.message))
    verb = {"died": "its process dies", "timeout": "it hangs", "oom": "it runs out of memory"}.get(
        failure.kind, "it raises"
    )
    return f"{verb}: {message}" + ("" if torch_does else " (so does torch)")


def _rank(finding: Finding) -> tuple[bool, ...]:
    """Numbers before errors, one call before several, plain before special."""
    request = finding.requests[-1] if finding.requests else None
    return (
        request is None,
        len(finding.requests) > 1,
        finding.status == "error",
        request is not None and request.mode not in ("no_grad", "grad"),
        finding.tensor not in ("", "out"),
        request is not None and request.q.dtype in (torch.bfloat16, torch.float16),
    )


def _richness(request: Request) -> tuple[bool, bool, float]:
    """Best to explain first: in full precision, without gradients, neither too few numbers nor too many."""
    is_half = request.q.dtype in (torch.bfloat16, torch.float16)
    return is_half, bool(request.gradients), abs(math.log(max(scores_of_call(request), 1) / RICH))


def _redrawn(request: Request, number: int) -> Request:
    """Other numbers of the same size; strides, mask and all else as they are."""
    generator = torch.Generator().manual_seed(number)

    def other(t: torch.Tensor) -> torch.Tensor:
        new = torch.randn(t.shape, generator=generator).to(t.dtype)
        return new * t.double().std().clamp(min=1e-30).to(t.dtype) if t.numel() > 1 else new

    return replace(request, q=other(request.q), k=other(request.k), v=other(request.v))


def call_words(request: Request) -> str:
    """The call in one line, its sizes and what is special."""
    (B, H, L, D), (_, H_kv, S, D_v) = request.q.shape, request.v.shape
    parts = [f"B {B}", f"H {H}" + (f"/{H_kv}" if H_kv != H else ""), f"L {L}", f"S {S}", f"D {D}"]
    parts += [f"D_v {D_v}"] if D_v != D else []
    parts += ["causal"] if request.is_causal else []
    if request.mask is not None:
        kind = "bool" if request.mask.dtype == torch.bool else "float"
        parts.append(f"{kind} mask {tuple(request.mask.shape)}")
    parts += [f"scale {request.scale:.4g}"] if request.scale is not None else []
    parts.append(str(request.q.dtype)[6:])
    parts += [f"gradients of {', '.join(request.gradients)}"] if request.gradients else []
    parts += [request.mode] if request.mode not in ("no_grad", "grad") else []
    return ", ".join(parts)
