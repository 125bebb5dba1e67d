"""The loop over one cell: is the right candidate ok, is every saboteur seen, how small an error is?"""

import logging
import time
from collections.abc import Iterable, Sequence
from contextlib import closing

from harness.build import Pair
from harness.case import Case
from harness.compare import IN_FLOAT32
from harness.saboteurs.saboteur import Saboteur
from harness.sensitivity.cell import Cell
from harness.sensitivity.result import ERROR, NOT_APPLICABLE, SURVIVED, CellResult, Finding
from harness.sensitivity.threshold import threshold

PASSING = ("ok", "skipped")  # skipped: the reference overflows, and nothing can be said

log = logging.getLogger(__name__)


def study_cell(case: Case, saboteurs: Iterable[Saboteur], *, seed: int, regimes: Sequence[str]) -> CellResult:
    started = time.perf_counter()
    cell = Cell(case, seed=seed, regimes=regimes)
    problem = right_problem(cell)
    if problem is not None:
        return CellResult(case, problem, (), None, time.perf_counter() - started)
    findings = tuple(try_saboteur(cell, saboteur) for saboteur in saboteurs)
    return CellResult(case, None, findings, threshold(cell), time.perf_counter() - started)


def right_problem(cell: Cell) -> str | None:
    """Why the right candidate does not pass: a cell that cries wolf kills everything, and proves nothing."""
    found = first_kill("right", cell, cell.right)
    if found.outcome != SURVIVED:
        return f"the right candidate is {found.outcome} in {found.by}, {found.tensor}: {found.message}"
    return None if found.err_ratio is not None else "nothing could be judged: the reference overflows, or none applies"


def try_saboteur(cell: Cell, saboteur: Saboteur) -> Finding:
    if not saboteur.applies(cell.case):
        return Finding(saboteur.name, NOT_APPLICABLE)
    # Not inside the `try` of first_kill: a saboteur that cannot be built is our bug, not a kill.
    return first_kill(saboteur.name, cell, cell.sabotaged(saboteur), explanation=saboteur.invisible(cell.case))


def first_kill(name: str, cell: Cell, pair: Pair, *, explanation: str | None = None) -> Finding:
    """Stops at the first verdict that is not ok."""
    largest: float | None = None
    try:
        with closing(cell.examine(pair)) as verdicts:  # stopped early, it must put global state back at once
            for verdict in verdicts:
                if verdict.status not in PASSING:
                    by = f"{verdict.regime}, in float32" if verdict.tensor.endswith(IN_FLOAT32) else verdict.regime
                    return Finding(name, verdict.status, by, verdict.tensor, verdict.err_ratio, verdict.reason)
                if verdict.err_ratio is not None and not verdict.is_aside:
                    largest = max(verdict.err_ratio, largest or 0.0)
    except MemoryError:
        raise  # the machine's, not the candidate's
    except Exception as failure:  # a wrong candidate may break in any way; that is seen
        log.info("%s %s: %r", cell.case.case_id, name, failure)
        return Finding(name, ERROR, type(failure).__name__, message=str(failure).partition("\n")[0])
    return Finding(name, SURVIVED, err_ratio=largest, explanation=explanation)
