"""What the timing part says of one cell, and the settings that it was judged by."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["regression", "pass", "inconclusive", "improvement"]


@dataclass(frozen=True, slots=True)
class TimingVerdict:
    """Changes are relative: 0.05 is five per cent slower. `null` is the base against itself in the same blocks."""

    case_id: str
    verdict: Verdict
    change: float | None
    lo: float | None
    hi: float | None
    smallest: float | None  # the smallest slowdown that would have been seen four times in five
    null: float | None
    null_lo: float | None
    null_hi: float | None
    p_value: float | None
    q_value: float | None
    blocks: int
    seconds: float
    remeasured: bool
    base_ms: float | None
    head_ms: float | None
    reference_ms: float | None
    reason: str  # one sentence for people
