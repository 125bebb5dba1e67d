"""Cells -> contests: those that differ in one axis alone, the one that all are held to first."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.case import Case
from harness.variants.specs import OPTIONAL_AXES

# Which axes may differ together with the contest's own: the sizes that only some variants have are part of the variant.
BELONG = {"variant": OPTIONAL_AXES}


@dataclass(frozen=True)
class Contest:
    axis: str
    against: Any  # the value of that axis that all others are held to


def contests(cases: Sequence[Case], contest: Contest) -> list[tuple[Case, ...]]:
    """Where there is no cell to be held to, or more than one, or no other, there is no contest."""
    groups: dict[Case, list[Case]] = {}
    for case in cases:
        differing: dict[str, Any] = dict.fromkeys((contest.axis, *BELONG.get(contest.axis, ())))
        groups.setdefault(replace(case, **differing), []).append(case)
    found = []
    for group in groups.values():
        bases = [case for case in group if getattr(case, contest.axis) == contest.against]
        others = [case for case in group if case not in bases]
        if len(bases) == 1 and others:
            found.append((bases[0], *others))
    return found
