"""The timing part of the gate: two versions, cell by cell, in turn on the same machine in the same minutes."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.case import Case
from harness.errors import BadInput
from harness.gate import statistics
from harness.gate.findings import TimingSettings, TimingVerdict, TimingWord
from harness.gate.sampling import (
    AGAIN,
    FIRST,
    LOOKS,
    CellFailed,
    Round,
    Sampler,
    VersionProcesses,
    measure_until,
    stack,
)
from harness.gate.statistics import Estimate, Level
from harness.gate.versions import Version

ATTEMPTS = 2  # a process that died in a cell, or refused it, may have been damaged by an earlier one: a fresh one tells
MOST_HANGS = 3  # cells; each costs its whole time limit, and a night has hundreds

Progress = Callable[[int, str], None]


class TimingError(BadInput):
    """Nothing can be timed; the message says why."""


@dataclass
class _Cell:
    """What is known of a case while the night goes on."""

    case: Case
    rounds: list[Round] = field(default_factory=list)
    second: list[Round] = field(default_factory=list)
    failure: CellFailed | None = None
    seconds: float = 0.0


def judge_times(
    base: Version,
    head: Version,
    cases: Sequence[Case],
    settings: TimingSettings,
    *,
    progress: Progress | None = None,
) -> tuple[TimingVerdict, ...]:
    """One verdict a case, in their order. `progress` is told how many cells are done, and what runs now.

    Both versions may be the same tree (A/A). Worker processes are started here and are gone at the end.
    """
    report = progress or (lambda done, running: None)
    seed = random.SystemRandom().randrange(1 << 32) if settings.seed is None else settings.seed
    chance = random.Random(seed)
    level = Level(settings.level, max(1, len(cases)), len(LOOKS))
    cells = [_Cell(case) for case in cases]

    def enough(times: np.ndarray) -> bool:
        found = statistics.estimate(times, seed=seed)
        unchanged = statistics.is_clearly_unchanged(found, settings, level)
        return unchanged or statistics.is_flagged(found, settings)

    with VersionProcesses(base, head, settings) as processes:
        report(0, "starting the processes")
        _start(processes)
        # Neighbours of a grid are alike, and a minute's trouble would hit all of them: in random order it does not.
        for done, cell in enumerate(chance.sample(cells, len(cells))):
            report(done, cell.case.case_id)
            if _hangs(cells) >= MOST_HANGS:
                cell.failure = CellFailed(
                    "both", f"{MOST_HANGS} cells hung before it, and the night must end", died=False
                )
            else:
                _measure(cell, processes, settings, chance, enough=enough)
        flagged = [cell for cell in cells if _is_worth_another_look(cell, settings, level, seed=seed)]
        if flagged and _starts_afresh(processes):
            for cell in flagged:
                if _hangs(cells) >= MOST_HANGS:
                    break
                report(len(cells), f"again: {cell.case.case_id}")
                _measure_again(cell, processes, settings, chance)
        report(len(cells), "")
    return _judge(cells, settings, level, seed=seed)


def _start(processes: VersionProcesses) -> None:
    """Apart from the first cell, so that it is not charged to that."""
    try:
        processes.muster()
    except CellFailed as failure:
        raise TimingError(f"the {failure.side} cannot be timed: {failure.reason}") from None


def _starts_afresh(processes: VersionProcesses) -> bool:
    """Where it does not, what has been measured is judged all the same, and its changes are "not measured again"."""
    processes.dismiss()
    try:
        processes.muster()
    except CellFailed:
        return False
    return True


def _hangs(cells: Sequence[_Cell]) -> int:
    return sum(cell.failure is not None and cell.failure.hung for cell in cells)


def _measure(
    cell: _Cell,
    processes: VersionProcesses,
    settings: TimingSettings,
    chance: random.Random,
    *,
    enough: Callable[[np.ndarray], bool],
) -> None:
    def measure() -> None:
        sampler = Sampler(processes, cell.case, settings, chance=chance)
        cell.rounds = measure_until(
            sampler,
            FIRST * settings.seconds,
            looks=LOOKS,
            enough=enough,
            fewest=statistics.MIN_ROUNDS,
            is_far=lambda times: statistics.is_far(times, settings),
        )

    _attempt(cell, measure)
    if cell.failure is not None and not cell.failure.died:
        cell.failure = _whose(cell.failure, cell, processes, settings, chance)


def _attempt(cell: _Cell, measure: Callable[[], None]) -> None:
    """Once more where a process died or the head refused; not where it hung, which would take its whole time again."""
    started = time.perf_counter()
    for _ in range(ATTEMPTS):
        cell.failure = None
        try:
            measure()
        except CellFailed as failure:
            cell.failure = failure
        if cell.failure is None or cell.failure.hung or not (cell.failure.died or cell.failure.side == "head"):
            break
    cell.seconds += time.perf_counter() - started


def _whose(
    failure: CellFailed, cell: _Cell, processes: VersionProcesses, settings: TimingSettings, chance: random.Random
) -> CellFailed:
    """The base is asked first: when it refuses, the head has not been asked yet."""
    if failure.side != "base":
        return failure
    try:
        Sampler(processes, cell.case, settings, chance=chance).try_head()
    except CellFailed as other:
        return CellFailed("both", other.reason, died=other.died, hung=other.hung)
    return failure


def _measure_again(cell: _Cell, processes: VersionProcesses, settings: TimingSettings, chance: random.Random) -> None:
    def measure() -> None:
        sampler = Sampler(processes, cell.case, settings, chance=chance, blocks=cell.rounds[0].times.shape[0])
        cell.second = measure_until(
            sampler,
            (1 - FIRST) * settings.seconds,
            looks=(AGAIN,),
            enough=lambda times: True,
            fewest=statistics.FEWEST_AGAIN,
            is_far=lambda times: statistics.is_far(times, settings),
        )

    _attempt(cell, measure)


def _is_worth_another_look(cell: _Cell, settings: TimingSettings, level: Level, *, seed: int) -> bool:
    if cell.failure is not None or not cell.rounds:
        return False
    found = statistics.estimate(stack(cell.rounds), seed=seed)
    return found.is_sound and not statistics.is_clearly_unchanged(found, settings, level)


def _judge(cells: Sequence[_Cell], settings: TimingSettings, level: Level, *, seed: int) -> tuple[TimingVerdict, ...]:
    pooled, seconds = [], []
    for cell in cells:
        rounds = [*cell.rounds, *cell.second] if cell.failure is None else []
        pooled.append(statistics.estimate(stack(rounds), seed=seed) if rounds else statistics.NOTHING)
        seconds.append(statistics.change_alone(stack(cell.second)) if cell.second else None)
    # As often as there were looks at which one might have stopped.
    slower = [level.looks * each.p_slower(settings.min_effect) for each in pooled]
    faster = [level.looks * each.p_faster(settings.min_effect) for each in pooled]
    q_slower, q_faster = statistics.adjust(slower), statistics.adjust(faster)
    found_already = sum(q <= settings.level for q in q_slower)
    verdicts = []
    for at, cell in enumerate(cells):
        found, second = pooled[at], seconds[at]
        # The p-value that Benjamini and Hochberg would have asked of this cell, given what the others found.
        rank = found_already + (not q_slower[at] <= settings.level)
        smallest = found.smallest(settings.min_effect, level.alone * rank)
        if cell.failure is not None:
            verdict, reason = _failed(cell.failure, again=bool(cell.rounds))
        elif 0 < len(cell.rounds) < statistics.MIN_ROUNDS and statistics.is_beyond_doubt(stack(cell.rounds)):
            verdict, reason = "regression", _too_slow(cell)
        elif 0 < len(cell.rounds) < statistics.MIN_ROUNDS:
            verdict, reason = "inconclusive", _too_few(cell)
        else:
            verdict, reason = statistics.decide(
                found,
                settings,
                q_slower=q_slower[at],
                q_faster=q_faster[at],
                smallest=smallest,
                second=second,
            )
        p, q = (slower[at], q_slower[at]) if not found.change < 0 else (faster[at], q_faster[at])
        verdicts.append(_verdict(cell, verdict, reason, found, smallest=smallest, p=p, q=q))
    return tuple(verdicts)


def _too_few(cell: _Cell) -> str:
    told = f"{len(cell.rounds)} of the {statistics.MIN_ROUNDS} rounds that it takes in {cell.seconds:.0f} s"
    return f"too slow for its time: {told}; raise --seconds"


def _too_slow(cell: _Cell) -> str:
    factor = math.exp(statistics.raw_change(stack(cell.rounds)))
    return f"{factor:.1f} times as slow, in every round of the {len(cell.rounds)} that it got in {cell.seconds:.0f} s"


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
    cell: _Cell, verdict: TimingWord, reason: str, found: Estimate, *, smallest: float, p: float, q: float
) -> TimingVerdict:
    rounds = [*cell.rounds, *cell.second]
    base, head, reference = _milliseconds(rounds)
    sound = found.is_sound
    # Where there is too little for a claim, what there is is shown all the same.
    change = found.change if sound or cell.failure is not None or not rounds else statistics.raw_change(stack(rounds))
    return TimingVerdict(
        case_id=cell.case.case_id,
        verdict=verdict,
        change=_relative(change),
        lo=_relative(found.lo),
        hi=_relative(found.hi),
        smallest=smallest if math.isfinite(smallest) else None,
        null=_relative(found.null),
        null_lo=_relative(found.null_lo),
        null_hi=_relative(found.null_hi),
        p_value=min(1.0, p) if sound else None,
        q_value=q if sound else None,
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
