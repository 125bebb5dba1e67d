"""What a probe found, and all of it together."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from harness.doctor.noise import Noise

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    name: str
    level: Level
    found: str
    todo: str = ""
    prevents_runs: bool = False

    def __post_init__(self) -> None:
        if self.level != "ok" and not self.todo:
            raise ValueError(f"{self.name}: a finding that is not ok must say what to do")
        if self.prevents_runs and self.level != "bad":
            raise ValueError(f"{self.name}: what prevents runs is bad")


@dataclass(frozen=True)
class Examination:
    findings: tuple[Finding, ...]
    noise: Noise | None  # None where it could not be measured

    @property
    def can_run(self) -> bool:
        return not any(finding.prevents_runs for finding in self.findings)

    @property
    def verdict(self) -> str:
        if not self.can_run:
            return f"runs are impossible here; fix these first: {self._names('bad', prevents_runs=True)}"
        if any(finding.level == "bad" for finding in self.findings) or self.noise is None:
            return f"do not trust timings yet; fix these first: {self._names('bad')}"
        trusted = f"timings can be trusted to ±{100 * self.noise.smallest_effect:.1f} %"
        warned = self._names("warn")
        return f"{trusted}; better still without: {warned}" if warned else trusted

    def _names(self, level: Level, *, prevents_runs: bool = False) -> str:
        chosen = [f.name for f in self.findings if f.level == level and f.prevents_runs >= prevents_runs]
        return ", ".join(chosen)

    def to_json(self) -> dict[str, Any]:
        noise = None if self.noise is None else self.noise.to_json()
        return {
            "verdict": self.verdict,
            "can_run": self.can_run,
            "findings": [asdict(finding) for finding in self.findings],
            "noise": noise,
        }
