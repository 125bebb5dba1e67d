"""What the battery found: immutable; a call that was refused is no failure, a kernel that refuses all is not right."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

    from harness.candidate.request import Request

FAILING = ("mismatch", "error")
# How bad each is; `skipped` says nothing, because torch itself does not answer such a call.
SEVERITY = ("skipped", "refused", "ok", "degraded", "mismatch", "error")


@dataclass(frozen=True)
class Finding:
    """One call, or one check of several calls."""

    group: str
    check: str
    call: str  # in words
    status: str  # of SEVERITY
    reason: str = ""
    tensor: str = ""
    err_ratio: float | None = None  # max|C - G| / N of the worst tensor
    is_outside: bool = False  # beyond what the kernel declares: there it may refuse
    calls: int = 1
    seconds: float = 0.0
    # Of a failure, what was asked: the last is answered wrongly, after those before it. Empty: no single call shows it.
    requests: "tuple[Request, ...]" = field(default=(), repr=False, compare=False)

    def row(self) -> dict[str, Any]:
        """For tables and files: all but the tensors."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "requests"}


@dataclass(frozen=True)
class Judgement:
    kernel: str
    seed: int
    design: str  # in words
    findings: tuple[Finding, ...]
    planned: int  # checks that the whole battery has
    seconds: float
    minutes: float
    is_strict: bool = False
    replaced: tuple[str, ...] = ()  # in torch, numpy or time by the kernel's code; that reached itself alone

    @property
    def status(self) -> str:
        """ok | degraded | mismatch | error | unsupported."""
        worst = max((finding.status for finding in self.findings), key=SEVERITY.index, default="refused")
        return "unsupported" if worst in ("skipped", "refused") else worst

    @property
    def passed(self) -> bool:
        return self.status == "ok" or (self.status == "degraded" and not self.is_strict)

    @property
    def calls(self) -> int:
        return sum(finding.calls for finding in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status in FAILING)

    @property
    def first_failure(self) -> Finding | None:
        return next(iter(self.failures), None)

    @property
    def worst(self) -> Finding | None:
        """Of what was answered and is numbers, the one nearest to its limit, or furthest beyond."""
        judged = [finding for finding in self.findings if finding.err_ratio is not None]
        return max(judged, key=lambda finding: finding.err_ratio or 0.0, default=None)

    @property
    def refused(self) -> dict[str, int]:
        """Reason -> how often."""
        return dict(Counter(finding.reason for finding in self.findings if finding.status == "refused").most_common())

    def table(self) -> "DataFrame":
        """A row for each finding, in the order of the calls."""
        import pandas as pd

        return pd.DataFrame([finding.row() for finding in self.findings])


def worst_of(statuses: Iterable[str]) -> str:
    return max(statuses, key=SEVERITY.index)
