"""What the gate says, in types: findings of the exact part, verdicts of the timing part, and the outcome of both."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from harness.case import CASE_FIELDS
from harness.errors import BadInput

# Counts: the same on every machine, so any change is a change of the code.
EXACT = ("params", "ref_params", "kv_cache_bytes", "kv_bytes_per_token", "flops")
PEAK = "peak_bytes"
METRICS = ("rel_l1", "cosine", "sparsity")  # of an approximate kernel, in the place of the error ratio
GATED = ("status", *EXACT, "err_ratio", *METRICS, PEAK)
BASELINE_COLUMNS = ("case_id", *CASE_FIELDS, *GATED)
CellRow = Mapping[Hashable, Any]  # one cell of a table, by column
TimingWord = Literal["regression", "pass", "inconclusive", "improvement"]


def rows_by_id(frame: pd.DataFrame) -> dict[str, CellRow]:
    return {row["case_id"]: row for row in frame.to_dict("records")}


def lacking(frame: pd.DataFrame) -> list[str]:
    """Columns of a baseline that the table does not have."""
    return [name for name in BASELINE_COLUMNS if name not in frame.columns]


def changed(before: CellRow, after: CellRow, columns: Sequence[str]) -> dict[str, str]:
    """Both values in words, of the columns that are not the same; two that are missing are."""
    a, b = ({name: None if pd.isna(row[name]) else row[name] for name in columns} for row in (before, after))
    return {name: f"{show(a[name])} -> {show(b[name])}" for name in columns if a[name] != b[name]}


def show(value: Any) -> str:
    return "empty" if pd.isna(value) else str(value)


class GateError(BadInput):
    """Nothing to judge by; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`case_id` is empty where the finding is about the whole run; `message` is shown after `kind`, unrepeated."""

    case_id: str
    kind: str
    message: str
    fails: bool


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
    verdict: TimingWord
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


@dataclass(frozen=True, slots=True)
class GateOutcome:
    """`base` and `head` say in words what was compared; `cells` are all that the exact part judged."""

    suite: str
    cells: tuple[str, ...]
    findings: tuple[Finding, ...]
    timing: tuple[TimingVerdict, ...] = ()
    base: str | None = None
    head: str | None = None
    strict: bool = False  # an inconclusive cell fails, too
    settings: TimingSettings | None = None  # with the seed: the same night once more
    left_out: tuple[str, ...] = ()  # what was not timed, and why, in words

    @property
    def passed(self) -> bool:
        return self.word == "PASS"

    @property
    def word(self) -> str:
        """The headline."""
        return "FAIL" if self.failing else self.timing_word

    @property
    def timing_word(self) -> str:
        """A night that has decided nothing has shown nothing: it is no pass, either."""
        if any(self.fails(verdict) for verdict in self.timing):
            return "FAIL"
        return "INCONCLUSIVE" if self.timing and self.counts["inconclusive"] == len(self.timing) else "PASS"

    @property
    def failing(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.fails)

    @property
    def notes(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if not finding.fails)

    @property
    def counts(self) -> Counter[str]:
        """Cells by what timing says of them."""
        return Counter(verdict.verdict for verdict in self.timing)

    def fails(self, verdict: TimingVerdict) -> bool:
        # By what is allowed, so that a verdict which nobody has thought of fails.
        allowed = {"pass", "improvement"} if self.strict else {"pass", "improvement", "inconclusive"}
        return verdict.verdict not in allowed

    def timed(self, *verdicts: str) -> tuple[TimingVerdict, ...]:
        """The cells of these verdicts, the largest change first."""
        found = [verdict for verdict in self.timing if verdict.verdict in verdicts]
        return tuple(sorted(found, key=_size, reverse=True))


def _size(verdict: TimingVerdict) -> float:
    if verdict.change is None:
        return 0.0
    return math.inf if math.isnan(verdict.change) else abs(verdict.change)
