"""What the study finds: one finding for each saboteur in each cell, and what each cell can see. Nothing is torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.case import Case
from harness.document import REGIMES

MISMATCH, DEGRADED, ERROR = "mismatch", "degraded", "error"
SURVIVED, NOT_APPLICABLE = "survived", "not applicable"
# An error is an exception or a broken contract while the wrong candidate ran; all three fail a gate.
KILLED = (MISMATCH, DEGRADED, ERROR)


@dataclass(frozen=True)
class Finding:
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
    findings: tuple[Finding, ...]
    threshold: Threshold | None
    seconds: float

    @property
    def regimes_needed(self) -> tuple[str, ...]:
        """A set that suffices here: each saw a saboteur that those tried before it let by."""
        found = dict.fromkeys(f.by for f in self.findings if f.outcome in (MISMATCH, DEGRADED) and f.by is not None)
        return tuple(sorted(found, key=lambda by: REGIMES.index(by) if by in REGIMES else len(REGIMES)))

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"case_id": self.case.case_id}


@dataclass(frozen=True)
class Study:
    """A finished study: cells in the config's order, and what each saboteur stands for."""

    suite: str
    cells: tuple[CellResult, ...]
    saboteurs: Mapping[str, str]
    seconds: float
