"""All that the gate found, in one piece: what its outputs are written from."""

import math
from collections import Counter
from dataclasses import dataclass

from harness.gate.finding import Finding
from harness.gate.verdicts import TimingSettings, TimingVerdict


@dataclass(frozen=True, slots=True)
class Outcome:
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
