"""One cell of the study: is the right candidate ok, is every saboteur seen, and how small an error of the scale?

The right pair and its referee are made once, and shared by every candidate that is tried in the cell.
"""

import copy
import dataclasses
import functools
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing

import torch
from torch import Tensor

from harness.candidate.isolated import judged_kernel
from harness.candidate.state import preserved
from harness.case import Case
from harness.cell import record_of
from harness.cell.build import Pair, WatchedKernel, build_pair
from harness.cell.large import referee_of
from harness.cell.measure import status_of, weighed
from harness.cell.referee import IN_FLOAT32
from harness.cell.rule import Equivalence, TensorVerdict
from harness.cell.side import OwnCaches
from harness.kernels.call import AttentionCall, Kernel
from harness.kernels.eager import eager
from harness.mutants.result import ERROR, MISMATCH, NOT_APPLICABLE, SURVIVED, CellResult, SaboteurFinding, Threshold
from harness.mutants.saboteurs.saboteur import Saboteur
from harness.swaps import VARIANT, swap
from harness.variants.specs import VARIANTS

PASSING = ("ok", "skipped")  # skipped: the reference overflows, and nothing can be said
COUNTS = "counts"  # calls, parameters and cache bytes: what is compared with a formula, not with the reference
ERRORS = tuple(float(f"1e-{power}") for power in range(1, 9))  # of the scale, largest first

log = logging.getLogger(__name__)


def study_cell(case: Case, saboteurs: Iterable[Saboteur], *, seed: int, regimes: Sequence[str]) -> CellResult:
    started = time.perf_counter()
    cell = StudiedCell(case, seed=seed, regimes=regimes)
    problem = right_problem(cell)
    if problem is not None:
        return CellResult(case, problem, (), None, time.perf_counter() - started)
    findings = tuple(try_saboteur(cell, saboteur) for saboteur in saboteurs)
    return CellResult(case, None, findings, threshold(cell), time.perf_counter() - started)


def right_problem(cell: "StudiedCell") -> str | None:
    """Why the right candidate does not pass: a cell that cries wolf kills everything, and proves nothing."""
    found = first_kill("right", cell, cell.right)
    if found.outcome != SURVIVED:
        return f"the right candidate is {found.outcome} in {found.by}, {found.tensor}: {found.message}"
    return None if found.err_ratio is not None else "nothing could be judged: the reference overflows, or none applies"


def try_saboteur(cell: "StudiedCell", saboteur: Saboteur) -> SaboteurFinding:
    if not saboteur.applies(cell.case):
        return SaboteurFinding(saboteur.name, NOT_APPLICABLE)
    # Not inside the `try` of first_kill: a saboteur that cannot be built is our bug, not a kill.
    return first_kill(saboteur.name, cell, cell.sabotaged(saboteur), explanation=saboteur.invisible(cell.case))


def first_kill(name: str, cell: "StudiedCell", pair: Pair, *, explanation: str | None = None) -> SaboteurFinding:
    """Stops at the first mismatch; what is degraded is told if nothing worse follows."""
    degraded: SaboteurFinding | None = None
    largest: float | None = None
    try:
        with closing(cell.examine(pair)) as verdicts:  # stopped early, it must put global state back at once
            for verdict in verdicts:
                if verdict.status not in PASSING:
                    by = f"{verdict.regime}, in float32" if IN_FLOAT32 in verdict.tensor else verdict.regime
                    found = SaboteurFinding(name, verdict.status, by, verdict.tensor, verdict.err_ratio, verdict.reason)
                    if verdict.status == MISMATCH:
                        return found
                    degraded = degraded or found
                if verdict.err_ratio is not None and not verdict.is_aside:
                    largest = max(verdict.err_ratio, largest or 0.0)
    except MemoryError:
        raise  # the machine's, not the candidate's
    except Exception as failure:  # a wrong candidate may break in any way; that is seen
        log.info("%s %s: %r", cell.case.case_id, name, failure)
        return SaboteurFinding(name, ERROR, type(failure).__name__, message=str(failure).partition("\n")[0])
    return degraded or SaboteurFinding(name, SURVIVED, err_ratio=largest, explanation=explanation)


class StudiedCell:
    """A right pair, its referee, and wrong candidates beside the same reference."""

    def __init__(self, case: Case, *, seed: int, regimes: Sequence[str]) -> None:
        self.case, self.seed = case, case.seed(seed)
        self.right = build_pair(case, judged_kernel(case.kernel), self.seed)
        # Our kernels promise not to leak what is behind a mask, so what takes their place is held to NaN too.
        self.referee = referee_of(self.right, regimes, seed=self.seed, poison=self.right.poison)

    def pair_with(self, kernel: Kernel) -> Pair:
        """The same reference beside a fresh candidate around `kernel`."""
        watch = WatchedKernel(kernel)
        options = VARIANTS[self.case.variant].swap_options
        module, report = swap(self.right.reference.module, to=VARIANT, kernel=watch.as_kernel(), **options)
        right = self.right.candidate
        candidate = dataclasses.replace(
            right,
            module=module,
            views=copy.deepcopy(right.views),  # a saboteur may write into them
            new_cache=None if right.new_cache is None else OwnCaches(module),
            gives_weights=kernel.gives_weights,
        )
        return dataclasses.replace(self.right, candidate=candidate, watch=watch, swap_report=report)

    def sabotaged(self, saboteur: Saboteur) -> Pair:
        if saboteur.kernel is not None:
            return self.pair_with(saboteur.kernel())
        assert saboteur.spoil is not None, f"{saboteur.name} has neither a kernel nor a spoil"
        pair = self.pair_with(self.right.watch.kernel)
        with preserved():
            torch.manual_seed(self.seed)
            saboteur.spoil(pair)
        return pair

    def examine(self, pair: Pair) -> Generator[TensorVerdict]:
        """All that a run would judge of this candidate, one by one; global state is put back at the end."""
        with preserved():
            torch.manual_seed(self.seed)  # a saboteur that draws does so alike, whatever ran before it
            before, verdicts = pair.calls, []
            for verdict in self.referee.examine(pair):
                verdicts.append(verdict)
                yield verdict
            if not all(verdict.is_aside for verdict in verdicts):
                yield from self._counts(pair, Equivalence(tuple(verdicts)), calls=pair.calls - before)

    def glance(self, pair: Pair) -> Generator[TensorVerdict]:
        """What is most sensitive to a wrong number, alone."""
        with preserved():
            yield from self.referee.glance(pair)

    def _counts(self, pair: Pair, equivalence: Equivalence, *, calls: int) -> Iterator[TensorVerdict]:
        """What a run holds to a formula, where that is worse than all tensors."""
        record = weighed(record_of(self.case, status=equivalence.judged, calls=calls), pair)
        status, message = status_of(record, equivalence, pair.watch.kernel)
        if status != equivalence.judged:
            yield TensorVerdict(COUNTS, COUNTS, status, message or "")


def scale_off_by(error: float) -> Kernel:
    def run(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor | None]:
        return eager(q, k, v, dataclasses.replace(call, scale=call.scale * (1 + error)))

    return Kernel(f"scale_off_by_{error:g}", run, gives_weights=True, origin="saboteur")


def threshold(cell: "StudiedCell") -> Threshold:
    """In the first regime alone, the most sensitive one by far: what the others add is not worth six times the work."""

    def status(error: float) -> str:
        worst = "ok"
        with closing(cell.glance(cell.pair_with(scale_off_by(error)))) as verdicts:
            for verdict in verdicts:
                if verdict.status == MISMATCH:
                    return MISMATCH
                worst = worst if verdict.status in PASSING else verdict.status
        return worst

    return smallest_seen(status)


def smallest_seen(status_of: Callable[[float], str]) -> Threshold:
    """By bisection: what is seen at one error is seen at every larger one."""
    status = functools.cache(status_of)
    return Threshold(
        mismatch=_last(lambda error: status(error) == MISMATCH),
        seen=_last(lambda error: status(error) not in PASSING),
    )


def _last(holds: Callable[[float], bool]) -> float | None:
    """The last of ERRORS for which it holds."""
    number = bisect_left(ERRORS, True, key=lambda error: not holds(error))
    return ERRORS[number - 1] if number else None
