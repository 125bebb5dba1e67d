"""Which cells the timing part takes, and the settings that they ran with."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic_core import PydanticCustomError

from harness.case import BATTERY, CASE_FIELDS, Case
from harness.errors import BadInput
from harness.gate.baseline import GatedRun
from harness.kernels.names import is_plugin
from harness.record import EQUAL_STATUSES
from harness.suite.config import load_suite, threads_of
from harness.suite.schema import resolve_kernel
from harness.text import plain


@dataclass(frozen=True, slots=True)
class ChosenCells:
    """The cases to be timed, and what they run with."""

    suite: str
    cases: tuple[Case, ...]
    threads: int
    seed: int
    left_out: int  # cells of the run that have no time to compare
    not_chosen: int = 0


def cells_of_run(run: GatedRun) -> ChosenCells:
    """Those that ran, with the kernels that they ran with."""
    records = run.stored.records
    # Of the others the exact part tells.
    timed = [record for record in records if record.status in EQUAL_STATUSES and record.variant != BATTERY]
    cases = tuple(Case(**{name: getattr(record, name) for name in CASE_FIELDS}) for record in timed)
    return ChosenCells(run.suite, cases, run.environment.threads, run.seed, len(records) - len(timed))


def cells_of_config(config: Path) -> ChosenCells:
    suite = load_suite(config)
    cases = tuple(case for case in suite.cases if not case.is_battery)
    return ChosenCells(suite.name, cases, threads_of(suite), suite.seed, 0)


def choose(cells: ChosenCells, *, glob: str | None, kernels: Sequence[str]) -> ChosenCells:
    """`kernels` take the place of the cells' own."""
    cases = cells.cases
    if kernels:
        known = [_known(kernel) for kernel in kernels]
        cases = tuple(dict.fromkeys(replace(case, kernel=kernel) for case in cases for kernel in known))
    offered = len(cases)
    if glob is not None:
        cases = tuple(case for case in cases if fnmatch.fnmatchcase(case.case_id, glob))
    if not cases:
        found = f"none of {len(cells.cases)} cells is like {glob!r}" if glob is not None else "there are none"
        raise BadInput(f"no cell to time: {found}")
    return replace(cells, cases=cases, not_chosen=offered - len(cases))


def refuse_foreign(cells: ChosenCells, folder: Path) -> None:
    """A run's folder may be anybody's, and to time a kernel that it names is to run that file."""
    named = [kernel for kernel in dict.fromkeys(case.kernel for case in cells.cases) if is_plugin(kernel)]
    if named:
        raise BadInput(
            f"{folder}: its records name code to be run: {', '.join(map(plain, named))}; if you trust that, add "
            "--trust-kernels, or name your own with --kernel"
        )


def _known(kernel: str) -> str:
    """As in a config: one that nobody has would leave every cell without an answer."""
    try:
        return resolve_kernel(kernel, None)
    except PydanticCustomError as error:
        known = (error.context or {}).get("known", ())
        raise BadInput(f"--kernel {kernel}: {error}{'; known: ' if known else ''}{', '.join(known)}") from None
