"""What the study gives: a finding for each saboteur in each cell, what each cell can see, and tables and scores of it.

Nothing here imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import pandas as pd

from harness.case import HALF, Case
from harness.suite.schema import REGIMES

MISMATCH, DEGRADED, ERROR = "mismatch", "degraded", "error"
SURVIVED, NOT_APPLICABLE = "survived", "not applicable"
# An error is an exception or a broken contract while the wrong candidate ran; all three fail a gate.
KILLED = (MISMATCH, DEGRADED, ERROR)
HALF_SCORE = 0.95
AXES = ("mask", "phase", "dtype", "variant")
COLUMNS = ("saboteur", "case_id", *AXES, "seq_len", "batch", "outcome", "by", "tensor", "err_ratio", "message",
           "explanation")  # fmt: skip
CELL_COLUMNS = ("case_id", *AXES, "problem", "applicable", "killed", "regimes_needed", "mismatch_from", "seen_from",
                "seconds")  # fmt: skip


@dataclass(frozen=True)
class SaboteurFinding:
    """What became of one saboteur in one cell."""

    saboteur: str
    outcome: str
    by: str | None = None  # the regime or check that saw it first
    tensor: str | None = None
    err_ratio: float | None = None  # of what killed it; of a survivor the largest that was seen
    message: str = ""
    explanation: str | None = None  # of a survivor: why rounding must hide it here, by the saboteur's own arithmetic


@dataclass(frozen=True)
class Threshold:
    """The smallest relative error of the scale that is a mismatch, and that is seen at all (degraded counts)."""

    mismatch: float | None
    seen: float | None


@dataclass(frozen=True)
class CellResult:
    """`problem`: why the right candidate itself is not ok here; then nothing else can be said of the cell."""

    case: Case
    problem: str | None
    findings: tuple[SaboteurFinding, ...]
    threshold: Threshold | None
    seconds: float

    @property
    def regimes_needed(self) -> tuple[str, ...]:
        """A set that suffices here: each saw a saboteur that those tried before it let by."""
        found = dict.fromkeys(f.by for f in self.findings if f.outcome in (MISMATCH, DEGRADED) and f.by is not None)
        return tuple(sorted(found, key=lambda by: REGIMES.index(by) if by in REGIMES else len(REGIMES)))


@dataclass(frozen=True)
class Study:
    """A finished study: cells in the config's order, and what each saboteur stands for."""

    suite: str
    cells: tuple[CellResult, ...]
    saboteurs: Mapping[str, str]
    seconds: float


@dataclass(frozen=True)
class Score:
    """Of wrong runs: tried, seen at all (degraded counts), and seen as what fails a run: a mismatch, or an error."""

    applicable: int
    killed: int
    failed: int

    @property
    def share(self) -> float | None:
        """None where nothing applies: no score is made up."""
        return self.killed / self.applicable if self.applicable else None

    @property
    def failed_share(self) -> float | None:
        return self.failed / self.applicable if self.applicable else None


@dataclass(frozen=True)
class StudyVerdict:
    """Whether enough was seen: all in full precision but for what is explained, and HALF_SCORE in half types."""

    overall: Score
    full: Score  # float32 and float64
    half: Score
    unexplained_full: int
    broken_cells: int

    @property
    def passed(self) -> bool:
        seen = self.overall.applicable > 0 and self.unexplained_full == 0 and self.broken_cells == 0
        return seen and (self.half.share is None or self.half.share >= HALF_SCORE)


def findings_frame(cells: Sequence[CellResult]) -> pd.DataFrame:
    """One row for each saboteur in each cell whose right candidate is ok."""
    rows = [asdict(cell.case) | {"case_id": cell.case.case_id} | asdict(f) for cell in cells for f in cell.findings]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"err_ratio": "float64"})


def cells_frame(cells: Sequence[CellResult]) -> pd.DataFrame:
    rows = []
    for cell in cells:
        score = score_of(findings_frame([cell]))
        limit = cell.threshold
        rows.append((cell.case.case_id, *(getattr(cell.case, axis) for axis in AXES), cell.problem, score.applicable,
                     score.killed, " ".join(cell.regimes_needed), limit and limit.mismatch, limit and limit.seen,
                     cell.seconds))  # fmt: skip
    frame = pd.DataFrame(rows, columns=list(CELL_COLUMNS))
    return frame.astype({"mismatch_from": "float64", "seen_from": "float64"})


def score_of(findings: pd.DataFrame) -> Score:
    applies = findings["outcome"] != NOT_APPLICABLE
    outcomes = findings["outcome"]
    return Score(int(applies.sum()), int(outcomes.isin(KILLED).sum()), int(outcomes.isin((MISMATCH, ERROR)).sum()))


def scores_by(findings: pd.DataFrame, axis: str) -> dict[str, Score]:
    return {str(value): score_of(rows) for value, rows in findings.groupby(axis, sort=False)}


def survivors(findings: pd.DataFrame) -> pd.DataFrame:
    """The unexplained first, then those that came nearest to being seen last."""
    alive = findings[findings["outcome"] == SURVIVED]
    order = alive.assign(explained=alive["explanation"].notna()).sort_values(["explained", "err_ratio"], kind="stable")
    return alive.loc[order.index]


def saboteurs_frame(findings: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """For each saboteur the counts of its outcomes, and what saw it first in most cells."""
    rows = []
    for name in names:
        own = findings[findings["saboteur"] == name]
        counts = own["outcome"].value_counts()
        by = own.loc[own["outcome"].isin(KILLED), "by"].value_counts()
        mostly = None if by.empty else (by.index[0] if len(by) == 1 else f"{by.index[0]} ({by.iloc[0]}/{by.sum()})")
        rows.append((name, *(int(counts.get(outcome, 0)) for outcome in (*KILLED, SURVIVED, NOT_APPLICABLE)), mostly))
    return pd.DataFrame(rows, columns=["saboteur", *KILLED, SURVIVED, NOT_APPLICABLE, "mostly_by"])


def thresholds_frame(cells: pd.DataFrame) -> pd.DataFrame:
    """Per dtype and phase the median and the worst cell; a cell that sees nothing at all is infinitely bad."""
    judged = cells[cells["problem"].isna()].fillna({"mismatch_from": float("inf"), "seen_from": float("inf")})
    grouped = judged.groupby(["dtype", "phase"], sort=False)
    return grouped.agg(
        cells=("case_id", "count"),
        mismatch_median=("mismatch_from", "median"),
        mismatch_worst=("mismatch_from", "max"),
        seen_median=("seen_from", "median"),
        seen_worst=("seen_from", "max"),
    ).reset_index()


def judge(study: Study) -> StudyVerdict:
    findings = findings_frame(study.cells)
    in_half = findings["dtype"].isin(HALF)
    alive = survivors(findings[~in_half])
    return StudyVerdict(
        overall=score_of(findings),
        full=score_of(findings[~in_half]),
        half=score_of(findings[in_half]),
        unexplained_full=int(alive["explanation"].isna().sum()),
        broken_cells=sum(cell.problem is not None for cell in study.cells),
    )
