"""What the timing part says of one cell, and the settings that it was judged by."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["regression", "pass", "inconclusive", "improvement"]


@dataclass(frozen=True, slots=True)
class TimingSettings:
    """How the timing part measures and judges. Effects are relative: 0.02 is two per cent."""

    min_effect: float = 0.02  # a slowdown must be shown to be larger than this to be a regression
    must_see: float = 0.05  # a cell passes only if a slowdown of this size would have been seen, and is ruled out
    seconds: float = 5.0  # of a cell: 60 % for its first measurement, the rest for measuring it again
    level: float = 0.01  # false discovery rate over all cells of the night, for slowdowns and for gains each
    threads: int = 1
    suite_seed: int = 0  # of the cases' weights and inputs
    seed: int | None = None  # of orders and of the bootstrap; None: another one each night
    timeout_s: float = 120.0  # for building a cell, and for one sample of it
    max_memory: int | None = None  # of each worker, in bytes; None: 80 % of the machine's, shared among the workers


@dataclass(frozen=True, slots=True)
class TimingVerdict:
    """Changes are relative: 0.05 is five per cent slower. `null` is the base against itself in the same rounds."""

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
