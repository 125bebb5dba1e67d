"""What `harness judge` shows: the verdict, what was covered on one screen, and the first failures in words."""

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from harness.record import OK_FACTOR
from harness.report.table import Column, Table
from harness.report.terminal import print_entry, say
from harness.text import first_line, plain, plural, ratio

if TYPE_CHECKING:
    from harness.battery.result import Finding, Judgement
    from harness.diagnosis.result import Diagnosis

HEADLINES = {
    "ok": ("RIGHT", "bold green"),
    "degraded": ("ROUNDED WORSE", "bold yellow"),
    "unsupported": ("REFUSED EVERYTHING", "bold red"),
    "mismatch": ("WRONG", "bold red"),
    "error": ("WRONG", "bold red"),
}
SHOWN = 3  # failures in words
REASONS = 4  # of refusals


@dataclass(frozen=True)
class _Group:
    name: str
    findings: Sequence["Finding"]

    def count(self, *statuses: str) -> int:
        return sum(finding.status in statuses for finding in self.findings)

    @property
    def worst(self) -> float | None:
        return max((f.err_ratio for f in self.findings if f.err_ratio is not None), default=None)


COLUMNS = (
    Column("asked", lambda group: group.name, left=True),
    Column("checks", lambda group: len(group.findings)),
    Column("calls", lambda group: sum(finding.calls for finding in group.findings)),
    Column("ok", lambda group: group.count("ok")),
    Column("degraded", lambda group: group.count("degraded") or ""),
    Column("wrong", lambda group: group.count("mismatch", "error") or ""),
    Column("refused", lambda group: group.count("refused") or ""),
    Column("error/N", lambda group: ratio(group.worst)),
    Column("s", lambda group: f"{sum(finding.seconds for finding in group.findings):.1f}"),
)


def print_judgement(found: "Judgement", console: Console, diagnosis: "Diagnosis | None" = None) -> None:
    word, style = HEADLINES[found.status]
    asked = plural(len(found.findings), "check", "checks")
    say(
        console,
        Text.assemble((word, style), f"  {plain(found.kernel)}: {asked}, {found.calls:,} calls, {found.seconds:.0f} s"),
    )
    if diagnosis is not None:
        print_diagnosis(diagnosis, console)
    for finding in (shown := _worst_first(found))[: (most := SHOWN if diagnosis is None else 1)]:
        print_entry(console, (finding.status, "red"), f"{finding.group}, {finding.check}", finding.call)
        say(console, f"              {first_line(finding.reason)}")
    if len(shown) > most:
        say(console, f"  and {len(shown) - most} more, see --json")
    console.print()
    groups: dict[str, list[Finding]] = {}
    for finding in found.findings:
        groups.setdefault(finding.group, []).append(finding)
    console.print(Table(COLUMNS, [_Group(name, findings) for name, findings in groups.items()]))
    console.print()
    for reason, count in list(found.refused.items())[:REASONS]:
        say(console, f"refused {count} x: {first_line(reason)}", style="dim")
    if found.replaced:
        say(console, f"its code replaces {', '.join(found.replaced)}; that reaches nothing but itself", style="yellow")
    skipped = Counter(finding.status for finding in found.findings)["skipped"]
    if skipped:
        say(
            console,
            f"{plural(skipped, 'call says', 'calls say')} nothing: torch's own answer is an error, or not finite",
        )
    say(console, *_coverage(found), style="dim")
    say(console, f"error/N: the worst error over its noise floor N, ok up to {OK_FACTOR:g}", style="dim")
    say(console, f"again, with the same numbers: harness judge {plain(found.kernel)} --seed {found.seed}", whole=True)


def print_diagnosis(diagnosis: "Diagnosis", console: Console) -> None:
    """What is wrong, where, and the smallest call that shows it."""
    for mark, words in diagnosis_lines(diagnosis):
        say(console, Text.assemble("  ", (f"{mark:<10}", "bold"), words))
    if diagnosis.place is not None:
        say(console, *(f"            {line}" for line in diagnosis.place.picture), style="dim", whole=True)
    console.print()


def diagnosis_lines(diagnosis: "Diagnosis") -> list[tuple[str, str]]:
    """A word and what is to say of it."""
    lines = [("what", diagnosis.headline)]
    if (place := diagnosis.place) is not None:
        lines += [("where", place.sentence)] if place.sentence != diagnosis.headline else []
        lines += [("", place.worst)] if place.worst else []
    lines += [("", note) for note in diagnosis.notes if note != diagnosis.headline]
    if (shrunk := diagnosis.shrunk) is not None:
        needs = f"; only with {', '.join(shrunk.needs)}" if shrunk.needs else ""
        lines.append(("smallest", f"{shrunk.call}{needs}"))
        lines += [("", f"python {diagnosis.file_name}, or pytest {diagnosis.file_name}")] if shrunk.script else []
    return lines


def judgement_text(found: "Judgement", diagnosis: "Diagnosis | None" = None) -> str:
    """The same without colours, for the message of an assertion; the diagnosis comes first."""
    text = io.StringIO()
    console = Console(file=text, width=120, color_system=None)
    if diagnosis is not None:
        worst = diagnosis.place.worst if diagnosis.place is not None else ""
        say(console, f"{plain(found.kernel)} {diagnosis.headline}", *([worst] if worst else []), whole=True)
        console.print()
    print_judgement(found, console, diagnosis)
    return text.getvalue()


def assert_kernel(kernel: Any, **options: Any) -> "Judgement":
    """For a test: `harness.judge`, and an AssertionError that says what is wrong, where, and how to see it again."""
    from harness.battery.session import judge
    from harness.diagnosis.session import diagnose

    found = judge(kernel, **options)
    if not found.passed:
        raise AssertionError(judgement_text(found, diagnose(kernel, found, scripts=False)))
    return found


def _worst_first(found: "Judgement") -> list["Finding"]:
    """Failures in the order in which they were seen; without any, what is degraded."""
    failures = list(found.failures)
    return failures or [finding for finding in found.findings if finding.status == "degraded"]


def _coverage(found: "Judgement") -> list[str]:
    lines = [found.design] if found.design else []
    if len(found.findings) < found.planned:
        why = "stopped after failures" if found.failures else f"{found.minutes:g} minutes were over"
        lines.append(f"{len(found.findings)} of about {found.planned} checks were asked: {why}")
    return lines
