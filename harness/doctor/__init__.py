"""Is this machine fit to run and, above all, to time? Each probe looks at one thing and says what to do about it.

Probes take what they judge (text of /proc and /sys, numbers, an environment) as arguments, so that every verdict can be
seen without the machine that earns it. Only `examine` asks the machine itself.
"""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Diagnosis:
    """What a probe found; unless it is ok, also what to do."""

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


def ok(name: str, found: str) -> Diagnosis:
    return Diagnosis(name, "ok", found)


def warn(name: str, found: str, todo: str) -> Diagnosis:
    return Diagnosis(name, "warn", found, todo)


def bad(name: str, found: str, todo: str, *, prevents_runs: bool = False) -> Diagnosis:
    return Diagnosis(name, "bad", found, todo, prevents_runs)
