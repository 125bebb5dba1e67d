"""Which guess gives just what the kernel gives? Named only where one does and all others do not."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.candidate.examinee import InProcess
from harness.candidate.request import Request
from harness.cell.golden import lost_rows, outcome
from harness.diagnosis.evidence import CERTAIN, EXPLAINED, Evidence, distance, with_tensors
from harness.diagnosis.guesses import all_guesses
from harness.diagnosis.guesses.families import FAMILIES, of_family
from harness.diagnosis.guesses.guess import SABOTEUR, Family, Guess, pair
from harness.diagnosis.result import Named

NEAR = 12  # readings that are tried before others: those that leave least of the error
STEPS, STEP = 10, 1e-4  # of a fit
HOPELESS = 3, 0.9  # after so many steps so much of what was left is still there
CLEAR = 3.0  # times what the best one leaves, the next must leave
MOST_NAMES = 3
NONE = math.inf


@dataclass(frozen=True)
class _Fitting:
    """A guess that explains what is to be named, and how it does elsewhere."""

    guess: Guess
    residual: float
    explained: int
    contradicted: int
    parameter: tuple[float, float] | None = None


def usable(evidence: Evidence) -> bool:
    """Something can be learnt from it: numbers that differ by more than rounding, in a call whose answer is defined."""
    return evidence.request.mode != "autocast" and lost_rows(evidence.request) is None


def names_of(wrong: Sequence[Evidence], right: Sequence[Evidence], until: float) -> tuple[Named, ...]:
    """One name that explains all of `wrong`, or several that share them; the first is looked at first.

    `right`: calls that the kernel answers as it should, and so must a guess.
    """
    found: list[Named] = []
    left = list(wrong)
    for _ in range(MOST_NAMES):
        if not left or time.perf_counter() > until:
            break
        main = left.pop(0)
        one = _name_one([main, *(each for each in wrong if each is not main)], right, until)
        if one is None:
            continue
        named, guess = one
        if named.everywhere:
            return (named,)
        found.append(named)
        left = [each for each in left if (a := answer_of(guess, each)) is None or not each.is_explained(a)]
    most = max((each.calls for each in found), default=0)
    whole = [each for each in found if each.calls == most]
    return tuple(whole[:1]) if most == len(wrong) else tuple(found)


def _name_one(wrong: Sequence[Evidence], right: Sequence[Evidence], until: float) -> tuple[Named, Guess] | None:
    """Of the first; the others tell guesses apart that explain it alike."""
    main = wrong[0]
    if sum(golden.numel() for golden in main.compared.values()) < 8:
        return None
    residuals: dict[Guess, float] = {}
    for guess in all_guesses():
        if time.perf_counter() > until:
            break
        residuals[guess] = residual_of(guess, main)
    fitted = {of_family(family, *numbers): numbers for family in FAMILIES if (numbers := fit(family, main)) is not None}
    residuals |= {guess: residual_of(guess, main) for guess in fitted}
    found = _explaining(residuals, main)
    if not found:
        pairs, more = _pairs(residuals, main, until)
        fitted |= more
        residuals |= pairs
        found = _explaining(pairs, main)
    if not found:
        return None
    candidates = [_beside(guess, residuals[guess], wrong[1:], right, fitted.get(guess)) for guess in found]
    return _chosen(candidates, residuals, wrong, right)


def name_trace(evidence: Evidence) -> tuple[Named, ...]:
    """By what a call left behind: the one saboteur that leaves just the same, and the same output."""
    alike, reply = [], evidence.reply
    for guess in all_guesses():
        if guess.rank != SABOTEUR or guess.kernel is None:
            continue
        theirs = InProcess(guess.kernel(), guess.name).ask(_copied(evidence.request))
        same = (theirs.written, theirs.shares, theirs.changed) == (reply.written, reply.shares, reply.changed)
        if same and theirs.failure is None and evidence.distance(theirs.tensors) <= CERTAIN * evidence.noise:
            alike.append(guess)
    if len(alike) != 1:
        return ()
    return (Named(alike[0].words, (alike[0].name,), 0.0, NONE, calls=1, everywhere=True),)


def _copied(request: Request) -> Request:
    return with_tensors(request, **{name: t.clone() for name, t in request.tensors.items()})


def residual_of(guess: Guess, evidence: Evidence) -> float:
    answer = answer_of(guess, evidence)
    return NONE if answer is None else evidence.residual(answer)


def answer_of(guess: Guess, evidence: Evidence) -> dict[str, Tensor] | None:
    """What it would have given; None where it has no answer to such a call."""
    try:
        run = guess.make()
        for earlier in evidence.before:
            outcome(earlier, run)
        return outcome(evidence.request, run)
    except (RuntimeError, IndexError, ValueError, ArithmeticError):
        return None


def _explaining(residuals: dict[Guess, float], evidence: Evidence) -> list[Guess]:
    found = []
    for guess, left in residuals.items():
        if left < 0.5:
            answer = answer_of(guess, evidence)
            if answer is not None and evidence.is_explained(answer):
                found.append(guess)
    return found


def _beside(
    guess: Guess, residual: float, wrong: Iterable[Evidence], right: Iterable[Evidence],
    parameter: tuple[float, float] | None,
) -> _Fitting:  # fmt: skip
    explained = contradicted = 0
    for evidence in wrong:
        answer = answer_of(guess, evidence)
        is_explained = answer is not None and evidence.is_explained(answer)
        explained += is_explained
        contradicted += not is_explained
    for evidence in right:
        answer = answer_of(guess, evidence)
        far = NONE if answer is None else distance(answer, evidence.golden, evidence.compared)
        contradicted += far > CERTAIN * evidence.noise
    return _Fitting(guess, residual, explained, contradicted, parameter)


def _chosen(
    candidates: Sequence[_Fitting], residuals: dict[Guess, float], wrong: Sequence[Evidence], right: Sequence[Evidence]
) -> tuple[Named, Guess] | None:
    """The one that does best elsewhere, with all that give the same answers; None where others do as well."""
    fewest = min(each.contradicted for each in candidates)
    best = [each for each in candidates if each.contradicted == fewest]
    best.sort(key=lambda each: each.guess.rank)
    first = best[0]
    answers = [answer_of(first.guess, evidence) for evidence in (*wrong, *right)]
    alike = [each for each in best if _same_answers(each.guess, answers, (*wrong, *right))]
    if len(alike) < len(best) and fewest:
        return None
    others = [left for guess, left in residuals.items() if guess not in {each.guess for each in candidates}]
    beyond = min(others, default=NONE)
    if beyond <= CLEAR * max(first.residual, 1e-3):
        return None
    named = Named(
        words=first.guess.words,
        names=tuple(each.guess.name for each in alike),
        residual=first.residual,
        next_residual=beyond,
        calls=1 + first.explained,
        everywhere=fewest == 0,
        parameter=None if first.parameter is None else first.parameter[0],
        uncertainty=None if first.parameter is None else first.parameter[1],
    )
    return named, first.guess


def _same_answers(guess: Guess, answers: Sequence[dict[str, Tensor] | None], evidences: Sequence[Evidence]) -> bool:
    for answer, evidence in zip(answers, evidences, strict=True):
        mine = answer_of(guess, evidence)
        if mine is None or answer is None:
            if mine is not answer:
                return False
            continue
        if distance(mine, answer, evidence.compared) > max(CERTAIN * evidence.noise, 0.02 * _finite(evidence.error)):
            return False
    return True


def _finite(error: float) -> float:
    return error if math.isfinite(error) else 0.0


def _pairs(
    residuals: dict[Guess, float], main: Evidence, until: float
) -> tuple[dict[Guess, float], dict[Guess, tuple[float, float]]]:
    """Two at once: the readings that leave least of the error, each before every other guess and family."""
    near = sorted((g for g in residuals if g.reading is not None), key=lambda g: residuals[g])
    near = [guess for guess in near if residuals[guess] < 0.99][:NEAR]
    others = [guess for guess in residuals if math.isfinite(residuals[guess])]
    pairs: dict[Guess, float] = {}
    fitted: dict[Guess, tuple[float, float]] = {}
    for reading in near:
        for family in FAMILIES:
            numbers = fit(family, main, base=reading)
            if numbers is not None:
                guess = of_family(family, *numbers, base=reading)
                fitted[guess] = numbers
                pairs[guess] = residual_of(guess, main)
    for reading in near:
        for other in others:
            if time.perf_counter() > until:
                return pairs, fitted
            if other is not reading:
                guess = pair(reading, other)
                pairs[guess] = residual_of(guess, main)
    return pairs, fitted


# ---- families -------------------------------------------------------------------------------------------------------


def fit(family: Family, evidence: Evidence, base: Guess | None = None) -> tuple[float, float] | None:
    """The number that explains most, and its uncertainty, by Gauss and Newton from several starts; None: it explains
    nothing, or is a right kernel's.
    """
    if not math.isfinite(evidence.error) or not evidence.error:
        return None
    target = _joined(evidence.reply.tensors, evidence)
    best: tuple[float, float, float] | None = None
    for start in family.starts:
        found = _descend(lambda a: _vector(family, a, evidence, base), start, target)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
        if best is not None and best[0] < EXPLAINED * evidence.error:
            break
    if best is None or best[0] > 0.5 * evidence.error:
        return None
    _, number, uncertainty = best
    return None if abs(number - family.right) <= 3 * uncertainty else (number, uncertainty)


def _joined(tensors: dict[str, Tensor], evidence: Evidence) -> Tensor:
    """All in one vector, each in units of its golden, as `distance` has them."""
    parts = []
    for name, golden in evidence.compared.items():
        size = float(golden.square().mean().sqrt()) or 1.0
        parts.append(tensors[name].double().flatten() / (size * math.sqrt(max(golden.numel(), 1))))
    return torch.cat(parts)


def _vector(family: Family, number: float, evidence: Evidence, base: Guess | None) -> Tensor | None:
    answer = answer_of(of_family(family, number, 0.0, base), evidence)
    return None if answer is None else _joined(answer, evidence)


def _descend(run: Callable[[float], Tensor | None], start: float, target: Tensor) -> tuple[float, float, float] | None:
    """What is left, number, uncertainty."""
    if not bool(target.isfinite().all()):
        return None
    number = start
    current = run(number)
    if current is None or not bool(current.isfinite().all()):
        return None
    left = target - current
    first = float(left.norm())
    for number_of_step in range(STEPS):
        if number_of_step == HOPELESS[0] and float(left.norm()) > HOPELESS[1] * first:
            return None
        step = STEP * max(abs(number), 1e-2)
        ahead = run(number + step)
        if ahead is None or not bool(ahead.isfinite().all()):
            return None
        tangent = (ahead - current) / step
        square = float(tangent.square().sum())
        if not square:
            return None
        move = float((left * tangent).sum()) / square
        if number > 0:  # neither through 0 nor far beyond what a tangent says
            move = min(max(move, -0.7 * number), 2 * number)
        moved = run(number + move)
        if moved is None or not bool(moved.isfinite().all()):
            return None
        number, current = number + move, moved
        left = target - current
        if abs(move) <= 1e-9 * max(abs(number), 1e-9):
            break
    uncertainty = float(left.norm()) / math.sqrt(max(left.numel() - 1, 1)) / math.sqrt(square)
    return float(left.norm()), number, uncertainty
