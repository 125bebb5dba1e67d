"""The timing part of the gate: two versions, cell by cell, in turn on the same machine in the same minutes."""

import contextlib
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from harness.case import Case
from harness.errors import BadInput
from harness.gate import statistics
from harness.gate.findings import TimingSettings, TimingVerdict, TimingWord
from harness.gate.sampling import AGAIN, FIRST, LOOKS, CellFailed, Round, Sampler, VersionProcesses, stack
from harness.gate.statistics import Estimate, Level
from harness.gate.versions import Version
from harness.text import plain

ATTEMPTS = 2  # a process that died in a cell, or refused it, may have been damaged by an earlier one: a fresh one tells
MOST_HANGS = 3  # cells; each costs its whole time limit, and a night has hundreds

Progress = Callable[[int, str], None]


class TimingError(BadInput):
    """Nothing can be timed; the message says why."""


@dataclass
class _CellTimes:
    """What is known of a case while the night goes on; `second` are the rounds of measuring it again."""

    case: Case
    rounds: list[Round] = field(default_factory=list)
    second: list[Round] = field(default_factory=list)
    failure: CellFailed | None = None
    seconds: float = 0.0

    @property
    def all_rounds(self) -> list[Round]:
        return [*self.rounds, *self.second]


def judge_times(
    base: Version, head: Version, cases: Sequence[Case], settings: TimingSettings, *, progress: Progress | None = None
) -> tuple[TimingVerdict, ...]:
    """One verdict a case, in their order. `progress` is told how many cells are done, and what runs now.

    Both versions may be the same tree (A/A). Worker processes are started here and are gone at the end.
    """
    report = progress or (lambda done, running: None)
    seed = random.SystemRandom().randrange(1 << 32) if settings.seed is None else settings.seed
    level = Level(settings.level, max(1, len(cases)), len(LOOKS))
    cells = [_CellTimes(case) for case in cases]
    with contextlib.closing(VersionProcesses(base, head, settings)) as processes:
        night = _Night(processes, settings, level, seed)
        report(0, "starting the processes")
        try:  # apart from the first cell, so that it is not charged to that
            processes.muster()
        except CellFailed as failure:
            raise TimingError(f"the {failure.side} cannot be timed: {plain(failure.reason)}") from None
        processes.refuse_same(dict.fromkeys(case.kernel for case in cases))
        # Neighbours of a grid are alike, and a minute's trouble would hit all of them: in random order it does not.
        for done, cell in enumerate(night.chance.sample(cells, len(cells))):
            report(done, cell.case.case_id)
            night.measure(cell)
        flagged = [cell for cell in cells if night.is_worth_another_look(cell)]
        if flagged and _starts_afresh(processes):
            for cell in flagged:
                if night.hangs >= MOST_HANGS:
                    break
                report(len(cells), f"again: {cell.case.case_id}")
                night.measure_again(cell)
        report(len(cells), "")
    return _judge(cells, settings, level, seed=seed)


def _starts_afresh(processes: VersionProcesses) -> bool:
    """Where it does not, what has been measured is judged all the same, and its changes are "not measured again"."""
    processes.close()
    try:
        processes.muster()
    except CellFailed:
        return False
    return True


class _Night:
    """Measures one cell after the other, in the processes of both versions; the cells keep what was measured."""

    def __init__(self, processes: VersionProcesses, settings: TimingSettings, level: Level, seed: int) -> None:
        self._processes, self._settings, self._level, self._seed = processes, settings, level, seed
        self.chance = random.Random(seed)
        self.hangs = 0  # cells that hung

    def measure(self, cell: _CellTimes) -> None:
        if self.hangs >= MOST_HANGS:
            cell.failure = CellFailed("both", f"{MOST_HANGS} cells hung before it, and the night must end", died=False)
            return
        seconds, fewest = FIRST * self._settings.seconds, statistics.MIN_ROUNDS
        cell.rounds = self._attempt(
            cell, lambda: self._sampler(cell).rounds(seconds, looks=LOOKS, enough=self._is_enough, fewest=fewest)
        )
        if cell.failure is not None and cell.failure.side == "base" and not cell.failure.died:
            try:  # the base is asked first: when it refuses, the head has not been asked yet
                self._sampler(cell).build(("head", 0))
            except CellFailed as other:
                cell.failure = CellFailed("both", other.reason, died=other.died, hung=other.hung)
                self.hangs += other.hung

    def measure_again(self, cell: _CellTimes) -> None:
        seconds, fewest = (1 - FIRST) * self._settings.seconds, statistics.FEWEST_AGAIN
        cell.second = self._attempt(
            cell,
            lambda: self._sampler(cell, blocks=len(cell.rounds[0].times)).rounds(
                seconds, looks=(AGAIN,), enough=lambda times: True, fewest=fewest
            ),
        )

    def is_worth_another_look(self, cell: _CellTimes) -> bool:
        if cell.failure is not None or not cell.rounds:
            return False
        found = statistics.estimate(stack(cell.rounds), seed=self._seed)
        return found.is_sound and not statistics.is_clearly_unchanged(found, self._settings, self._level)

    def _sampler(self, cell: _CellTimes, blocks: int | None = None) -> Sampler:
        return Sampler(self._processes, cell.case, self._settings, chance=self.chance, blocks=blocks)

    def _is_enough(self, times: np.ndarray) -> bool:
        found = statistics.estimate(times, seed=self._seed)
        unchanged = statistics.is_clearly_unchanged(found, self._settings, self._level)
        return unchanged or statistics.is_flagged(found, self._settings)

    def _attempt(self, cell: _CellTimes, measured: Callable[[], list[Round]]) -> list[Round]:
        """Once more where a process died or the head refused; not where it hung, which would take as long again."""
        started = time.perf_counter()
        rounds: list[Round] = []
        for _ in range(ATTEMPTS):
            cell.failure = None
            try:
                rounds = measured()
            except CellFailed as failure:
                cell.failure = failure
            if cell.failure is None or cell.failure.hung or not (cell.failure.died or cell.failure.side == "head"):
                break
        self.hangs += cell.failure is not None and cell.failure.hung
        cell.seconds += time.perf_counter() - started
        return rounds


class _Test(NamedTuple):
    """Of one cell to one side: the p-value, times the looks at which one might have stopped; the night's q-value."""

    p: float
    q: float


def _judge(
    cells: Sequence[_CellTimes], settings: TimingSettings, level: Level, *, seed: int
) -> tuple[TimingVerdict, ...]:
    estimates = [
        statistics.estimate(stack(cell.all_rounds), seed=seed)
        if cell.failure is None and cell.all_rounds
        else statistics.NOTHING
        for cell in cells
    ]
    slower = _tests([level.looks * each.p_slower(settings.min_effect) for each in estimates])
    faster = _tests([level.looks * each.p_faster(settings.min_effect) for each in estimates])
    discoveries = sum(test.q <= settings.level for test in slower)
    verdicts = []
    for cell, found, slow, fast in zip(cells, estimates, slower, faster, strict=True):
        # The p-value that Benjamini and Hochberg would have asked of this cell, given what the others found.
        rank = discoveries + (not slow.q <= settings.level)
        smallest = found.smallest(settings.min_effect, level.alone * rank)
        word, reason = _word(cell, found, settings, slower=slow, faster=fast, smallest=smallest)
        shown = slow if not found.change < 0 else fast
        verdicts.append(_verdict(cell, word, reason, found, smallest=smallest, test=shown))
    return tuple(verdicts)


def _tests(p_values: list[float]) -> list[_Test]:
    return [_Test(p, q) for p, q in zip(p_values, statistics.adjust(p_values), strict=True)]


def _word(
    cell: _CellTimes, found: Estimate, settings: TimingSettings, *, slower: _Test, faster: _Test, smallest: float
) -> tuple[TimingWord, str]:
    """The verdict's word, and its reason."""
    if cell.failure is not None:
        return _failed(cell.failure, again=bool(cell.rounds))
    got, seconds = len(cell.rounds), f"{cell.seconds:.0f} s"
    if 0 < got < statistics.MIN_ROUNDS:
        times = stack(cell.rounds)
        if statistics.is_beyond_doubt(times):
            factor = math.exp(statistics.raw_change(times))
            return "regression", f"{factor:.1f} times as slow, in every round of the {got} that it got in {seconds}"
        rounds = f"{got} of the {statistics.MIN_ROUNDS} rounds that it takes in {seconds}"
        return "inconclusive", f"too slow for its time: {rounds}; raise --seconds"
    second = statistics.change_alone(stack(cell.second)) if cell.second else None
    return statistics.decide(found, settings, q_slower=slower.q, q_faster=faster.q, smallest=smallest, second=second)


def _failed(failure: CellFailed, *, again: bool) -> tuple[TimingWord, str]:
    """`again`: it could be timed at first."""
    if failure.side == "both":
        return "inconclusive", f"neither version can be timed here: {failure.reason}"
    if failure.side == "head":
        how = "head died" if failure.died else "the head cannot build or call this cell, the base can"
        return "regression", f"{how}: {failure.reason}"
    if failure.died:
        return "inconclusive", f"base died: {failure.reason}"
    if again:
        return "inconclusive", f"the base refused it when measured again: {failure.reason}"
    return "inconclusive", f"new in head: the base cannot build this cell: {failure.reason}"


def _verdict(
    cell: _CellTimes, word: TimingWord, reason: str, found: Estimate, *, smallest: float, test: _Test
) -> TimingVerdict:
    rounds = cell.all_rounds
    base, head, reference = _milliseconds(rounds)
    sound = found.is_sound
    # Where there is too little for a claim, what there is is shown all the same.
    change = found.change if sound or cell.failure is not None or not rounds else statistics.raw_change(stack(rounds))
    return TimingVerdict(
        case_id=cell.case.case_id,
        verdict=word,
        change=_relative(change),
        lo=_relative(found.lo),
        hi=_relative(found.hi),
        smallest=smallest if math.isfinite(smallest) else None,
        null=_relative(found.null),
        null_lo=_relative(found.null_lo),
        null_hi=_relative(found.null_hi),
        p_value=min(1.0, test.p) if sound else None,
        q_value=test.q if sound else None,
        blocks=found.blocks,
        seconds=cell.seconds,
        remeasured=bool(cell.second),
        base_ms=base,
        head_ms=head,
        reference_ms=reference,
        reason=reason,
    )


def _relative(log_ratio: float) -> float | None:
    return math.expm1(log_ratio) if math.isfinite(log_ratio) else None


def _milliseconds(rounds: Sequence[Round]) -> tuple[float | None, float | None, float | None]:
    if not rounds:
        return None, None, None
    base, head = (1e3 * seconds if math.isfinite(seconds) else None for seconds in statistics.seconds_of(stack(rounds)))
    reference = [each for one in rounds for each in one.reference]
    return base, head, 1e3 * float(np.median(reference))
