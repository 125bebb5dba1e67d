"""The battery as a row of a run: every call of a kernel that `harness.judge` makes, as one Record."""

from harness.battery.result import Finding, Judgement
from harness.battery.session import judge
from harness.candidate.client import Process
from harness.case import Case
from harness.cell import record_of
from harness.diagnosis.result import Diagnosis
from harness.diagnosis.session import diagnose
from harness.kernels.call import Kernel
from harness.record import Record

SECONDS = 5.0  # for the diagnosis


def ask_all(case: Case, kernel: Kernel, *, seed: int, minutes: float) -> Record:
    """`kernel` is a user's, in the process that it has."""
    assert isinstance(kernel.process, Process)
    found = judge(kernel.process, minutes=minutes, seed=case.seed(seed))
    worst = found.first_failure or found.worst
    diagnosis = diagnose(kernel.process, found, seconds=SECONDS, scripts=False)
    return record_of(
        case,
        status=found.status,
        err_ratio=None if worst is None else worst.err_ratio,
        worst_tensor=None if worst is None else worst.tensor or None,
        calls=found.calls,
        error=_error(found, worst, diagnosis),
        seconds=found.seconds,
        measured_seconds=sum(finding.seconds for finding in found.findings),
        equivalence=[finding.row() for finding in found.findings],
    )


def _error(found: Judgement, worst: Finding | None, diagnosis: Diagnosis | None) -> str | None:
    if found.status == "ok":
        return None
    if found.status == "unsupported":
        return next(iter(found.refused), "nothing was asked")
    if found.status == "degraded":
        worst = next(finding for finding in found.findings if finding.status == "degraded")
    assert worst is not None
    what = "" if diagnosis is None else f"{diagnosis.headline}. "
    return f"{what}{worst.check}: {worst.reason} ({worst.call}); harness judge {found.kernel} --seed {found.seed}"
